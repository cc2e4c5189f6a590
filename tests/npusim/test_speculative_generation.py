"""The decode loop on an exact toy target: lossless, within every limit, and honest about what it did."""

from collections.abc import Iterable, Sequence
from itertools import cycle, product

import numpy as np
import pytest
from acceptance_patterns import PatternDrafter
from toy_target import Call, ToyTarget, hashed, plain_greedy

from npusim.errors import InputError, ModelError, TrimError
from npusim.speculative import FinishReason, Greedy, PromptLookup, Scripted, generate
from npusim.stage import Stage

VOCAB = 11
PROMPT = [3, 9, 1, 4, 7]
HASHED = hashed(vocab_size=VOCAB)
TRUTH = plain_greedy(HASHED, PROMPT, 60)


def truth_after(tokens: Sequence[int], num_tokens: int) -> list[int]:
    done = len(tokens) - len(PROMPT)
    return TRUTH[done : done + num_tokens]


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def drafter_of(pattern: Iterable[str]) -> PatternDrafter:
    return PatternDrafter(cycle(pattern), PROMPT + TRUTH, VOCAB)


@pytest.mark.parametrize("num_draft_tokens", range(1, 8))
def test_every_acceptance_pattern_gives_the_tokens_of_plain_greedy(num_draft_tokens: int) -> None:
    for pattern in product("RWX", repeat=6):
        drafter = drafter_of(pattern)
        target = ToyTarget(capacity=70)
        result = generate(
            target, PROMPT, max_new_tokens=29, drafter=drafter, num_draft_tokens=num_draft_tokens
        )
        assert result.tokens == TRUTH[:29], pattern
        drafted = [step.accepted for step in result.steps if step.proposed]
        assert drafted == drafter.accepted, pattern
        assert target.stored == PROMPT + TRUTH[:28], pattern


def test_plain_greedy_is_the_same_loop_without_a_drafter() -> None:
    target = ToyTarget()
    result = generate(target, PROMPT, max_new_tokens=4)
    assert result.tokens == TRUTH[:4]
    assert result.finish_reason is FinishReason.LENGTH
    assert target.calls == [
        Call(Stage.PREFILL, 0, tuple(PROMPT), 0),
        Call(Stage.GENERATE, 5, (TRUTH[0],), 0),
        Call(Stage.GENERATE, 6, (TRUTH[1],), 0),
        Call(Stage.GENERATE, 7, (TRUTH[2],), 0),
    ]
    assert result.tokens_per_target_step == 1.0
    assert result.acceptance_rate == 0.0


def test_blocks_start_at_the_last_token_so_that_the_target_trims_what_was_rejected() -> None:
    target = ToyTarget()

    def wrong_at_1(tokens: Sequence[int], num_tokens: int) -> list[int]:
        return [
            wrong(token) if place == 1 else token
            for place, token in enumerate(truth_after(tokens, num_tokens))
        ]

    drafter = Scripted(wrong_at_1)
    result = generate(target, PROMPT, max_new_tokens=7, drafter=drafter, num_draft_tokens=3)
    assert result.tokens == TRUTH[:7]
    assert [(call.position, call.trimmed) for call in target.calls] == [(0, 0), (5, 0), (7, 2), (9, 2)]
    assert [(s.proposed, s.accepted, s.emitted) for s in result.steps] == [(3, 1, 2), (3, 1, 2), (1, 1, 2)]
    assert result.acceptance_rate == 3 / 7
    assert result.tokens_per_target_step == 2.0


def test_a_prompt_of_one_token_is_a_generate_step_at_position_0() -> None:
    target = ToyTarget()
    generate(target, PROMPT, max_new_tokens=3)
    result = generate(target, [6], max_new_tokens=3)
    assert target.calls[-3] == Call(Stage.GENERATE, 0, (6,), 0)
    assert result.tokens == plain_greedy(HASHED, [6], 3)


def test_a_prompt_of_one_token_begins_as_fresh_as_a_prefill() -> None:
    target = ToyTarget(rewind_rows=4)  # rows enough for one block, counted from the highest ever written
    generate(target, PROMPT, max_new_tokens=30)
    drafter = Scripted(lambda tokens, n: [wrong(token) for token in plain_greedy(HASHED, tokens, n)])
    result = generate(target, [6], max_new_tokens=9, drafter=drafter, num_draft_tokens=4)
    assert result.tokens == plain_greedy(HASHED, [6], 9)


def test_what_a_drafter_does_to_its_list_does_not_reach_the_sequence() -> None:
    def hungry(tokens: Sequence[int], num_tokens: int) -> list[int]:
        assert isinstance(tokens, list)
        draft = truth_after(tokens, num_tokens)
        tokens.clear()
        return draft

    target = ToyTarget(max_generation_tokens=4)
    got = generate(target, PROMPT, max_new_tokens=9, drafter=Scripted(hungry), num_draft_tokens=3)
    assert got.tokens == plain_greedy(HASHED, PROMPT, 9)


