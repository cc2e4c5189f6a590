"""What a comparison came to, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from npusim.compare.calls import Call
from npusim.compare.layers import LayerReport

if TYPE_CHECKING:
    from npusim.compare.comparison import BackendReport


def verdict_lines(backend: BackendReport, calls: Sequence[Call]) -> list[str]:
    """Whether a backend agrees, and if not, where it first differs and what its layers say of it."""
    name, found = backend.kind.value, backend.differences
    lines = []
    worst = found.worst
    if found.diverging:
        first = found.diverging[0]
        lines.append(
            f"{name}: DIFFERS at {len(found.diverging)} of {len(found.steps)} steps, first at step {first} "
            f"({calls[first].stage.value}, positions {calls[first].shown_positions}), most at position "
            f"{worst.position}: {worst.max_abs_difference:.1e}, allowed {found.limit:.1e}"
        )
    else:
        lines.append(
            f"{name}: agrees at {len(found.steps)} of {len(calls)} steps (worst "
            f"{worst.max_abs_difference:.1e} at position {worst.position}, allowed {found.limit:.1e})"
        )
    if found.refusal:
        lines.append(f"{name}: STOPPED at step {len(found.steps)}: {found.refusal}")
    if backend.layers is not None:
        lines.extend(f"{name}: {line}" for line in _layer_verdict(backend.layers, bool(found.diverging)))
    return lines


def _layer_verdict(layers: LayerReport, logits_differ: bool) -> list[str]:
    first = layers.first
    if first is None:
        if logits_differ:
            return ["the attention of all layers agrees: what differs comes after the last of them"]
        return ["the attention of all layers agrees"]
    where = f"layer {first.number} ({first.name}) is the first whose attention DIFFERS"
    at = f"position {first.position} of step {first.call}"
    size = f"{first.max_abs_difference:.1e} at {at}, allowed {first.limit:.1e}"
    lines = [f"{where}: {size}"]
    if layers.explanation is None:
        return [*lines, f"layer {first.number}: why was not found out: {layers.unexplained}"]
    found = layers.explanation
    there = "no choice of keys gives the answer" if found.theirs is None else str(found.theirs)
    return [
        *lines,
        f"layer {first.number}: position {found.position} sees {found.ours} here; there {there}",
        f"layer {first.number}: {found.verdict}",
    ]
