"""Replaying the records of a trace."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_target import ToyTarget, hashed

from npusim.errors import CapacityError, InputError
from npusim.replay import Difference, ReplayResult, replay
from npusim.speculative import PromptLookup, Scripted, generate
from npusim.stage import Stage
from npusim.trace import StepRecord, TraceError, TraceHeader, TraceWriter, step_values
from npusim.trace_reader import read_trace

HEADER = TraceHeader(
    model_sha256="ab12", weights_sha256={}, config={}, npusim_version="0.1.0", openvino_version="2026.4.1"
)


def toy(capacity: int = 30, refuse_calls: frozenset[int] = frozenset()) -> ToyTarget:
    """A cache that can go back by one block from the highest position since its last reset."""
    return ToyTarget(capacity=capacity, rewind_rows=3, refuse_calls=refuse_calls)


def recorded() -> list[StepRecord]:
    """Records of a generation with rejected drafts, a reset, single-token prompts and a refused call."""
    records: list[StepRecord] = []
    target = toy()
    target.step_listener = records.append
    flawed = Scripted(lambda tokens, n: [tokens[-1]] * n)
    generate(target, [3, 9, 1, 4], max_new_tokens=9, drafter=flawed, num_draft_tokens=3)
    with pytest.raises(CapacityError, match="toy: 18 tokens"):
        target.infer({"input_ids": np.ones((1, 18), int), "position_ids": np.arange(18)[None]})
    target.infer({"input_ids": np.array([[5]]), "position_ids": np.array([[12]])})
    target.reset_state()
    generate(target, [6], max_new_tokens=9, drafter=flawed, num_draft_tokens=2)
    return records


class Untraced:
    """Only what any request has."""

    def __init__(self, target: ToyTarget) -> None:
        self._target = target

    def infer(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self._target.infer(inputs)

    def reset_state(self) -> None:
        self._target.reset_state()


@pytest.mark.parametrize("wrap", [lambda target: target, Untraced])
def test_a_replay_reproduces_every_record(wrap: Callable[[ToyTarget], ToyTarget]) -> None:
    records = recorded()
    assert {record.error for record in records} == {"", "CapacityError"}
    assert any(record.trimmed for record in records)
    used = toy()
    generate(used, [1, 1, 1], max_new_tokens=20)
    assert replay(records, wrap(used)) == ReplayResult(num_equal=len(records), difference=None)


def test_a_replay_begins_with_an_empty_cache() -> None:
    records: list[StepRecord] = []
    target = toy()
    target.step_listener = records.append
    with pytest.raises(InputError, match="toy: a gap"):
        target.infer({"input_ids": np.array([[4]]), "position_ids": np.array([[3]])})
    used = toy()
    generate(used, [1, 1, 1], max_new_tokens=2)
    assert replay(records, used).difference is None


def test_a_replay_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    target = ToyTarget(capacity=30)
    with TraceWriter(path, HEADER) as writer:
        target.step_listener = writer.write
        generate(target, [3, 9, 1], max_new_tokens=6, drafter=PromptLookup())
    assert replay(read_trace(path).records, ToyTarget(capacity=30)).difference is None


@pytest.mark.parametrize("index", [1, 4, 7])
@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("logits_sha256", "00", "00"),
        ("error", "TrimError", "TrimError"),
        ("trimmed", 55, "55"),
        ("stage", Stage.PREFILL, "prefill"),
        ("windows", (), "[]"),
    ],
)
def test_the_first_difference_is_named(index: int, field: str, value: object, shown: str) -> None:
    records = recorded()
    right = step_values(records[index])[field]
    right = (right or "none") if isinstance(right, str) else json.dumps(right)
    for changed in (index, index + 2):
        records[changed] = replace(records[changed], **{field: value})  # type: ignore[arg-type]
    result = replay(records, toy())
    assert result.num_equal == index
    assert result.difference == Difference(index=index, field=field, expected=shown, got=right)
    assert str(result.difference) == f"record {index}, {field}: recorded {shown}, now {right}"


def test_another_model_differs_in_its_logits_and_a_smaller_one_in_an_error() -> None:
    records = recorded()
    other = replay(records, Untraced(ToyTarget(capacity=30, logits_of=hashed(vocab_size=11, seed=8))))
    assert (other.num_equal, other.difference and other.difference.field) == (0, "logits_sha256")
    smaller = replay(records, toy(capacity=10)).difference
    assert smaller is not None
    assert (smaller.field, smaller.expected, smaller.got) == ("error", "none", "CapacityError")


def test_times_do_not_count_and_the_listener_is_put_back() -> None:
    records = [replace(record, host_seconds=9.0, graph_seconds=9.0) for record in recorded()]
    request = ToyTarget(capacity=30)
    seen: list[StepRecord] = []
    request.step_listener = listener = seen.append
    assert replay(records, request).difference is None
    assert request.step_listener is listener
    assert seen == []


def test_a_failure_of_the_runtime_is_an_outcome_like_any_other() -> None:
    records = recorded()
    failed = replace(records[2], error="RuntimeError", logits_sha256="", windows=())
    failing = Untraced(toy(refuse_calls=frozenset({2})))
    assert replay([*records[:2], failed], failing).difference is None
    difference = replay([*records[:2], failed], Untraced(toy())).difference
    assert difference is not None
    assert (difference.index, difference.expected, difference.got) == (2, "RuntimeError", "none")


def test_a_refused_call_is_made_with_what_it_was_given() -> None:
    """Positions that do not fit the tokens, or none at all; the calls after it come out the same."""
    records = recorded()
    refused = replace(
        records[0], tokens=(3, 5), positions=(1, 2, 3), error="InputError", logits_sha256="", windows=()
    )
    assert replay([refused, *records[:3]], Untraced(toy())).difference is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([*recorded()[:2], 1], "record 2 is a int; give StepRecords"),
        ([{"stage": "prefill"}], "record 0 is a dict"),
        (None, "records is a NoneType; give the records of a trace"),
    ],
)
def test_what_is_no_record_is_refused(records: list[StepRecord], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replay(records, toy())
