"""Drafters: a model that is never out of step, a lookup, a script."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_target import ToyTarget, hashed, plain_greedy

from npusim.errors import ConfigError, InputError
from npusim.speculative import DraftModel, PromptLookup, Scripted, generate
from npusim.stage import Stage

VOCAB = 11
PROMPT = [3, 9, 1, 4, 7]
LOGITS_OF = hashed(vocab_size=VOCAB)


def continuation(tokens: Sequence[int], num_tokens: int) -> list[int]:
    return plain_greedy(LOGITS_OF, tokens, num_tokens)


def draft_request(**changes: object) -> ToyTarget:
    return ToyTarget(**{"max_generation_tokens": 1, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("accepted", range(5))
def test_a_round_keeps_the_last_token_and_what_was_accepted(accepted: int) -> None:
    request = draft_request()
    drafter = DraftModel(request)
    tokens = [*PROMPT, 8]
    draft = drafter.propose(tokens, 4)
    assert request.stored == tokens + draft[:3]
    calls = len(request.calls)
    tokens += [*draft[:accepted], (continuation([*tokens, *draft[:accepted]], 1)[0] + 1) % VOCAB]
    second = drafter.propose(tokens, 4)
    assert request.calls[calls].trimmed == max(0, 3 - accepted)
    caught_up = 1 if accepted == 4 else 0
    assert len(request.calls) - calls == 4 + caught_up
    assert second == continuation(tokens, 4)


def test_ten_rounds_of_any_acceptance_leave_no_lag() -> None:
    random = np.random.default_rng(14)
    request = draft_request(capacity=90)
    drafter = DraftModel(request)
    tokens = [*PROMPT, 8]
    for _ in range(10):
        draft = drafter.propose(tokens, 4)
        assert request.num_stored_tokens - len(tokens) == 3
        fresh = DraftModel(draft_request(capacity=90, max_prompt_len=90))
        assert draft == fresh.propose(tokens, 4)
        tokens += [*draft[: random.integers(0, 5)], int(random.integers(0, VOCAB))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_draft_is_that_of_a_freshly_prefilled_model(data: st.DataObject) -> None:
    """Any sequence after any other, any block size, any limit on going back."""
    request = ToyTarget(
        capacity=data.draw(st.integers(12, 20), "capacity"),
        max_generation_tokens=data.draw(st.integers(1, 4), "block"),
        max_prompt_len=data.draw(st.integers(1, 7), "prompt"),
        rewind_rows=data.draw(st.sampled_from([None, 0, 1, 3]), "rewind"),
    )
    drafter = DraftModel(request)
    sequence = st.lists(st.integers(0, 2), min_size=1, max_size=22)
    for tokens in data.draw(st.lists(sequence, min_size=1, max_size=6), "sequences"):
        wanted = data.draw(st.integers(0, 6), "wanted")
        room = request.capacity - len(tokens) + 1
        assert drafter.propose(tokens, wanted) == continuation(tokens, max(0, min(wanted, room)))


def test_catching_up_takes_the_fewest_blocks() -> None:
    request = ToyTarget(max_generation_tokens=3, max_prompt_len=6)
    drafter = DraftModel(request)
    tokens = [*PROMPT, 8, 0, 2, 2, 5, 1, 6]
    drafter.propose(tokens, 1)
    assert [(call.stage, call.position, len(call.tokens)) for call in request.calls] == [
        (Stage.PREFILL, 0, 6),
        (Stage.GENERATE, 6, 3),
        (Stage.GENERATE, 9, 3),
    ]


def test_the_same_sequence_again_feeds_only_its_last_token() -> None:
    request = ToyTarget()
    drafter = DraftModel(request)
    first = drafter.propose(PROMPT, 2)
    calls = len(request.calls)
    assert drafter.propose(PROMPT, 2) == first
    assert [call.tokens for call in request.calls[calls:]] == [(7,), (first[0],)]


def test_a_rewind_that_the_cache_cannot_do_becomes_a_prefill() -> None:
    request = ToyTarget(rewind_rows=1)
    drafter = DraftModel(request)
    drafter.propose(PROMPT, 5)
    calls = len(request.calls)
    other = [*PROMPT, 0, 0]
    assert drafter.propose(other, 2) == continuation(other, 2)
    assert request.calls[calls].stage is Stage.PREFILL


def test_a_request_used_elsewhere_is_noticed() -> None:
    request = ToyTarget()
    drafter = DraftModel(request)
    drafter.propose(PROMPT, 3)
    request.reset_state()
    assert drafter.propose(PROMPT, 3) == continuation(PROMPT, 3)


@pytest.mark.parametrize("call", range(5))
def test_a_draft_model_that_fails_is_in_step_at_the_next_call(call: int) -> None:
    request = ToyTarget(max_generation_tokens=2, max_prompt_len=4, refuse_calls=frozenset({call}))
    drafter = DraftModel(request)
    with pytest.raises(RuntimeError, match="toy: this inference fails"):
        drafter.propose([*PROMPT, 2], 6)
    other = [*PROMPT, 6, 6]
    assert drafter.propose(other, 4) == continuation(other, 4)


@pytest.mark.parametrize(("capacity", "expected"), [(8, 4), (7, 3), (6, 2), (5, 1), (4, 0)])
def test_near_its_capacity_it_drafts_fewer(capacity: int, expected: int) -> None:
    request = ToyTarget(capacity=capacity)
    assert DraftModel(request).propose(PROMPT, 4) == continuation(PROMPT, expected)


def test_a_small_draft_runs_out_and_the_target_goes_on_alone() -> None:
    target, draft = ToyTarget(capacity=40), ToyTarget(capacity=12, max_generation_tokens=1)
    result = generate(target, PROMPT, max_new_tokens=30, drafter=DraftModel(draft))
    assert result.tokens == continuation(PROMPT, 30)
    assert [step.proposed for step in result.steps[:3]] == [4, 2, 0]
    assert result.steps[0].accepted == 4


def test_drafter_and_target_may_be_the_same_kind_of_model_with_other_weights() -> None:
    draft = ToyTarget(logits_of=hashed(vocab_size=VOCAB, seed=2), capacity=70)
    target = ToyTarget(capacity=70)
    drafter = DraftModel(draft)
    for prompt in (PROMPT, PROMPT[:2], [6], [*PROMPT, 1, 1]):
        result = generate(target, prompt, max_new_tokens=20, drafter=drafter, num_draft_tokens=3)
        assert result.tokens == continuation(prompt, 20)


def test_a_draft_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="at least one token to continue"):
        DraftModel(ToyTarget()).propose([], 3)


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "expected"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], 2, [9, 8]),  # the tail of 3
        ([1, 2, 3, 9, 8, 1, 2, 3], 9, [9, 8, 1, 2, 3]),  # no more than there is
        ([5, 3, 7, 0, 4, 3], 2, [7, 0]),  # falls back to a tail of 1
        ([3, 1, 4, 3, 2, 4, 3], 1, [2]),  # a tail of 2 beats one of 1, which is found twice
        ([3, 1, 0, 3, 2, 0, 3], 1, [2]),  # of equal tails the newest
        ([4, 4, 4, 4], 3, [4]),  # an overlapping occurrence
        ([6, 6, 5, 6, 6], 3, [5, 6, 6]),  # newest that is followed by enough, else the oldest
        ([1, 2, 3], 4, []),
        ([7], 4, []),
        ([], 4, []),
        ([1, 1, 1], 0, []),
    ],
)
def test_lookup_copies_what_followed_the_longest_tail(
    tokens: list[int], num_tokens: int, expected: list[int]
) -> None:
    assert PromptLookup(3).propose(tokens, num_tokens) == expected


def test_lookup_looks_no_further_back_than_its_longest_tail() -> None:
    tokens = [1, 2, 3, 9, 0, 2, 3, 8, 1, 2, 3]
    assert PromptLookup(3).propose(tokens, 1) == [9]
    assert PromptLookup(2).propose(tokens, 1) == [8]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=24), st.integers(1, 4), st.integers(0, 6))
def test_lookup_equals_a_naive_search(tokens: list[int], max_ngram: int, num_tokens: int) -> None:
    def naive() -> list[int]:
        for size in range(max_ngram, 0, -1):
            found = [
                tokens[at + size :][:num_tokens]
                for at in range(len(tokens) - size)
                if tokens[at : at + size] == tokens[len(tokens) - size :]
            ]
            full = [text for text in found if len(text) == num_tokens]
            if found:
                return full[-1] if full else found[0]
        return []

    assert PromptLookup(max_ngram).propose(tokens, num_tokens) == naive()


@pytest.mark.parametrize("max_ngram", [0, -1, 1.5, True, "3", None])
def test_lookup_takes_a_tail_of_at_least_one(max_ngram: object) -> None:
    with pytest.raises(ConfigError, match=f"max_ngram is {max_ngram!r}; a lookup needs a tail of 1 or more"):
        PromptLookup(max_ngram)


def test_lookup_takes_any_integer_type() -> None:
    tokens = list(range(300)) * 2
    assert PromptLookup(np.uint8(3)).propose(tokens, 2) == PromptLookup(3).propose(tokens, 2) == [0, 1]


def test_a_script_is_asked_with_the_sequence_and_the_number() -> None:
    assert Scripted(lambda tokens, n: (tokens[-1], n)).propose([4, 6], 3) == [6, 3]
