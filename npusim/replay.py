"""Make the calls of a trace again and hold them against what was recorded, bit for bit.

On the same build and machine two runs are equal but for their times, so a trace is how a failure is sent to
somebody else: the first record that comes out different names it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from npusim.errors import NpuSimError
from npusim.trace import StepRecord, Traced, TraceError, logits_sha256, step_values

_TIMES = frozenset({"host_seconds", "graph_seconds"})


class Replayable(Protocol):
    """What a replay calls."""

    def infer(self, inputs: Mapping[str, npt.NDArray[np.int64]]) -> Mapping[str, npt.NDArray[np.floating]]:
        """Run `input_ids` and `position_ids` [1, n]; `logits` [1, n, vocab_size]."""

    def reset_state(self) -> None:
        """Forget the conversation."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a replay parted from its trace.

    index: of the record, from 0. field: of `StepRecord`. expected, got: its values as a trace has them, texts
    without quotes, "none" for an empty one.
    """

    index: int
    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"record {self.index}, {self.field}: recorded {self.expected}, now {self.got}"


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """num_equal: records reproduced before the first difference, which is None where there is none."""

    num_equal: int
    difference: Difference | None


def replay(records: Iterable[StepRecord], request: Replayable) -> ReplayResult:
    """Reset the request, make the same calls, stop at the first difference.

    A request that keeps records (`step_listener`) is compared in every field but the times, any other in its
    logits and its errors.

    Raises TraceError for what is no record.
    """
    if not isinstance(records, Iterable):
        raise TraceError(f"records is a {type(records).__name__}; give the records of a trace")
    request.reset_state()
    num_equal = 0
    for expected in records:
        if not isinstance(expected, StepRecord):
            raise TraceError(
                f"record {num_equal} is a {type(expected).__name__}; give StepRecords, as a trace holds them"
            )
        if not expected.error and expected.positions[0] == 0:
            request.reset_state()  # a conversation began here, perhaps after a reset, which leaves no record
        field = _first_difference(expected, got := _recorded_again(expected, request))
        if field is not None:
            return ReplayResult(
                num_equal=num_equal,
                difference=Difference(
                    index=num_equal,
                    field=field,
                    expected=_shown(expected, field),
                    got=_shown(got, field),
                ),
            )
        num_equal += 1
    return ReplayResult(num_equal=num_equal, difference=None)


def _recorded_again(expected: StepRecord, request: Replayable) -> StepRecord:
    """The record of the same call now: the request's own if it keeps records."""
    own: list[StepRecord] = []
    if not isinstance(request, Traced):
        return _call(expected, request)
    listener = request.step_listener
    request.step_listener = own.append
    try:
        made_here = _call(expected, request)
    finally:
        request.step_listener = listener
    return own[-1] if own else made_here


def _call(expected: StepRecord, request: Replayable) -> StepRecord:
    """`expected` with the outcome that the same call has now."""
    inputs = {
        "input_ids": np.array([expected.tokens], dtype=np.int64),
        "position_ids": np.array([expected.positions], dtype=np.int64),
    }
    try:
        logits = request.infer(inputs)["logits"]
    except (NpuSimError, RuntimeError) as error:  # a refusal, or what OpenVINO raises where it fails
        return replace(expected, logits_sha256="", error=type(error).__name__)
    return replace(expected, logits_sha256=logits_sha256(logits), error="")


def _first_difference(expected: StepRecord, got: StepRecord) -> str | None:
    compared = (field.name for field in fields(StepRecord) if field.name not in _TIMES)
    return next((name for name in compared if getattr(expected, name) != getattr(got, name)), None)


def _shown(record: StepRecord, field: str) -> str:
    value = step_values(record)[field]
    return (value or "none") if isinstance(value, str) else json.dumps(value)
