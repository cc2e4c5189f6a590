"""`npusim demo`: what it promises, and that it fails where the promise is broken."""

import pytest
from cli_driving import TARGET, native_greedy

from npusim import byte_vocabulary, speculative
from npusim.cli import demo as demo_command
from npusim.cli import demo_report
from npusim.cli.main import main
from npusim.native import NativeModel
from npusim.parity import StepParity


def test_every_step_matches_and_drafting_changes_nothing(run_json):
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
def test_it_holds_under_other_settings(run_json, settings):
    options = [part for setting in settings for part in ("-c", setting)]
    result = run_json("demo", "--max-new-tokens", "20", "--num-draft", "3", *options)
    assert result["matches"]


def test_a_rounded_cache_is_allowed_its_rounding_and_what_a_near_tie_makes_of_it(run_json):
    prompt = ("--prompt", "Return a list of", "--max-new-tokens", "40")
    result = run_json("demo", *prompt, "-c", "NPUSIM_KV_PRECISION=F16")
    assert result["matches"]
    assert result["cache_rounds"]
    assert not result["lossless"]
    assert 1e-4 < result["worst_difference"] < result["tolerance"] == 0.02


def test_text_and_numbers_are_printed(capsys):
    assert main(["demo", "--max-new-tokens", "24", "--prompt", "Raise an error if "]) == 0
    printed = capsys.readouterr().out
    assert "prompt        Raise an error if \n" in printed
    assert "with drafts" in printed
    assert " steps) match the native run" in printed
    assert "drafting changed no token" in printed


def test_a_single_wrong_step_is_found_and_fails(monkeypatch, capsys):
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


def part(tokens: list[int], difference: float) -> demo_report.Part:
    step = StepParity(position=0, num_tokens=1, max_abs_difference=difference)
    generation = speculative.Generation(
        tokens=tokens, steps=(), finish_reason=speculative.FinishReason.LENGTH
    )
    return demo_report.Part(generation=generation, parity=(step,), kv_nbytes=1)


@pytest.mark.parametrize(
    ("plain", "drafted", "cache_rounds", "said"),
    [
        (part([3, 4], 1e-5), part([3, 4], 1e-4), False, "drafting changed no token"),
        (part([3, 4], 1e-5), part([3, 5], 1e-5), False, "MISMATCH: drafting changed the tokens"),
        (part([3, 4], 1e-5), part([3, 4], 2e-4), False, "MISMATCH: 1 of 2 calls"),
        (part([3, 4], 2e-4), part([3, 4], 1e-5), False, "MISMATCH: 1 of 2 calls"),
        (
            part([3, 4], 1e-5),
            part([3, 5], 2e-2),
            True,
            "changed the tokens, at a near tie: the float16 cache",
        ),
        (part([3, 4], 1e-5), part([3, 5], 3e-2), True, "MISMATCH: drafting changed the tokens"),
    ],
)
def test_what_matches(capsys, plain, drafted, cache_rounds, said):
    result = demo_report.DemoResult(prompt="", cache_rounds=cache_rounds, plain=plain, drafted=drafted)
    demo_report.print_result(result)
    printed = capsys.readouterr().out
    assert said in printed
    assert result.matches is ("MISMATCH" not in printed)
