"""How far a backend's logits lie from the simulator's, call by call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npusim.compare.backends import Backend, check_vocabulary
from npusim.compare.calls import Call
from npusim.compare.taps import Rows
from npusim.errors import ModelError, NpuSimError


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much two runtimes may differ and still agree.

    Logits by `absolute`, or by `relative` to the largest logit, whichever is more; attention outputs by
    `attention` relative to the largest of their layer. Negative controls (a window off by one) lie above.
    """

    absolute: float
    relative: float
    attention: float

    def __str__(self) -> str:
        scaled = f" or {self.relative:g} L, the greater" if self.relative else ""
        return f"{self.absolute:g}{scaled}; {self.attention:g} A"

    def of_logits(self, largest: float) -> float:
        """The greatest difference allowed where the largest logit is `largest`."""
        return max(self.absolute, self.relative * largest)


EXACT = Tolerance(absolute=1e-4, relative=0.0, attention=1e-4)
"""float32 throughout, summed in another order. Measured: 2e-5 on logits of 19, 2e-6 of attention."""

ROUNDED = Tolerance(absolute=1e-3, relative=3e-3, attention=1e-2)
"""A float16 cache; NPUW keeps one, and hands tensors between its subgraphs in float16.

Measured: 5e-4 on logits below 1, 3e-2 on logits of 19; 3e-3 of attention.
"""

QUANTIZED = Tolerance(absolute=1e-3, relative=1e-2, attention=5e-2)
"""A cache of codes: a row within a rounding error of a tie is stored as the next code."""


@dataclass(frozen=True, kw_only=True)
class ArgmaxFlip:
    """A position whose likeliest token differs. margin: between the two likeliest of the simulator."""

    position: int
    token: int
    backend_token: int
    margin: float


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """One call. position: of the row that differs most. num_rows: of logits that the backend handed back."""

    max_abs_difference: float
    position: int
    num_rows: int
    flips: tuple[ArgmaxFlip, ...]


@dataclass(frozen=True, kw_only=True)
class BackendDifferences:
    """All calls of one backend, at least one.

    limit: the greatest difference that is still agreement. refusal: why the backend stopped before the last
    call, "" where it did not.
    """

    steps: tuple[StepDifference, ...]
    limit: float
    refusal: str

    @property
    def worst(self) -> StepDifference:
        """The step that differs most."""
        return max(self.steps, key=lambda step: step.max_abs_difference)

    @property
    def diverging(self) -> tuple[int, ...]:
        """Indices of the steps beyond the limit."""
        return tuple(i for i, step in enumerate(self.steps) if step.max_abs_difference > self.limit)

    @property
    def agrees(self) -> bool:
        """Whether every call was made and lies within the limit."""
        return not self.diverging and not self.refusal


def compare_calls(calls: Sequence[Call], backend: Backend, tolerance: Tolerance) -> BackendDifferences:
    """Make the calls on a backend at the start of a conversation, up to the first that it refuses.

    Raises ModelError where that is the very first, and for a model of another vocabulary.
    """
    steps: list[StepDifference] = []
    refusal = ""
    for call in calls:
        try:
            rows = backend.feed(call.tokens, call.position)
        except NpuSimError as error:
            if not steps:
                raise ModelError(f"not even the prompt can be run: {error}") from error
            refusal = str(error)
            break
        check_vocabulary(call.logits.shape[1], rows.shape[1])
        steps.append(_difference(call, rows))
    largest = max(float(np.abs(call.logits).max()) for call in calls)
    return BackendDifferences(steps=tuple(steps), limit=tolerance.of_logits(largest), refusal=refusal)


def _difference(call: Call, rows: Rows) -> StepDifference:
    ours = call.logits[-len(rows) :]  # [n, vocab]
    first = call.stop - len(rows)
    per_row = row_differences(ours, rows)
    return StepDifference(
        max_abs_difference=float(per_row.max()),
        position=first + int(per_row.argmax()),
        num_rows=len(rows),
        flips=tuple(
            _flip(first + int(row), ours[row], rows[row])
            for row in np.flatnonzero(ours.argmax(axis=1) != rows.argmax(axis=1))
        ),
    )


def row_differences(ours: Rows, theirs: Rows) -> Rows:
    """The greatest absolute difference of each row, [n]; NaN counts as infinitely far."""
    difference: Rows = np.abs(ours - theirs).max(axis=1)
    return np.where(np.isnan(difference), np.inf, difference)


def _flip(position: int, ours: Rows, theirs: Rows) -> ArgmaxFlip:
    second, first = np.partition(ours, -2)[-2:]
    return ArgmaxFlip(
        position=position,
        token=int(ours.argmax()),
        backend_token=int(theirs.argmax()),
        margin=float(first - second),
    )
