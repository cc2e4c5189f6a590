"""A naive oracle of grouped-query attention: a list of rows, loops over it, Python floats.

It shares no line with the package or with the other test helpers: a fault that two of them have in common
would be a fault that no comparison can show. Positions are absolute; there are no slots and no padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = list[float]
Heads = list[Vector]


@dataclass(frozen=True, kw_only=True)
class NaiveLayer:
    """One attention layer: sinks is a logit per query head or None, cos and sin are tables or None."""

    num_heads: int
    kv_num_heads: int
    window: int | None = None
    causal: bool = True
    scale: float
    sinks: Sequence[float] | None = None
    cos: ArrayLike | None = None
    sin: ArrayLike | None = None
    interleaved: bool = False


@dataclass
class NaiveLog:
    """All that one layer has been told: (position, key per KV head after rotary, value per KV head)."""

    layer: NaiveLayer
    rows: list[tuple[int, Heads, Heads]] = field(default_factory=list)

    def add(self, position: int, key: ArrayLike, value: ArrayLike, angle: int | None = None) -> None:
        """Stores key and value [KV, D] of one position; `angle` is its rotary position if it differs."""
        turned = [self._turn(head, position if angle is None else angle) for head in _floats(key)]
        self.rows.append((position, turned, _floats(value)))

    def forget(self, positions: Iterable[int]) -> None:
        """Removes the rows at these positions."""
        gone = set(positions)
        self.rows = [row for row in self.rows if row[0] not in gone]

    def look(
        self, position: int, query: ArrayLike, angle: int | None = None, bias: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """What the query [H, D] at `position` gets, [H, D]. bias is [H, positions], added per position."""
        layer = self.layer
        looked = []
        for head, raw in enumerate(_floats(query)):
            asked = self._turn(raw, position if angle is None else angle)
            source = head * layer.kv_num_heads // layer.num_heads
            logits, values = [], []
            for at, key, value in self.rows:
                if layer.causal and at > position:
                    continue
                if layer.window is not None and at <= position - layer.window:
                    continue
                logit = layer.scale * math.fsum(a * b for a, b in zip(asked, key[source], strict=True))
                if bias is not None:
                    logit += float(np.asarray(bias)[head, at])
                logits.append(logit)
                values.append(value[source])
            looked.append(_weighted(logits, values, None if layer.sinks is None else layer.sinks[head]))
        return np.array(looked)

    def _turn(self, vector: Vector, angle: int) -> Vector:
        if self.layer.cos is None or self.layer.sin is None:
            return vector
        cos, sin = _floats(self.layer.cos)[angle], _floats(self.layer.sin)[angle]
        turned = list(vector)
        for pair, (c, s) in enumerate(zip(cos, sin, strict=True)):
            a, b = (2 * pair, 2 * pair + 1) if self.layer.interleaved else (pair, pair + len(cos))
            point = complex(vector[a], vector[b]) * complex(c, s)
            turned[a], turned[b] = point.real, point.imag
        return turned


def _weighted(logits: Sequence[float], values: Sequence[Vector], sink: float | None) -> Vector:
    largest = max([*logits, *([] if sink is None else [sink])])
    weights = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(weights) + (0.0 if sink is None else math.exp(sink - largest))
    return [
        math.fsum(w * v[c] for w, v in zip(weights, values, strict=True)) / total
        for c in range(len(values[0]))
    ]


def _floats(rows: ArrayLike) -> list[list[float]]:
    listed: list[list[float]] = np.asarray(rows, np.float64).tolist()
    return listed
