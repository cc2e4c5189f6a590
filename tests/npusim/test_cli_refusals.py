"""Wrong usage and unusable files: one message, exit code 2."""

from pathlib import Path

import pytest
from cli_driving import LLAMA

from npusim import byte_vocabulary
from npusim.cli.main import main
from npusim.cli.parsers import parse_config, sized_config
from npusim.errors import ConfigError


@pytest.mark.parametrize("command", [["check"], ["run", "--prompt-ids", "1,2"]])
def test_unusable_files(error_of, tmp_path, command):
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
        (["--draft", "absent.onnx"], "absent.onnx"),
    ],
)
def test_bad_settings(error_of, options, message):
    assert message in error_of("run", LLAMA, "--prompt-ids", "1,2,3", "--max-new-tokens", "4", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-draft", "3"], "--num-draft does nothing without --draft;"),
        (["--draft-trace", "d.jsonl"], "--draft-trace does nothing without --draft;"),
        (
            ["--draft", "lookup", "--draft-trace", "d.jsonl"],
            "--draft-trace does nothing without a draft model",
        ),
        (["--top-k", "0"], "--top-k does nothing without a --temperature above 0"),
        (["--top-p", "0.9", "--temperature", "0"], "--top-p does nothing without a --temperature above 0"),
        (["--seed", "0"], "--seed does nothing without a --temperature above 0"),
    ],
)
def test_an_option_that_would_do_nothing(error_of, options, message):
    assert message in error_of("run", "absent.onnx", "--prompt-ids", "1", *options)


def test_what_the_positions_of_a_model_do_not_hold(error_of):
    """The tables of both models have rows for 512 and 1024 positions."""
    message = error_of("run", LLAMA, "--prompt-ids", "1,2,3", "--max-new-tokens", "511")
    assert f"{LLAMA}: a prompt of 3 tokens and 511 new ones need 513 positions" in message
    assert "lower --max-new-tokens" in message
    assert "23 tokens and 1003 new ones" in error_of("demo", "--max-new-tokens", "1003", "--prompt", "a" * 22)


def test_tokens_outside_the_vocabulary(error_of):
    assert "259" in error_of("run", LLAMA, "--prompt-ids", "1,259", "--max-new-tokens", "4")


def test_text_for_another_vocabulary(error_of, monkeypatch):
    monkeypatch.setattr(byte_vocabulary, "VOCAB_SIZE", 300)
    message = error_of("run", LLAMA, "--prompt", "abc", "--max-new-tokens", "4")
    assert "tokenize elsewhere and give --prompt-ids" in message


@pytest.mark.parametrize("command", [[], ["check"], ["check", LLAMA]])
def test_what_is_left_over_points_to_the_help_of_its_command(capsys, command):
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--walk"])
    program = " ".join(["npusim", *command[:1]])
    said = capsys.readouterr().err
    assert said.endswith(f"see {program} --help\n")
    assert "--walk" in said or command == ["check"]  # which lacks its model


@pytest.mark.parametrize(
    "arguments",
    [
        ["walk"],
        ["run", LLAMA],
        ["run", LLAMA, "--prompt-ids", ""],
        ["run", LLAMA, "--prompt-ids", "1,x"],
        ["run", LLAMA, "--prompt-ids", "1", "--prompt", "a"],
        ["run", LLAMA, "--prompt-ids", "1", "--max-new-tokens", "0"],
        ["run", LLAMA, "--prompt-ids", "1", "--num-draft", "two"],
        *(
            ["run", LLAMA, "--prompt-ids", "1", *pair.split()]
            for pair in (
                "--temperature -1",
                "--temperature nan",
                "--temperature inf",
                "--temperature warm",
                "--temperature 1 --top-p 1.5",
                "--temperature 1 --top-p 0",
                "--temperature 1 --top-p nan",
                "--temperature 1 --top-k -1",
                "--temperature 1 --top-k 1.5",
                "--temperature 1 --seed -1",
                "--eos -1",
                "--eos 1.0",
                "--max-new 3",  # an abbreviation
            )
        ),
        ["run", LLAMA, "--prompt", "\udcff\udcfe"],  # bytes that are no UTF-8
        ["demo", "--prompt", "\udcff\udcfe"],
        ["demo", "--js"],
        ["replay", "run.jsonl", LLAMA, "--js"],
        ["check"],
    ],
)
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("npusim: error: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(" --help\n")


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
    chunk = sized_config({"NPUW_LLM_PREFILL_CHUNK_SIZE": "100"}, prompt_len=1, max_new_tokens=7)
    assert chunk["NPUW_LLM_MAX_PROMPT_LEN"] == 100


@pytest.mark.parametrize(
    ("prompt_len", "expected"),
    [(64, 64), (65, 128), (90, 91), (91, 91)],
)
def test_a_prompt_is_rounded_as_far_as_there_are_positions(prompt_len, expected):
    """Of 137 positions 46 less one are for the response; the smallest of the models decides."""
    limits = {"large": 1024, "any": None, "small": 200 if expected == 128 else 136}
    sizes = sized_config({}, prompt_len=prompt_len, max_new_tokens=46, max_positions=limits)
    assert sizes["NPUW_LLM_MAX_PROMPT_LEN"] == expected


def test_a_prompt_beyond_the_positions_is_refused():
    limits = {"large": 1024, "small": 136}
    with pytest.raises(ConfigError, match="small: a prompt of 92 tokens and 46 new ones need 137 positions"):
        sized_config({}, prompt_len=92, max_new_tokens=46, max_positions=limits)
    with pytest.raises(ConfigError, match="a prompt of 92 tokens and 50 new ones"):
        sized_config(
            {"NPUW_LLM_MIN_RESPONSE_LEN": "50"}, prompt_len=92, max_new_tokens=4, max_positions=limits
        )
    given = {"NPUW_LLM_MAX_PROMPT_LEN": "300"}
    sizes = sized_config(given, prompt_len=92, max_new_tokens=46, max_positions=limits)
    assert sizes["NPUW_LLM_MAX_PROMPT_LEN"] == "300", "what was asked for is left to the compilation"


@pytest.mark.parametrize(
    ("settings", "block_len", "expected"),
    [
        (["NPUSIM_KV_LAYOUT=rolling"], 3, "DEFERRED"),
        (["NPUSIM_KV_LAYOUT=ROLLING"], 1, None),
        (["NPUSIM_KV_LAYOUT=RING"], 3, None),
        (["NPUSIM_KV_LAYOUT=ROLLING", "NPUSIM_COMMIT=EAGER"], 3, "EAGER"),
    ],
)
def test_a_rolling_layout_commits_deferred_with_drafts(settings, block_len, expected):
    sizes = sized_config(parse_config(settings), prompt_len=5, max_new_tokens=9, block_len=block_len)
    assert sizes.get("NPUSIM_COMMIT") == expected