def test_a_numpy_prompt_is_a_prompt() -> None:
    assert generate(ToyTarget(), np.array(PROMPT, dtype=np.int32), max_new_tokens=6).tokens == TRUTH[:6]


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_the_end_token_inside_an_accepted_draft_ends_the_generation(at: int, num_draft_tokens: int) -> None:
    eos = TRUTH[at]
    until = TRUTH.index(eos) + 1
    target = ToyTarget()
    result = generate(
        target,
        PROMPT,
        max_new_tokens=30,
        drafter=Scripted(truth_after),
        num_draft_tokens=num_draft_tokens,
        eos_token_id=eos,
    )
    assert result.tokens == TRUTH[:until]
    assert result.finish_reason is FinishReason.EOS
    assert target.stored == PROMPT + TRUTH[: until - 1]
    assert 1 + sum(step.emitted for step in result.steps) == until
    assert all(step.accepted <= step.emitted <= step.accepted + 1 for step in result.steps)


def test_a_cache_that_cannot_go_back_costs_no_result_that_is_complete() -> None:
    target = ToyTarget(rewind_rows=0)
    drafter = Scripted(lambda tokens, n: [*truth_after(tokens, 2), 0][:n])
    eos = TRUTH[1]
    result = generate(target, PROMPT, max_new_tokens=8, drafter=drafter, num_draft_tokens=3, eos_token_id=eos)
    assert result.tokens == TRUTH[:2]
    assert target.stored == [*PROMPT, *TRUTH[:3], 0]
    with pytest.raises(TrimError, match="toy: cannot go back to 8"):
        generate(target, PROMPT, max_new_tokens=8, drafter=drafter, num_draft_tokens=3)


def test_an_end_token_that_the_target_rejects_does_not_end_anything() -> None:
    eos = next(token for token in range(VOCAB) if token not in TRUTH[:8])
    drafter = Scripted(lambda tokens, n: [*truth_after(tokens, 1), eos, 0, 0][:n])
    result = generate(ToyTarget(), PROMPT, max_new_tokens=8, drafter=drafter, eos_token_id=eos)
    assert result.tokens == TRUTH[:8]
    assert result.finish_reason is FinishReason.LENGTH


def test_the_end_token_wins_over_the_length_that_it_also_reaches() -> None:
    end = TRUTH[1]
    assert end != TRUTH[0]
    result = generate(ToyTarget(), PROMPT, max_new_tokens=2, eos_token_id=end)
    assert result.finish_reason is FinishReason.EOS


@pytest.mark.parametrize("num_draft_tokens", range(8))
def test_a_prompt_of_8_and_a_capacity_of_11_give_exactly_4_tokens(num_draft_tokens: int) -> None:
    prompt = [2, 5, 2, 8, 1, 1, 0, 4]
    expected = plain_greedy(HASHED, prompt, 4)
    target = ToyTarget(capacity=11, max_prompt_len=8)
    drafter = (
        Scripted(lambda tokens, n: (expected + [0] * 9)[len(tokens) - 8 :][:n]) if num_draft_tokens else None
    )
    result = generate(target, prompt, max_new_tokens=50, drafter=drafter, num_draft_tokens=num_draft_tokens)
    assert result.tokens == expected
    assert result.finish_reason is FinishReason.CAPACITY
    assert target.num_stored_tokens == 11
    again = generate(target, prompt[:3], max_new_tokens=2)
    assert again.tokens == plain_greedy(HASHED, prompt[:3], 2)


