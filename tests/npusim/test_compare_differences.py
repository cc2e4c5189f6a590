"""How differences are counted: rows, NaN, likeliest tokens, limits, refusals."""

from collections.abc import Sequence

import numpy as np
import pytest

from npusim.compare.calls import Call
from npusim.compare.differences import (
    EXACT,
    QUANTIZED,
    ROUNDED,
    BackendDifferences,
    Tolerance,
    compare_calls,
)
from npusim.compare.taps import cut
from npusim.errors import ModelError, TrimError
from npusim.stage import Stage

# By position the logits of three tokens; the largest of all is 4.
LOGITS = np.array([[1, 3, 2], [4, 0, 0], [0, 2, 1.5], [1, 2, 3], [2, 1, 0], [1, 2, 1]], np.float32)
BLOCKS = ((0, 3), (3, 5), (4, 6))
TOLERANCE = Tolerance(absolute=0.01, relative=0.1, attention=0.2)


def call(start: int, stop: int) -> Call:
    return Call(
        tokens=tuple(range(start, stop)), position=start, proposed=0, accepted=0, logits=LOGITS[start:stop]
    )


CALLS = [call(*block) for block in BLOCKS]


class Recorded:
    """Answers with the simulator's logits and what is added to them, by position."""

    def __init__(self, added: dict[tuple[int, int], float], *, rows: int = 9, calls: int = 9) -> None:
        self.answers = LOGITS.copy()
        for at, value in added.items():
            self.answers[at] += value
        self.rows, self.calls = rows, calls
        self.fed: list[tuple[tuple[int, ...], int]] = []

    def feed(self, tokens: Sequence[int], position: int) -> np.ndarray:
        if len(self.fed) == self.calls:
            raise TrimError("no way back")
        self.fed.append((tuple(tokens), position))
        return self.answers[position : position + len(tokens)][-self.rows :]


def differences(backend: Recorded) -> BackendDifferences:
    return compare_calls(CALLS, backend, TOLERANCE)


def test_the_same_calls_are_made() -> None:
    backend = Recorded({})
    found = differences(backend)
    assert backend.fed == [((0, 1, 2), 0), ((3, 4), 3), ((4, 5), 4)]
    assert found.agrees
    assert [step.max_abs_difference for step in found.steps] == [0, 0, 0]
    assert [call.stage for call in CALLS] == [Stage.PREFILL, Stage.GENERATE, Stage.GENERATE]


def test_the_worst_row_is_named_by_its_position() -> None:
    found = differences(Recorded({(1, 2): 0.25, (2, 0): -0.125, (3, 0): 0.5, (5, 1): -0.75}))
    assert [step.max_abs_difference for step in found.steps] == [0.25, 0.5, 0.75]
    assert [step.position for step in found.steps] == [1, 3, 5]
    assert found.diverging == (1, 2)  # above a tenth of 4
    assert found.worst is found.steps[2]
    assert not found.agrees


def test_only_the_newest_rows_may_come_back() -> None:
    found = differences(Recorded({(0, 0): 9.0, (2, 1): 0.25, (4, 1): 0.125}, rows=1))
    assert [step.num_rows for step in found.steps] == [1, 1, 1]
    assert [step.max_abs_difference for step in found.steps] == [0.25, 0.125, 0]
    assert [step.position for step in found.steps] == [2, 4, 5]


def test_nan_is_infinitely_far() -> None:
    found = differences(Recorded({(3, 1): np.nan, (4, 0): 0.5}))
    assert found.steps[1].max_abs_difference == np.inf
    assert found.steps[1].position == 3


def test_likeliest_tokens_and_their_margin() -> None:
    found = differences(Recorded({(2, 2): 0.75, (3, 0): 1.0}))
    assert [len(step.flips) for step in found.steps] == [1, 0, 0]
    flip = found.steps[0].flips[0]
    assert (flip.position, flip.token, flip.backend_token, flip.margin) == (2, 1, 2, 0.5)


def test_a_refusal_ends_it() -> None:
    found = differences(Recorded({}, calls=2))
    assert len(found.steps) == 2
    assert found.refusal == "no way back"
    assert not found.diverging
    assert not found.agrees


def test_a_backend_that_refuses_the_prompt_is_none() -> None:
    with pytest.raises(ModelError, match="not even the prompt can be run: no way back"):
        differences(Recorded({}, calls=0))


def test_limits() -> None:
    assert TOLERANCE.of_logits(0.05) == 0.01
    assert TOLERANCE.of_logits(3.0) == pytest.approx(0.3)
    assert EXACT.of_logits(1000.0) == 1e-4
    assert EXACT.of_logits(19) < ROUNDED.of_logits(19) < QUANTIZED.of_logits(19)
    assert str(ROUNDED) == "0.001 or 0.003 L, the greater; 0.01 A"


def test_tapped_columns_are_cut_off() -> None:
    rows = np.arange(24.0).reshape(2, 12)
    logits, tapped = cut(rows, [4, 1, 2])
    np.testing.assert_array_equal(logits, rows[:, :5])
    for part, columns in zip(tapped, (slice(5, 9), slice(9, 10), slice(10, 12)), strict=True):
        np.testing.assert_array_equal(part, rows[:, columns])
