"""What each refusal prevents: with the check taken out, the same call answers wrongly, without an error."""

from __future__ import annotations

import numpy as np
import pytest
from driving import Setup, compiled, ort_logits
from driving import feed as feed_file
from tiny_llm import TINY, assert_fresh, error_of, feed, new_request, text

import npusim.step_inputs
from npusim import InputError, LLMInferRequest, TrimError
from npusim.kv_manager import KVManager

WRONG = 0.1
"""Logits off by this are another answer: right ones are within 2e-5."""


@pytest.fixture
def trims_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "_layers_that_cannot_trim", lambda _self, _num_tokens: [])


@pytest.fixture
def gaps_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the check of positions nor the one behind it, that a trim goes back."""
    monkeypatch.setattr(npusim.step_inputs, "_check_positions", lambda _step, _num_stored_tokens: None)
    monkeypatch.setattr(KVManager, "check_trim", lambda _self, num_tokens: num_tokens)


def stored_20(layout: str, commit: str) -> tuple[LLMInferRequest, list[int]]:
    """A prompt of 14 and two blocks of 3."""
    request, tokens = new_request(layout=layout, commit=commit), text(20)
    for start, stop in ((0, 14), (14, 17), (17, 20)):
        feed(request, tokens[start:stop], start)
    return request, tokens


# The layout, the policy, and a length to which it can go back no more.
GONE = [
    ("RING", "EAGER", 15),
    ("RING", "DEFERRED", 16),
    ("ROLLING", "EAGER", 19),
    ("ROLLING", "DEFERRED", 16),
]


@pytest.mark.parametrize(("layout", "commit", "num_tokens"), GONE)
def test_a_rewind_to_rows_that_are_gone_is_refused(layout: str, commit: str, num_tokens: int) -> None:
    request, tokens = stored_20(layout, commit)
    assert not request.can_trim(num_tokens)
    message = (
        rf"trim from 20 to {num_tokens} tokens: layers \[0, 2\] .* a query at position {num_tokens} needs"
    )
    with pytest.raises(TrimError, match=message):
        feed(request, [9, 4], num_tokens)
    assert_fresh(TINY, feed(request, [9, 4], 20), [*tokens, 9, 4])


@pytest.mark.usefixtures("trims_unchecked")
@pytest.mark.parametrize(("layout", "commit", "num_tokens"), GONE)
def test_without_the_check_the_rewind_answers_wrongly(layout: str, commit: str, num_tokens: int) -> None:
    request, tokens = stored_20(layout, commit)
    logits = feed(request, [9, 4], num_tokens)
    assert error_of(TINY, logits, [*tokens[:num_tokens], 9, 4]) > WRONG
    # the check is all that was taken out: where the rows are there, the answer is right
    right, tokens = stored_20("LINEAR", commit)
    assert_fresh(TINY, feed(right, [9, 4], num_tokens), [*tokens[:num_tokens], 9, 4])


@pytest.mark.usefixtures("trims_unchecked")
@pytest.mark.parametrize(("layout", "block"), [("RING", 4), ("ROLLING", 4)])
def test_without_the_check_a_model_file_answers_wrongly(layout: str, block: int) -> None:
    setup = Setup(prompt=20, response=21, block=block, layout=layout)
    request = compiled("gemma3_alternating", setup).create_infer_request()
    tokens = np.random.default_rng(3).integers(0, 256, 30).tolist()
    for start, stop in ((0, 20), (20, 24), (24, 28)):
        feed_file(request, tokens[start:stop], start)
    logits = feed_file(request, tokens[28:], 22)
    expected = ort_logits("gemma3_alternating", [*tokens[:22], *tokens[28:]])[-2:]
    assert np.abs(logits - expected).max() > 0.01


def test_a_gap_is_refused() -> None:
    request, tokens = stored_20("LINEAR", "EAGER")
    message = (
        r"begins at 22, but 20 tokens are stored: positions 20\.\.21 would be a gap; begin at 20 or before"
    )
    with pytest.raises(InputError, match=message):
        feed(request, [9, 4], 22)
    assert_fresh(TINY, feed(request, [9, 4], 20), [*tokens, 9, 4])


@pytest.mark.usefixtures("gaps_unchecked")
@pytest.mark.parametrize("layout", ["LINEAR", "GATHERED", "ROLLING", "RING"])
def test_without_the_check_a_gap_is_filled_with_what_was_there(layout: str) -> None:
    """Two tokens were never fed: the answer is neither that with them nor that without them."""
    request, tokens = stored_20(layout, "EAGER")
    logits = feed(request, [9, 4], 22)
    for missing in ((), (1, 2), (3, 3)):
        assert error_of(TINY, logits, [*tokens, *missing, 9, 4]) > WRONG
    assert request.num_stored_tokens == 24


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_a_target_that_is_behind_is_an_error_for_who_gives_positions(commit: str) -> None:
    """A harness went on counting while its target lost a block: a call that failed, a trim it forgot."""
    request, tokens = stored_20("LINEAR", commit)
    request.trim(17)
    with pytest.raises(InputError, match="begins at 20, but 17 tokens are stored"):
        feed(request, [9, 4], 20)
    assert request.num_stored_tokens == 17
    # Without positions the block is put where the target is: the answer to another conversation.
    logits = request.infer({"input_ids": [[9, 4]]})["logits"]
    assert error_of(TINY, logits, [*tokens, 9, 4]) > WRONG
    assert_fresh(TINY, logits, [*tokens[:17], 9, 4])


@pytest.mark.usefixtures("gaps_unchecked")
def test_without_the_check_a_target_that_is_behind_reads_its_own_rejected_rows() -> None:
    request, tokens = stored_20("LINEAR", "EAGER")
    request.trim(17)
    feed(request, [5, 6, 7], 17)
    request.trim(17)
    logits = feed(request, [9, 4], 20)  # rows 17..19 are those of 5, 6, 7, which were rejected
    assert error_of(TINY, logits, [*tokens, 9, 4]) > WRONG
    assert_fresh(TINY, logits, [*tokens[:17], 5, 6, 7, 9, 4])