@pytest.mark.parametrize("capacity", range(5, 15))
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("max_generation_tokens", [2, 3, 8])
def test_blocks_fit_capacity_block_size_and_the_tokens_wanted(
    capacity: int, max_new_tokens: int, max_generation_tokens: int
) -> None:
    expected = min(max_new_tokens, capacity - len(PROMPT) + 1)
    target = ToyTarget(capacity=capacity, max_generation_tokens=max_generation_tokens)
    result = generate(
        target,
        PROMPT,
        max_new_tokens=max_new_tokens,
        drafter=Scripted(truth_after),
        num_draft_tokens=6,
    )
    assert result.tokens == TRUTH[:expected]
    full = FinishReason.LENGTH if expected == max_new_tokens else FinishReason.CAPACITY
    assert result.finish_reason is full
    widest = min(max_generation_tokens, 7)
    assert len(result.steps) == -(-(expected - 1) // widest), "every block is as wide as it may be"


@pytest.mark.parametrize("max_num", range(4))
def test_a_drafter_may_propose_fewer_or_none(max_num: int) -> None:
    lengths = cycle(range(max_num + 1))
    drafter = Scripted(lambda tokens, n: truth_after(tokens, min(n, next(lengths))))
    result = generate(ToyTarget(), PROMPT, max_new_tokens=25, drafter=drafter)
    assert result.tokens == TRUTH[:25]
    assert max(step.proposed for step in result.steps) == max_num


def test_a_lookup_on_repeating_text_is_accepted_and_lossless() -> None:
    logits_of = hashed(vocab_size=VOCAB, seed=5, context=1)  # one successor per token: runs into a cycle
    target = ToyTarget(logits_of=logits_of)
    result = generate(target, PROMPT, max_new_tokens=40, drafter=PromptLookup(2), num_draft_tokens=5)
    assert result.tokens == plain_greedy(logits_of, PROMPT, 40)
    assert result.tokens_per_target_step > 2.5


def test_no_token_wanted_leaves_the_target_alone() -> None:
    target = ToyTarget()
    result = generate(target, PROMPT, max_new_tokens=0)
    assert (result.tokens, result.steps, target.calls) == ([], (), [])
    assert (result.acceptance_rate, result.tokens_per_target_step) == (0.0, 0.0)


@pytest.mark.parametrize("call", range(4))
def test_a_target_that_fails_at_any_call_serves_the_next_generation(call: int) -> None:
    target = ToyTarget(refuse_calls=frozenset({call}))
    drafter = drafter_of("XR")
    with pytest.raises(RuntimeError, match="toy: this inference fails"):
        generate(target, PROMPT, max_new_tokens=20, drafter=drafter, num_draft_tokens=2)
    again = drafter_of("RX")
    assert generate(target, PROMPT, max_new_tokens=20, drafter=again, num_draft_tokens=2).tokens == TRUTH[:20]


def test_a_target_that_fell_behind_is_an_error_and_would_have_given_other_tokens() -> None:
    target = ToyTarget()
    with pytest.raises(InputError, match="a gap, position 5 with 0 stored"):
        generate(target, PROMPT, max_new_tokens=9, on_step=lambda _: target.reset_state())
    silent = HASHED((TRUTH[0],))  # the same block taken where the target then stands
    right = HASHED((*PROMPT, TRUTH[0]))
    assert np.abs(silent - right).max() > 0.1


def test_logits_of_fewer_rows_than_the_block_are_refused() -> None:
    class LastRowOnly(ToyTarget):
        def infer(self, inputs, *, share_outputs=False):  # type: ignore[no-untyped-def]
            return {"logits": super().infer(inputs, share_outputs=share_outputs)["logits"][:, -1:]}

    assert generate(LastRowOnly(), PROMPT, max_new_tokens=5).tokens == TRUTH[:5]
    with pytest.raises(ModelError, match="returned 1 rows of logits for a block of 3 tokens at position 5"):
        generate(LastRowOnly(), PROMPT, max_new_tokens=5, drafter=Scripted(truth_after), num_draft_tokens=2)


def test_only_the_newest_rows_of_padded_logits_count() -> None:
    class PaddedRows(ToyTarget):
        def infer(self, inputs, *, share_outputs=False):  # type: ignore[no-untyped-def]
            rows = super().infer(inputs, share_outputs=share_outputs)["logits"]
            junk = np.full((1, 8 - rows.shape[1] % 8, rows.shape[2]), 1e3, dtype=np.float32)
            junk[..., 0] = 1e4
            return {"logits": np.concatenate([junk, rows], axis=1)}

    result = generate(PaddedRows(), PROMPT, max_new_tokens=19, drafter=drafter_of("RXW"))
    assert result.tokens == TRUTH[:19]


def test_greedy_takes_the_lowest_id_of_equals_and_refuses_what_is_no_number() -> None:
    rows = np.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]], dtype=np.float32)
    assert Greedy().verifier().verify(rows, [1]) == [1, 0]
    assert Greedy().verifier().verify(rows, [2]) == [1]
    rows[1, 2] = np.nan
    assert Greedy().verifier().verify(rows, [2]) == [1], "a row after a rejection is not looked at"
    with pytest.raises(ModelError, match="row 1 are not numbers: NaN at token 2"):
        Greedy().verifier().verify(rows, [1])


class Named:
    """An integer of another type."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_numbers_of_any_integer_type() -> None:
    target, prompt = ToyTarget(capacity=300, max_prompt_len=64), [3] * 60
    plain = generate(target, prompt, max_new_tokens=200)
    drafts = {"drafter": Scripted(truth_after), "num_draft_tokens": np.uint8(3)}
    assert len(plain.tokens) == 200
    assert generate(target, prompt, max_new_tokens=np.uint8(200)) == plain
    assert generate(target, prompt, max_new_tokens=Named(200), **drafts).tokens == plain.tokens
    ended = generate(target, PROMPT, max_new_tokens=40, eos_token_id=Named(TRUTH[4]))
    assert (ended.tokens, ended.finish_reason) == (TRUTH[: TRUTH.index(TRUTH[4]) + 1], FinishReason.EOS)
