"""What must hold of every step of a lowered layer, and the same over many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from gqa_data import History, random_history
from gqa_grid import name_of
from gqa_models import GQA
from judges import by_naive, by_ort, by_reference, cached_keys
from lowered_op import POISON, LoweredLayers, Step, capacity_of

Missing = Callable[[GQA, int], Iterable[int]]
"""From a layer and P to the positions that its cache does not hold though they may be within the window."""


def past_capacity(gqa: GQA, stored: int) -> range:
    """Linear slots: what came after the buffer was full."""
    return range(capacity_of(gqa), stored)


def nothing(_gqa: GQA, _stored: int) -> tuple[int, ...]:
    """Layouts that keep whatever a window may still show."""
    return ()


def check_step(
    gqa: GQA,
    step: Step,
    history: History,
    stored: int,
    *,
    missing: Iterable[int] = (),
    naive: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """Rows of `history` from `stored` on equal every judge; padded rows are finite; presents are right."""
    num_tokens, absent = history.total - stored, tuple(missing)
    case = f"{name_of(gqa)}: P={stored} n={num_tokens}"
    assert np.isfinite(step.attention).all(), case
    for judge in (by_ort, by_reference, by_naive) if naive else (by_ort, by_reference):
        expected = judge(gqa, history, stored, missing=absent).attention
        real = step.attention[:, -num_tokens:]
        np.testing.assert_allclose(real, expected, atol=tolerance, err_msg=f"{judge.__name__}: {case}")
    past, new = np.split(step.present_key, [capacity_of(gqa)], axis=2)
    np.testing.assert_array_equal(past, step.past_key, err_msg=case)
    assert new.shape[2] == gqa.sequence_length, case
    new_keys = cached_keys(gqa, history)[:, :, stored:]
    np.testing.assert_allclose(new[:, :, -num_tokens:], new_keys, atol=tolerance, err_msg=case)
    past, new = np.split(step.present_value, [capacity_of(gqa)], axis=2)
    np.testing.assert_array_equal(past, step.past_value, err_msg=case)
    assert new.shape[2] == gqa.sequence_length, case
    np.testing.assert_array_equal(new[:, :, -num_tokens:], history.value[:, :, stored:], err_msg=case)


def sweep(
    lowered: LoweredLayers,
    steps: Sequence[tuple[int, int]],
    *,
    missing: Missing = past_capacity,
    tolerance: float = 1e-5,
    poison: float = POISON,
) -> None:
    """Every layer at every (P, n) of `steps`; the naive judge sees the first."""
    total = max(stored + num_tokens for stored, num_tokens in steps)
    histories = [random_history(gqa, total, seed=total) for gqa in lowered.layers]
    for index, (stored, num_tokens) in enumerate(steps):
        results = lowered.run(histories, stored, num_tokens, poison=poison)
        for gqa, step, history in zip(lowered.layers, results, histories, strict=True):
            check_step(
                gqa,
                step,
                history.cut(stored + num_tokens),
                stored,
                missing=missing(gqa, stored),
                naive=index == 0,
                tolerance=tolerance,
            )
