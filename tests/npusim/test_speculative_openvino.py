"""A stateful OpenVINO model behind the request interface: rewinds are exact, and so is what follows."""

from collections.abc import Callable, Sequence

import numpy as np
import openvino as ov
import pytest
from stateful_models import PROMPT, fresh_logits, llama, small_attention, target_of

from npusim.speculative import DraftModel, FinishReason, PromptLookup, Scripted, generate
from npusim.speculative.target import feed


def fresh_greedy(build: Callable[[], ov.Model], prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(fresh_logits(build, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


both = pytest.mark.parametrize("build", [llama, small_attention])


@both
def test_a_rewind_leaves_the_logits_of_a_fresh_run(build: Callable[[], ov.Model]) -> None:
    target = target_of(build)
    feed(target, PROMPT, 0)
    accepted = list(PROMPT)
    for kept, block in [(1, [9, 2, 2, 5]), (4, [4, 8, 1, 0]), (2, [6, 6]), (1, [2, 19, 3, 3, 3, 12])]:
        rows = feed(target, block, len(accepted))
        expected = fresh_logits(build, [*accepted, *block])[-len(block) :]
        np.testing.assert_allclose(rows, expected, atol=1e-5)
        accepted += block[:kept]
    assert target.num_stored_tokens == len(accepted) + 5
    assert target.trim(len(accepted)) == 5
    rows = feed(target, [14], len(accepted))
    np.testing.assert_allclose(rows, fresh_logits(build, [*accepted, 14])[-1:], atol=1e-5)


@both
def test_without_the_rewind_rejected_rows_would_be_history(build: Callable[[], ov.Model]) -> None:
    """What the adapter is there for: OpenVINO's request continues after whatever it holds."""
    target = target_of(build)
    feed(target, [*PROMPT, 9, 2], 0)
    silent = feed(target, [4], len(PROMPT) + 2).copy()
    right = feed(target, [4], len(PROMPT))
    assert np.abs(silent - right).max() > 1e-2
    np.testing.assert_allclose(right, fresh_logits(build, [*PROMPT, 4])[-1:], atol=1e-5)


@both
def test_speculative_equals_plain_greedy(build: Callable[[], ov.Model]) -> None:
    truth = fresh_greedy(build, PROMPT, 18)
    assert generate(target_of(build), PROMPT, max_new_tokens=18).tokens == truth
    wrong_at_2 = Scripted(
        lambda tokens, n: [
            (token + (place == 2)) % 23 for place, token in enumerate(truth[len(tokens) - 6 :][:n])
        ]
    )
    for drafter in (PromptLookup(), wrong_at_2, DraftModel(target_of(build))):
        target = target_of(build)
        result = generate(target, PROMPT, max_new_tokens=18, drafter=drafter)
        assert result.tokens == truth
        assert target.num_stored_tokens == len(PROMPT) + 17
    assert result.tokens_per_target_step > 4, "a model that drafts for itself is always right"


def test_the_capacity_ends_a_generation() -> None:
    target = target_of(capacity=11, max_prompt_len=8)
    result = generate(target, [*PROMPT, 5, 2], max_new_tokens=50, drafter=PromptLookup())
    assert (len(result.tokens), result.finish_reason) == (4, FinishReason.CAPACITY)
    assert target.num_stored_tokens == 11


def test_a_prefill_and_a_reset_begin_anew() -> None:
    target = target_of()
    first = feed(target, PROMPT, 0).copy()
    feed(target, [1, 2], 6)
    np.testing.assert_array_equal(feed(target, PROMPT, 0), first)
    assert target.num_stored_tokens == 6
    target.reset_state()
    assert target.num_stored_tokens == 0
    np.testing.assert_array_equal(feed(target, PROMPT, 0), first)


def test_positions_left_out_continue() -> None:
    target = target_of()
    feed(target, PROMPT, 0)
    logits = target.infer({"input_ids": np.array([[4, 4]])})["logits"]
    np.testing.assert_allclose(logits[0], fresh_logits(small_attention, [*PROMPT, 4, 4])[-2:], atol=1e-5)
