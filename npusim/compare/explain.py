"""From a layer that answers differently to why: try every fault that has a name, then ask the numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npusim.compare.evidence import AttentionRow, Visible
from npusim.compare.hypotheses import Hypothesis, hypotheses, right_mask
from npusim.compare.visible_fit import fit_visible
from npusim.reference.options import AttentionOptions

SHARE = 1 / 3
"""An explanation must leave at most so much of the difference."""
CLEARLY = 2.0
"""A later hypothesis must fit so many times better than an earlier, likelier one."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """verdict: in words. position: of the row that differs most; ours and theirs: what it sees.

    theirs is None where no set of keys gives what the other side answers. residual: what is left of the
    `difference`, over all rows looked at, if the verdict is right.
    """

    verdict: str
    position: int
    ours: Visible
    theirs: Visible | None
    difference: float
    residual: float


def explain(
    rows: Sequence[AttentionRow], options: AttentionOptions, window: int, limit: float
) -> Explanation:
    """Why `rows`, the one that differs most first, differ in a layer of `window`; within `limit` is equal."""
    worst = rows[0]
    ours = right_mask(window)(worst)
    if not np.isfinite(worst.difference):
        verdict = "the other side answers with NaN or infinity"
        return _explanation(verdict, worst, ours, theirs=None, residual=worst.difference)
    right = Hypothesis(claim="", options=options, visible=right_mask(window))
    if (residual := _residual(right, rows, limit)) <= limit:
        verdict = "the other side does what the model says; the simulator does not"
        return _explanation(verdict, worst, ours, theirs=ours, residual=residual)
    enough = min(limit, SHARE * worst.difference)
    named = _best_named(rows, options, window, enough)
    if named is not None:
        hypothesis, residual = named
        verdict = f"the other side behaves as if {hypothesis.claim}"
        return _explanation(verdict, worst, ours, theirs=hypothesis.visible(worst), residual=residual)
    theirs = fit_visible(worst, options, enough)
    if theirs is not None:
        residual = _distance(worst, theirs, options)
        verdict = "the other side has another mask, by no fault that has a name"
        return _explanation(verdict, worst, ours, theirs=theirs, residual=residual)
    verdict = (
        "no mask, sink, scale or rotary fault gives what the other side answers; look at what enters its "
        "attention: projections, norms, cached rows"
    )
    return _explanation(verdict, worst, ours, theirs=None, residual=worst.difference)


def _explanation(
    verdict: str, worst: AttentionRow, ours: Visible, *, theirs: Visible | None, residual: float
) -> Explanation:
    return Explanation(
        verdict=verdict,
        position=worst.position,
        ours=ours,
        theirs=theirs,
        difference=worst.difference,
        residual=residual,
    )


def _best_named(
    rows: Sequence[AttentionRow], options: AttentionOptions, window: int, enough: float
) -> tuple[Hypothesis, float] | None:
    """The hypothesis that leaves least, and what it leaves; None where all leave more than `enough`."""
    best, bar = None, enough
    for hypothesis in hypotheses(options, window, rows):
        residual = _residual(hypothesis, rows, bar)
        if residual <= bar:
            best, bar = (hypothesis, residual), residual / CLEARLY
    return best


def _residual(hypothesis: Hypothesis, rows: Sequence[AttentionRow], bar: float) -> float:
    """The greatest distance between what the hypothesis says and the other side's answer.

    Stops at the first row above `bar`, which settles it.
    """
    greatest = 0.0
    for row in rows:
        greatest = max(greatest, _distance(row, hypothesis.visible(row), hypothesis.options))
        if not greatest <= bar:
            break
    return greatest


def _distance(row: AttentionRow, visible: Visible, options: AttentionOptions) -> float:
    distance = np.abs(row.attention(visible, options) - row.theirs).max()
    return float("inf") if np.isnan(distance) else float(distance)
