"""What the decode loop tells of its steps while it runs."""

from itertools import cycle

import pytest
from acceptance_patterns import PatternDrafter
from toy_target import ToyTarget, hashed, plain_greedy

from npusim.speculative import Step, generate
from npusim.trace import StepRecord

VOCAB = 11
PROMPT = [3, 9, 1, 4, 7]
TRUTH = plain_greedy(hashed(vocab_size=VOCAB), PROMPT, 20)


def drafter() -> PatternDrafter:
    """Right and wrong drafts in turn."""
    return PatternDrafter(cycle("RX"), PROMPT + TRUTH, VOCAB)


def test_on_step_sees_every_call_of_the_target_prefill_first() -> None:
    seen: list[Step] = []
    result = generate(
        ToyTarget(),
        PROMPT,
        max_new_tokens=10,
        drafter=drafter(),
        num_draft_tokens=3,
        on_step=seen.append,
    )
    assert seen[0] == Step(position=0, proposed=0, accepted=0, tokens=(TRUTH[0],))
    assert tuple(seen[1:]) == result.steps
    assert [token for step in seen for token in step.tokens] == TRUTH[:10]


def test_on_step_gets_the_record_of_its_call_and_the_listener_goes_on_hearing() -> None:
    seen: list[Step] = []
    heard: list[StepRecord] = []
    target = ToyTarget()
    target.step_listener = listener = heard.append
    generate(
        target,
        PROMPT,
        max_new_tokens=9,
        drafter=drafter(),
        num_draft_tokens=2,
        on_step=seen.append,
    )
    assert [step.record for step in seen] == heard
    assert [(step.record.stage, step.record.positions[0]) for step in seen if step.record] == [
        (call.stage, call.position) for call in target.calls
    ]
    assert target.step_listener is listener
    with pytest.raises(KeyError):
        generate(target, PROMPT, max_new_tokens=9, on_step=lambda _: {}["stop"])
    assert target.step_listener is listener


def test_a_target_that_keeps_no_records_gives_none() -> None:
    seen: list[Step] = []
    target = ToyTarget()
    del target.step_listener
    target._record = lambda *_, **__: None  # type: ignore[method-assign]
    generate(target, PROMPT, max_new_tokens=3, on_step=seen.append)
    assert [step.record for step in seen] == [None] * 3
