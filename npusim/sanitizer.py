"""The KV sanitizer: poison what may not be read, and stop when it reaches an attention output."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npusim.cache_element import CacheElement
from npusim.errors import KVLeakError
from npusim.kv_manager import ROWS, CacheGroup, KVManager
from npusim.static_graph import StaticGraph
from npusim.tensor_slice import Array, make_tensor_slice

SLACK = 1.01
"""Attention outputs may exceed the largest value they average by rounding alone."""

Attention = dict[int, Array]
"""Attention outputs of some layers."""


@dataclass(frozen=True, eq=False)
class _Poisoned:
    """Slots of a group that were overwritten, and what was in them."""

    group: CacheGroup
    element: CacheElement
    slots: npt.NDArray[np.intp]
    saved: Array

    def fill_values(self, stored: float) -> None:
        """One element in every value of every slot."""
        self.group.past[1::2, :, self.slots] = stored

    def restore(self) -> None:
        self.group.past[:, :, self.slots] = self.saved


class KVSanitizer:
    """Runs a block with every unreadable past slot poisoned; the cache is as before when it returns.

    A poisoned slot gets a key of zeros, whose score no query can push out of the softmax by its sign, and a
    loud value. Of a float cache that is so large that the least weight shows: attention averages values, so
    no output may exceed the largest value that may be read. Codes of a quantized cache are never that large,
    so the block runs a second time with values of zero: what may not be read may not change a bit.

    A layer is at fault if its own slots show without those of the others: padded rows carry loud values on,
    and in float16 the key of such a row can outgrow the mask. For the same reason the answer is not taken
    from these runs: the last one is over the cache as it is, so its bits are those without a sanitizer.
    """

    def __init__(self, kv: KVManager, elements: tuple[CacheElement, ...]) -> None:
        """elements: that of each group's buffers."""
        self._kv = kv
        self._elements = elements

    def run(self, graph: StaticGraph, start: int, length: int) -> None:
        """Run a loaded graph for a block of `length` tokens at `start`.

        Raises KVLeakError with the layer, slot and position of the first slot that leaked.
        """
        groups = zip(self._kv.groups, self._elements, strict=True)
        poisoned = [_poison(group, element, start) for group, element in groups]
        try:
            quiet = _quiet_attention(graph, poisoned, length)
            graph.run()
            for layer in _leaking_layers(graph, poisoned, length, quiet):
                slot = _leaking_slot(graph, poisoned, length, quiet, layer)
                if slot is not None:
                    group = next(each.group for each in poisoned if layer in each.group.layers)
                    raise _leak_error(group, layer, slot, range(start, start + length), self._kv)
        finally:
            for each in poisoned:
                each.restore()
        graph.run()


def _poison(group: CacheGroup, element: CacheElement, start: int) -> _Poisoned:
    unreadable = np.ones(group.layout.capacity, dtype=bool)
    for run in group.layout.readable_slots(start):
        unreadable[run.start : run.stop] = False
    slots = np.flatnonzero(unreadable)
    poisoned = _Poisoned(group, element, slots, group.past[:, :, slots])
    group.past[0::2, :, slots] = element.zero
    poisoned.fill_values(element.loud)
    return poisoned


def _quiet_attention(graph: StaticGraph, poisoned: list[_Poisoned], length: int) -> Attention:
    """Attention of the quantized layers while their poisoned values are zeros."""
    quantized = [each for each in poisoned if each.element.is_code]
    if not quantized:
        return {}
    for each in quantized:
        each.fill_values(each.element.zero)
    graph.run()
    for each in quantized:
        each.fill_values(each.element.loud)
    return {layer: _real(graph, layer, length).copy() for each in quantized for layer in each.group.layers}


def _leaking_layers(
    graph: StaticGraph, poisoned: list[_Poisoned], length: int, quiet: Attention
) -> list[int]:
    """The layers whose attention shows what it may not read, in order."""
    rows = graph.rows(length)
    leaking = []
    for each, new in zip(poisoned, rows.arrays, strict=True):
        for layer in each.group.layers:
            attention = _real(graph, layer, length)
            if each.element.is_code:
                leaks = not np.array_equal(attention, quiet[layer])
            else:
                new_rows = make_tensor_slice(new, ROWS, rows.first, rows.first + length)
                # The block attends to its rows as they were before they were rounded to be stored.
                largest = SLACK * _largest_value(each, new_rows, layer) + each.element.least
                leaks = not float(np.abs(attention).max()) <= largest  # NaN, too
            if leaks:
                leaking.append(layer)
    return sorted(leaking)


def _leaking_slot(
    graph: StaticGraph, poisoned: list[_Poisoned], length: int, quiet: Attention, layer: int
) -> int | None:
    """One leaking slot of a layer, found by halving those that were poisoned.

    None where they are not what shows: neither alone, nor if it shows without them.
    """
    each = next(each for each in poisoned if layer in each.group.layers)
    for other in poisoned:
        other.fill_values(other.element.zero)
    value = each.group.value(layer)

    def leak(slots: npt.NDArray[np.intp]) -> bool:
        value[:, :, each.slots] = each.element.zero
        value[:, :, slots] = each.element.loud
        graph.run()
        return layer in _leaking_layers(graph, poisoned, length, quiet)

    suspects = each.slots
    if not leak(suspects) or leak(suspects[:0]):
        return None
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if leak(half) else suspects[len(half) :]
    return int(suspects[0])


def _real(graph: StaticGraph, layer: int, length: int) -> Array:
    """The attention of the real rows of a layer, [1, H, length, D]."""
    attention = graph.attention[layer]  # [1, H, S, D]
    return attention[:, :, attention.shape[2] - length :]


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
