"""The KV sanitizer: poison what may not be read, and stop when it reaches an attention output."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npusim.errors import KVLeakError
from npusim.kv_manager import ROWS, CacheGroup, KVManager
from npusim.static_graph import StaticGraph
from npusim.tensor_slice import Array, make_tensor_slice

SLACK = 1.01
"""Attention outputs may exceed the largest value they average by rounding alone."""


@dataclass(frozen=True, eq=False)
class _Poisoned:
    """Slots of a group that were overwritten, and what was in them."""

    group: CacheGroup
    slots: npt.NDArray[np.intp]
    saved: Array

    def restore(self) -> None:
        self.group.past[:, :, self.slots] = self.saved


class KVSanitizer:
    """Runs a block with every unreadable past slot poisoned; the cache is as before when it returns.

    A poisoned slot gets a key of zeros, whose score no query can push out of the softmax by its sign, and
    a value so large that the least weight shows: attention averages values, so no output may exceed the
    largest value that may be read.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv

    def run(self, graph: StaticGraph, start: int, length: int) -> None:
        """Run a loaded graph for a block of `length` tokens at `start`.

        Raises KVLeakError with the layer, slot and position of the first slot that leaked.
        """
        poisoned = [self._poison(group, start) for group in self._kv.groups]
        try:
            graph.run()
            leaking = self._leaking_layer(graph, poisoned, length)
            if leaking is not None:
                raise self._explain(graph, poisoned, leaking, start, length)
        finally:
            for each in poisoned:
                each.restore()

    def _poison(self, group: CacheGroup, start: int) -> _Poisoned:
        unreadable = np.ones(group.layout.capacity, dtype=bool)
        for run in group.layout.readable_slots(start):
            unreadable[run.start : run.stop] = False
        slots = np.flatnonzero(unreadable)
        poisoned = _Poisoned(group, slots, group.past[:, :, slots])
        group.past[0::2, :, slots] = 0
        group.past[1::2, :, slots] = _pattern(group)
        return poisoned

    def _leaking_layer(self, graph: StaticGraph, poisoned: list[_Poisoned], length: int) -> int | None:
        """The first layer with an attention output beyond every value it may read."""
        rows = graph.rows(length)
        leaking = [
            layer
            for each, new in zip(poisoned, rows.arrays, strict=True)
            for layer in each.group.layers
            if _largest_output(graph, layer, length)
            > SLACK
            * _largest_value(each, make_tensor_slice(new, ROWS, rows.first, rows.first + length), layer)
        ]
        return min(leaking, default=None)

    def _explain(
        self, graph: StaticGraph, poisoned: list[_Poisoned], layer: int, start: int, length: int
    ) -> KVLeakError:
        """Find one leaking slot by halving the poisoned slots of the layer."""
        each = next(each for each in poisoned if layer in each.group.layers)
        for other in poisoned:
            other.group.past[1::2, :, other.slots] = 0
        value, suspects = each.group.value(layer), each.slots
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            value[:, :, each.slots] = 0
            value[:, :, half] = _pattern(each.group)
            graph.run()
            leaks = self._leaking_layer(graph, poisoned, length) == layer
            suspects = half if leaks else suspects[len(half) :]
        return _leak_error(each.group, layer, int(suspects[0]), range(start, start + length), self._kv)


def _pattern(group: CacheGroup) -> float:
    """Large and finite in the cache's type, and still finite when K of them are added up.

    Padded rows see no key, so they average the pattern in and carry it through the layers. Nothing that comes
    of it, squares and scores included, may overflow: an infinity in a masked slot of the block is NaN to the
    real rows.
    """
    return 6e4 if group.past.dtype == np.float16 else 1e12


def _largest_output(graph: StaticGraph, layer: int, length: int) -> float:
    attention = graph.attention[layer]  # [1, H, S, D]
    return float(np.abs(attention[:, :, attention.shape[2] - length :]).max())


def _largest_value(poisoned: _Poisoned, new_rows: Array, layer: int) -> float:
    """The largest |value| that a row of the block may read in a layer."""
    group = poisoned.group
    place = 2 * group.layers.index(layer) + 1
    readable = np.delete(group.past[place], poisoned.slots, axis=1)
    candidates = (readable, new_rows[place])
    return max(float(np.abs(rows.astype(np.float32)).max(initial=0.0)) for rows in candidates)


def _leak_error(group: CacheGroup, layer: int, slot: int, block: range, kv: KVManager) -> KVLeakError:
    """Name the slot and say why it may not be read."""
    position = group.layout.position_at(slot, block.start)
    if position is not None:
        reason = f"position {position}, outside local_window_size {group.layout.local_window_size}"
    else:
        position = group.layout.position_at(slot, kv.high_water)
        reason = "nothing, it was never filled"
        if position is not None:
            reason = f"position {position}, which was trimmed"
    return KVLeakError(
        f"layer {layer}: slot {slot} reached the attention of the block at positions "
        f"{block.start}..{block.stop - 1}; it holds {reason}. The mask of the graph is wrong",
        layer=layer,
        slot=slot,
        position=position,
    )
