"""The commands as a person uses them: what they print, how they fail, what they exit with."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import npusim
from npusim import byte_vocabulary, speculative
from npusim.cli import check as check_command
from npusim.cli import demo as demo_command
from npusim.cli import run as run_command
from npusim.cli.main import main
from npusim.cli.parsers import parse_config, sized_config
from npusim.config import OPTIONS
from npusim.native import NativeModel
from npusim.parity import ParityTarget, StepParity

TESTS = Path(__file__).parents[1]
LLAMA = str(TESTS / "models" / "llama.onnx")
SOFTCAP = str(TESTS / "models" / "gemma2_softcap.onnx")
TARGET = str(TESTS.parent / "npusim" / "models" / "swa_target.onnx")
DRAFT = str(TESTS.parent / "npusim" / "models" / "swa_draft.onnx")
PROMPT = "Return a list of the "


native_model = functools.cache(NativeModel)


def native_greedy(path: str, prompt_ids: list[int], count: int) -> list[int]:
    """Greedy tokens by the native reference alone."""
    model = native_model(path)
    model.reset()
    row = model.feed(prompt_ids)[0, -1]
    tokens = [int(row.argmax())]
    while len(tokens) < count:
        tokens.append(int(model.feed(tokens[-1:])[0, -1].argmax()))
    return tokens


@pytest.fixture
def run_json(capsys):
    """Run a command that must succeed with --json; its object, when it is all of stdout."""

    def call(*arguments: str, code: int = 0) -> dict:
        assert main([*arguments, "--json"]) == code
        captured = capsys.readouterr()
        assert captured.err == ""  # no progress bar where stderr is no terminal
        return json.loads(captured.out)

    return call


@pytest.fixture
def error_of(capsys):
    """Run a command that must be refused; its message."""

    def call(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("npusim: error: ")
        assert "Traceback" not in captured.err
        return captured.err

    return call


class TestRun:
    def test_tokens_are_those_of_the_native_model(self, run_json):
        prompt_ids = [257, 72, 105, 33, 7]
        result = run_json("run", LLAMA, "--prompt-ids", "257,72,105,33,7", "--max-new-tokens", "11")
        assert result["prompt_ids"] == prompt_ids
        assert result["tokens"] == native_greedy(LLAMA, prompt_ids, 11)
        assert result["finish_reason"] == "length"
        assert result["num_stored_tokens"] == len(prompt_ids) + 10
        assert result["config"]["NPUW_LLM_MAX_PROMPT_LEN"] == 64
        assert result["config"]["NPUW_LLM_MIN_RESPONSE_LEN"] == 11
        assert result["capacity"] == 64 + 11 - 1
        assert result["kv_nbytes"] == 4 * 2 * result["capacity"] * 2 * 16 * 4  # layers, K+V, C, heads, D, f32

    def test_drafts_change_the_steps_but_no_token(self, run_json):
        arguments = ("run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "40")
        plain = run_json(*arguments)
        drafted = run_json(*arguments, "--draft", DRAFT, "--num-draft", "3")
        looked_up = run_json(*arguments, "--draft", "lookup", "--num-draft", "2")
        assert plain["tokens"] == drafted["tokens"] == looked_up["tokens"]
        assert plain["tokens"] == native_greedy(TARGET, byte_vocabulary.encode(PROMPT), 40)
        assert len(plain["steps"]) == 39
        assert len(drafted["steps"]) < 20
        assert {step["proposed"] for step in drafted["steps"]} >= {3}
        assert drafted["config"]["NPUW_LLM_MAX_GENERATION_TOKEN_LEN"] == 4
        assert looked_up["config"]["NPUW_LLM_MAX_GENERATION_TOKEN_LEN"] == 3
        assert drafted["acceptance_rate"] > 0.3 > plain["acceptance_rate"]

    def test_text_is_printed_for_the_byte_vocabulary(self, capsys):
        assert main(["run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "20"]) == 0
        printed = capsys.readouterr().out
        text = byte_vocabulary.decode(native_greedy(TARGET, byte_vocabulary.encode(PROMPT), 20))
        assert f"continuation  {text}\n" in printed
        assert "length after 20 new tokens" in printed

    def test_the_end_token_ends(self, run_json):
        tokens = native_greedy(LLAMA, [5, 6, 7], 9)
        end = next(token for token in tokens if tokens.index(token) >= 2)
        kept = tokens[: tokens.index(end) + 1]
        result = run_json("run", LLAMA, "--prompt-ids", "5,6,7", "--max-new-tokens", "9", "--eos", str(end))
        assert (result["tokens"], result["finish_reason"]) == (kept, "eos")

    def test_sampling_repeats_with_its_seed(self, run_json):
        arguments = ("run", LLAMA, "--prompt-ids", "9,8", "--max-new-tokens", "12", "--temperature", "1.5")
        first, again = (run_json(*arguments, "--seed", "3")["tokens"] for _ in range(2))
        cut = run_json(*arguments, "--seed", "4", "--top-k", "1")["tokens"]
        assert first == again != cut
        assert cut == native_greedy(LLAMA, [9, 8], 12)

    def test_settings_reach_the_model(self, run_json):
        result = run_json(
            *("run", LLAMA, "--prompt-ids", "1,2,3,4,5,6,7", "--max-new-tokens", "6"),
            *("-c", "NPUW_LLM_MAX_PROMPT_LEN=9", "-c", "NPUW_LLM_PREFILL_CHUNK_SIZE = 3"),
            *("--config", "NPUSIM_KV_PRECISION=F16"),
        )
        assert result["capacity"] == 9 + 6 - 1
        assert result["kv_nbytes"] == 4 * 2 * 14 * 2 * 16 * 2
        assert result["tokens"] == native_greedy(LLAMA, [1, 2, 3, 4, 5, 6, 7], 6)


class TestDemo:
    def test_every_step_matches_and_drafting_changes_nothing(self, run_json):
        result = run_json("demo", "--max-new-tokens", "30")
        assert result["matches"]
        assert result["lossless"]
        assert result["prompt"] == demo_command.DEFAULT_PROMPT
        expected = native_greedy(TARGET, byte_vocabulary.encode(result["prompt"]), 30)
        assert result["plain"]["tokens"] == result["speculative"]["tokens"] == expected
        assert result["text"] == byte_vocabulary.decode(expected)
        assert len(result["plain"]["steps"]) == 30
        assert result["plain"]["steps"][-1]["position"] == 22 + 28  # past the window of 32
        assert result["speculative"]["target_steps"] < 15
        assert 0 < result["worst_difference"] <= result["tolerance"] == 1e-4
        assert result["plain"]["kv_nbytes"] > 0

    @pytest.mark.parametrize(
        "settings",
        [
            ("NPUW_LLM_PREFILL_HINT=STATIC",),
            ("NPUW_LLM_PREFILL_CHUNK_SIZE=5", "NPUSIM_SANITIZE=YES", "NPUSIM_COMMIT=DEFERRED"),
        ],
    )
    def test_it_holds_under_other_settings(self, run_json, settings):
        options = [part for setting in settings for part in ("-c", setting)]
        result = run_json("demo", "--max-new-tokens", "20", "--num-draft", "3", *options)
        assert result["matches"]

    def test_a_rounded_cache_is_allowed_its_rounding(self, run_json):
        result = run_json("demo", "--max-new-tokens", "12", "-c", "NPUSIM_KV_PRECISION=F16")
        assert result["matches"]
        assert 1e-4 < result["worst_difference"] < result["tolerance"] == 0.02

    def test_text_and_numbers_are_printed(self, capsys):
        assert main(["demo", "--max-new-tokens", "24", "--prompt", "Raise an error if "]) == 0
        printed = capsys.readouterr().out
        assert "prompt        Raise an error if \n" in printed
        assert "with drafts" in printed
        assert "steps match the native run" in printed
        assert "drafting changed no token" in printed

    def test_a_single_wrong_step_is_found_and_fails(self, monkeypatch, capsys):
        right = NativeModel.feed

        def wrong(self, tokens):
            logits = right(self, tokens)
            if self.num_stored_tokens == 30:
                logits[0, -1, 100] += 2e-3
            return logits

        monkeypatch.setattr(NativeModel, "feed", wrong)
        assert main(["demo", "--max-new-tokens", "12"]) == 1
        printed = capsys.readouterr().out
        assert "MISMATCH: " in printed
        assert "differ from the native run by more than 0.0001" in printed
        assert "2.0e-03" in printed

    def test_other_tokens_with_drafts_fail(self):
        def part(tokens: list[int], difference: float) -> demo_command.Part:
            step = StepParity(position=0, num_tokens=1, max_abs_difference=difference)
            generation = speculative.Generation(
                tokens=tokens, steps=(), finish_reason=speculative.FinishReason.LENGTH
            )
            return demo_command.Part(generation=generation, parity=(step,), kv_nbytes=1)

        def matches(*parts: demo_command.Part) -> bool:
            return demo_command.DemoResult(
                prompt="", tolerance=1e-4, plain=parts[0], drafted=parts[1]
            ).matches

        assert matches(part([3, 4], 1e-5), part([3, 4], 1e-4))
        assert not matches(part([3, 4], 1e-5), part([3, 5], 1e-5))
        assert not matches(part([3, 4], 1e-5), part([3, 4], 2e-4))
        assert not matches(part([3, 4], 2e-4), part([3, 4], 1e-5))


class TestCheck:
    def test_a_model_that_runs(self, capsys):
        assert main(["check", TARGET]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split() for line in lines[1:5]] == [
            ["0", "6/2", "x", "16", "32", "-", "half-split,", "1024", "yes", "float32", "-"],
            ["1", "6/2", "x", "16", "-", "-", "half-split,", "1024", "-", "float32", "-"],
            ["2", "6/2", "x", "16", "32", "-", "half-split,", "1024", "yes", "float32", "-"],
            ["3", "6/2", "x", "16", "-", "-", "half-split,", "1024", "-", "float32", "-"],
        ]
        assert lines[5] == "4 attention layers, all run"

    def test_a_refused_model(self, capsys):
        assert main(["check", SOFTCAP]) == 1
        printed = capsys.readouterr().out
        assert printed.count("softcap=50: only softcap=0 is lowered") == 4
        assert "4 attention layers, 4 refused: the model does not run" in printed

    def test_json(self, run_json):
        report = run_json("check", str(TESTS / "models" / "gptoss_attention.onnx"))
        assert report["runs"] is True
        assert report["layers"][2] == {
            "index": 2,
            "name": "/model/layers.2/attn/GroupQueryAttention",
            "num_heads": 4,
            "kv_num_heads": 2,
            "head_size": 16,
            "local_window_size": 8,
            "causal": True,
            "sink": "head_sink",
            "rotary": {"form": "half-split", "rotated_channels": 16, "partial": False, "table_length": 512},
            "sliding_window_cache": True,
            "kv_cache_type": "float32",
            "softcap": 0.0,
            "refusals": [],
        }
        refused = run_json("check", SOFTCAP, code=1)
        assert refused["layers"][0]["softcap"] == 50
        assert refused["layers"][3]["refusals"] == ["softcap=50: only softcap=0 is lowered"]


class TestTrace:
    def test_a_trace_is_replayed_bit_for_bit(self, run_json, tmp_path):
        trace = str(tmp_path / "run.jsonl")
        run_json(
            *("run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "20"),
            *("--draft", "lookup", "--num-draft", "3", "--trace", trace, "-c", "NPUSIM_COMMIT=DEFERRED"),
        )
        lines = [json.loads(line) for line in Path(trace).read_text().splitlines()]
        assert lines[0]["config"]["NPUSIM_COMMIT"] == "DEFERRED"
        assert lines[0]["config"]["NPUW_LLM_MAX_GENERATION_TOKEN_LEN"] == "4"
        assert [line["stage"] for line in lines[1:3]] == ["prefill", "generate"]
        result = run_json("replay", trace, TARGET)
        assert result["records"] == result["num_equal"] == len(lines) - 1
        assert result["difference"] is None

    def test_the_first_difference_is_named(self, tmp_path, capsys):
        trace = tmp_path / "run.jsonl"
        assert (
            main(["run", LLAMA, "--prompt-ids", "4,5", "--max-new-tokens", "6", "--trace", str(trace)]) == 0
        )
        assert main(["replay", str(trace), LLAMA]) == 0
        assert "all 6 calls came out the same, bit for bit" in capsys.readouterr().out
        lines = trace.read_text().splitlines()
        lines[4] = lines[4].replace('"logits_sha256": "', '"logits_sha256": "0')
        trace.write_text("\n".join(lines))
        assert main(["replay", str(trace), LLAMA]) == 1
        assert "DIFFERENT after 3 of 6 calls: record 3, logits_sha256" in capsys.readouterr().out

    def test_what_cannot_be_replayed_is_refused(self, tmp_path, error_of, capsys):
        trace = tmp_path / "run.jsonl"
        assert (
            main(["run", LLAMA, "--prompt-ids", "4,5", "--max-new-tokens", "2", "--trace", str(trace)]) == 0
        )
        capsys.readouterr()
        assert "the trace was made with" in error_of("replay", str(trace), TARGET)
        assert "no such file" in error_of("replay", str(trace), "absent.onnx")
        assert "cannot be opened" in error_of("replay", str(tmp_path / "absent.jsonl"), LLAMA)
        trace.write_text(trace.read_text()[:-20])
        assert "line 3" in error_of("replay", str(trace), LLAMA)
        assert "cannot be written" in error_of(
            "run", LLAMA, "--prompt-ids", "4,5", "--trace", str(tmp_path / "absent" / "run.jsonl")
        )


class TestRefusals:
    @pytest.mark.parametrize("command", [["check"], ["run", "--prompt-ids", "1,2"]])
    def test_unusable_files(self, error_of, tmp_path, command):
        cut = tmp_path / "cut.onnx"
        cut.write_bytes(Path(LLAMA).read_bytes()[:5000])
        name, *options = command
        assert "absent.onnx" in error_of(name, str(tmp_path / "absent.onnx"), *options)
        assert "cut.onnx" in error_of(name, str(cut), *options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["-c", "NPUW_LLM_MAX_PROMPT=5"], "NPUW_LLM_MAX_PROMPT_LEN"),
            (["-c", "NPUSIM_SANITIZE"], "a setting is KEY=VALUE"),
            (["-c", "=3"], "a setting is KEY=VALUE"),
            (["-c", "NPUSIM_SANITIZE=NO", "-c", "NPUSIM_SANITIZE=YES"], "NPUSIM_SANITIZE is given twice"),
            (["-c", "NPUW_LLM_MAX_PROMPT_LEN=2"], "NPUW_LLM_MAX_PROMPT_LEN"),
            (["-c", "NPUSIM_KV_LAYOUT=SPIRAL"], "SPIRAL"),
            (["--eos", "999"], "999"),
            (["--temperature", "-1"], "temperature"),
            (["--top-p", "1.5"], "top_p"),
            (["--draft", "absent.onnx"], "absent.onnx"),
        ],
    )
    def test_bad_settings(self, error_of, options, message):
        assert message in error_of("run", LLAMA, "--prompt-ids", "1,2,3", "--max-new-tokens", "4", *options)

    def test_tokens_outside_the_vocabulary(self, error_of):
        assert "259" in error_of("run", LLAMA, "--prompt-ids", "1,259", "--max-new-tokens", "4")

    def test_text_for_another_vocabulary(self, error_of, monkeypatch):
        monkeypatch.setattr(byte_vocabulary, "VOCAB_SIZE", 300)
        message = error_of("run", LLAMA, "--prompt", "abc", "--max-new-tokens", "4")
        assert "tokenize elsewhere and give --prompt-ids" in message

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["walk"],
            ["run", LLAMA],
            ["run", LLAMA, "--prompt-ids", ""],
            ["run", LLAMA, "--prompt-ids", "1,x"],
            ["run", LLAMA, "--prompt-ids", "1", "--prompt", "a"],
            ["run", LLAMA, "--prompt-ids", "1", "--max-new-tokens", "0"],
            ["run", LLAMA, "--prompt-ids", "1", "--num-draft", "two"],
            ["check"],
        ],
    )
    def test_wrong_usage(self, capsys, arguments):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "usage: npusim" in captured.err


class TestHelp:
    @pytest.mark.parametrize("command", ["run", "demo", "check", "replay"])
    def test_each_command_teaches(self, capsys, command):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        printed = capsys.readouterr().out
        assert "examples:\n" in printed
        assert max(map(len, printed.splitlines())) <= 100

    @pytest.mark.parametrize("command", ["run", "demo"])
    def test_every_setting_is_listed(self, capsys, command):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        printed = capsys.readouterr().out
        for option in OPTIONS:
            assert f"{option.key}  (default {option.default})" in printed

    def test_all_commands_are_listed(self, capsys):
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        printed = capsys.readouterr().out
        for command in ("demo", "run", "check", "replay"):
            assert f"\n    {command} " in printed


class TestEndings:
    def test_an_interrupt_is_one_line(self, monkeypatch, capsys):
        def interrupted(_):
            raise KeyboardInterrupt

        monkeypatch.setattr(check_command, "check_model", interrupted)
        assert main(["check", LLAMA]) == 130
        assert capsys.readouterr().err == "npusim: interrupted\n"

    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_reader_that_goes_away_is_no_error(self, options):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "npusim.cli.main", "check", SOFTCAP, *options],
                stdout=writing,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        finally:
            os.close(writing)
        assert (done.returncode, done.stderr) == (141, "")


def test_text_goes_through_the_byte_vocabulary_and_back():
    text = "Zähle bis 3 – ok"
    tokens = byte_vocabulary.encode(text)
    assert tokens[0] == 257
    assert len(tokens) == 1 + len(text.encode())
    assert byte_vocabulary.decode([*tokens, 258]) == text
    assert byte_vocabulary.decode([0xC3, 65]) == "�A"


def test_control_characters_of_a_model_do_not_reach_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(run_command.byte_vocabulary, "decode", lambda _: "a\x1b[31m[bold]b\tc")
    assert main(["run", LLAMA, "--prompt-ids", "1", "--max-new-tokens", "2"]) == 0
    assert "continuation  a\\x1b[31m[bold]b\\tc\n" in capsys.readouterr().out


def test_sizes_left_open_fit_the_run_and_given_ones_stay():
    sizes = sized_config({}, prompt_len=65, max_new_tokens=7, block_len=3)
    assert sizes == {
        "NPUW_LLM_MAX_PROMPT_LEN": 128,
        "NPUW_LLM_MIN_RESPONSE_LEN": 7,
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 3,
    }
    assert sized_config({}, prompt_len=64, max_new_tokens=1)["NPUW_LLM_MAX_PROMPT_LEN"] == 64
    given = parse_config(["NPUW_LLM_MIN_RESPONSE_LEN=5", "NPUSIM_SANITIZE = YES"])
    sizes = sized_config(given, prompt_len=1, max_new_tokens=7)
    assert (sizes["NPUW_LLM_MIN_RESPONSE_LEN"], sizes["NPUSIM_SANITIZE"]) == ("5", "YES")


def test_parity_follows_a_rejected_draft_back():
    config = {"NPUW_LLM_MAX_PROMPT_LEN": 8, "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 3}
    request = npusim.compile_model(LLAMA, config).create_infer_request()
    watched = ParityTarget(request, NativeModel(LLAMA))

    def infer(tokens: list[int], position: int) -> None:
        positions = np.arange(position, position + len(tokens))
        watched.infer({"input_ids": np.array([tokens]), "position_ids": positions[None]})

    infer([3, 1, 4, 1, 5], 0)
    infer([9, 2, 6], 5)
    infer([5, 3], 6)  # 2 and 6 were rejected
    assert watched.num_stored_tokens == request.num_stored_tokens == 8
    infer([7, 7], 0)  # a new conversation
    watched.reset_state()
    infer([8, 9], 0)
    assert [(step.position, step.num_tokens) for step in watched.steps] == [
        (0, 5),
        (5, 3),
        (6, 2),
        (0, 2),
        (0, 2),
    ]
    assert 0 < max(step.max_abs_difference for step in watched.steps) < 1e-5


@pytest.mark.parametrize(
    ("wrong", "difference"), [(2.5, 2.5), (-2.5, 2.5), (np.nan, np.inf), (np.inf, np.inf)]
)
def test_parity_names_the_largest_difference(wrong, difference):
    class Zeros:
        """Stands for a request whose logits are 0."""

        def infer(self, inputs, *, share_outputs=False):
            assert not share_outputs
            return {"logits": np.zeros((1, inputs["input_ids"].shape[1], 5), np.float32)}

    class Wrong:
        """Stands for a reference with one other logit, in the first of the rows."""

        def trim(self, num_tokens):
            return num_tokens

        def feed(self, tokens):
            logits = np.full((1, len(tokens), 5), 0.5, np.float32)
            logits[0, 0, 3] = wrong
            return logits

    watched = ParityTarget(Zeros(), Wrong())
    watched.infer({"input_ids": np.array([[1, 2, 3]]), "position_ids": np.array([[4, 5, 6]])})
    assert watched.steps == [StepParity(position=4, num_tokens=3, max_abs_difference=difference)]
