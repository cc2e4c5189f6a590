"""The host's KV cache: buffers, how many tokens they hold, and what a step does to them."""

import itertools
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from npusim.errors import InputError, TrimError
from npusim.finite_rows import check_finite
from npusim.layout import CommitPolicy, Layout, Move, takes_back_blocks
from npusim.tensor_slice import Array, make_tensor_slice
from npusim.whole_number import shown, whole_number

ROWS = 2
"""The axis of KV arrays [2 L, KV, rows, D] that counts rows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheGroup:
    """Layers of one layout and shape, their buffers in one array.

    past is [2 L, KV, C, D]: key and value of each of the L layers, in turn. One array for many layers makes
    an append one assignment.
    """

    layers: tuple[int, ...]
    layout: Layout
    past: Array

    def key(self, layer: int) -> Array:
        """past_key of a layer, [1, KV, C, D]."""
        return self._buffer(2 * self.layers.index(layer))

    def value(self, layer: int) -> Array:
        """past_value of a layer, [1, KV, C, D]."""
        return self._buffer(2 * self.layers.index(layer) + 1)

    def _buffer(self, index: int) -> Array:
        return self.past[index : index + 1]


class BlockRows(NamedTuple):
    """The new rows of one block: an array [2 L, KV, S, D] per group, rows [first, first + length) real."""

    arrays: tuple[Array, ...]
    first: int
    length: int

    def after(self, accepted: int) -> "BlockRows | None":
        """A copy of the rows from `accepted` on, None when there are none.

        A copy, as the arrays are the outputs of a graph that is about to run again.
        """
        if accepted >= self.length:
            return None
        start, stop = self.first + accepted, self.first + self.length
        rest = tuple(make_tensor_slice(array, ROWS, start, stop).copy() for array in self.arrays)
        return BlockRows(arrays=rest, first=0, length=stop - start)


class KVManager:
    """One sequence in fixed buffers.

    A step is: `arrange(capacity)` for the graph that is to run, `settle(start)`, run it with `start` tokens
    of past, `commit(start, rows)`. Between the last two nothing that is stored changes, so that a step that
    fails leaves the state it found.
    """

    def __init__(self, variants: Mapping[int, tuple[CacheGroup, ...]], *, commit: CommitPolicy) -> None:
        """variants: the groups as the graphs of each capacity see them, all over one memory."""
        self._variants = variants
        self._capacities = sorted(variants)
        self.groups = self._largest
        self.rows_moved = 0
        self._holds_back = commit is CommitPolicy.DEFERRED
        self._committed = 0
        self._high_water = 0
        self._touched = 0
        self._pending: BlockRows | None = None
        self._fitting: tuple[Array, ...] | None = None

    @property
    def num_stored_tokens(self) -> int:
        """P: tokens the next step may attend to, those of a block held back included."""
        return self._committed + (0 if self._pending is None else self._pending.length)

    @property
    def num_committed_tokens(self) -> int:
        """Tokens whose rows are in the buffers."""
        return self._committed

    @property
    def high_water(self) -> int:
        """One past the highest position written since the sequence began; a trim does not lower it."""
        return self._high_water

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(group.past.nbytes for group in self._largest)

    def can_trim(self, num_tokens: int) -> bool:
        """Whether every layer still holds the window of an end at num_tokens."""
        length = self._length_of(num_tokens)
        if length is None:
            return False
        return length >= self._committed or not self._layers_that_cannot_trim(length)

    def takes_back_blocks(self, *, block_size: int, num_tokens: int) -> bool:
        """Whether all but the first row of the newest block can go at every length up to num_tokens."""
        return self._holds_back or all(
            takes_back_blocks(group.layout, block_size=block_size, num_tokens=num_tokens)
            for group in self._largest
        )

    def check_trim(self, num_tokens: int) -> int:
        """num_tokens as an int; TrimError, naming the layers, unless `can_trim`."""
        stored = self.num_stored_tokens
        length = self._length_of(num_tokens)
        if length is None:
            raise TrimError(
                f"trim to {shown(num_tokens)} tokens, but {stored} are stored; give an integer from 0 to "
                f"{stored}"
            )
        layers = [] if length >= self._committed else self._layers_that_cannot_trim(length)
        if layers:
            deferred = "" if self._holds_back else "NPUSIM_COMMIT=DEFERRED, "
            raise TrimError(
                f"trim from {stored} to {length} tokens: layers {layers} have overwritten or evicted "
                f"rows that a query at position {length} needs; reset and prefill again, or use "
                f"{deferred}more NPUSIM_KV_SLACK, or NPUSIM_KV_LAYOUT=LINEAR"
            )
        return length

    def trim(self, num_tokens: int) -> int:
        """Keep the first num_tokens tokens; return how many were removed. All layers or none.

        Raises TrimError when num_tokens is negative, more than is stored, or needs rows no longer held.
        """
        length = self.check_trim(num_tokens)
        removed = self.num_stored_tokens - length
        if length <= self._committed:
            self._committed, self._pending = length, None
        elif self._pending is not None:
            self._pending = self._pending._replace(length=length - self._committed)
        return removed

    def smallest_capacity(self, num_tokens: int) -> int:
        """That of the smallest graph with room for num_tokens and for every row now in the buffers.

        Rows that a step is about to drop are among them: they are dropped when it succeeds.
        """
        needed = max(num_tokens, self._committed)
        return self._capacities[bisect_left(self._capacities, needed)]

    def arrange(self, capacity: int) -> None:
        """Lay the stored rows out as the graph of that capacity reads them."""
        arranged = self._variants[capacity]
        if arranged is self.groups:
            return
        for group, target in zip(self.groups, arranged, strict=True):
            if target is not group:
                _migrate(group, target, self._committed)
        self.groups = arranged

    def settle(self, start: int) -> None:
        """Write what is held back up to position `start`; what lies beyond stays held until `commit`.

        Raises ModelError, before anything changes, where a row to be written is not finite.
        """
        pending = self._pending
        if pending is None:
            return
        accepted = min(max(start - self._committed, 0), pending.length)
        rest = pending.after(accepted)
        if accepted:
            self._write(self._committed, pending._replace(length=accepted))
        self._pending = rest

    def commit(self, start: int, rows: BlockRows) -> None:
        """End a step whose block began at `start`: forget what lay beyond, take the block's rows.

        Raises ModelError for rows to be written that are not finite, InputError for rows that do not fit the
        buffers, both before anything changes.
        """
        if self._holds_back:
            self._committed, self._pending = start, rows
            self._high_water = self._high_water if start else 0
        else:
            self._write(start, rows)
            self._pending = None

    def reset(self) -> None:
        """Empty the cache and zero every row ever written: 0 x NaN is NaN even where a mask hides it."""
        for group in itertools.chain(*self._variants.values()):
            touched = min(self._touched, group.layout.capacity)
            make_tensor_slice(group.past, ROWS, 0, touched)[...] = 0
        self._committed = self._high_water = self._touched = 0
        self._pending = None

    @property
    def _largest(self) -> tuple[CacheGroup, ...]:
        return self._variants[self._capacities[-1]]

    def _length_of(self, num_tokens: object) -> int | None:
        """The number of tokens to cut the cache to; None for what is none: 1.5, or more than are stored."""
        length = whole_number(num_tokens)
        return length if length is not None and 0 <= length <= self.num_stored_tokens else None

    def _layers_that_cannot_trim(self, num_tokens: int) -> list[int]:
        return sorted(
            layer
            for group in self.groups
            if not group.layout.can_trim(self._committed, self._high_water, num_tokens)
            for layer in group.layers
        )

    def _write(self, start: int, rows: BlockRows) -> None:
        """Put rows at positions start.. into every group, or into none.

        All that can fail is done before the first row is written: half of the layers with rows moved would be
        a cache that answers wrong.
        """
        if rows.arrays is not self._fitting:
            self._check_fit(rows.arrays)
        arrays, first, length = rows
        copies: list[tuple[Array, Array]] = []
        rows_moved = 0
        for index, group in enumerate(self.groups):
            moves, writes = group.layout.plan_append(start, length)
            if moves:
                copies += [_copy_of_survivors(group.past, move) for move in moves]
                rows_moved += len(group.layers) * sum(move.length for move in moves)
            for row, slot, count in writes:
                place = make_tensor_slice(group.past, ROWS, slot, slot + count)
                new = make_tensor_slice(arrays[index], ROWS, first + row, first + row + count)
                check_finite(group.layers, new, start + row)
                copies.append((place, new))
        for place, source in copies:
            place[...] = source
        self.rows_moved += rows_moved
        self._committed = start + length
        self._high_water = max(self._high_water if start else 0, self._committed)
        self._touched = max(self._touched, self._committed)

    def _check_fit(self, arrays: tuple[Array, ...]) -> None:
        """InputError unless rows of `arrays` can be rows of the buffers. Looked at once: a graph's stay."""
        if len(arrays) != len(self.groups):
            raise InputError(f"rows of {len(arrays)} groups of layers; there are {len(self.groups)}")
        for group, new in zip(self.groups, arrays, strict=True):
            if _form(new) != _form(group.past):
                raise InputError(
                    f"layers {list(group.layers)}: rows {list(new.shape)} of {new.dtype} do not fit buffers "
                    f"{list(group.past.shape)} of {group.past.dtype}"
                )
        self._fitting = arrays


def _form(rows: Array) -> tuple[object, ...]:
    """What rows have in common with the buffers they fit: all but how many they are."""
    return rows.shape[:ROWS], rows.shape[ROWS + 1 :], rows.dtype


def _copy_of_survivors(past: Array, move: Move) -> tuple[Array, Array]:
    """Where rows move to, and a copy of them.

    Copied before anything is written: where the two overlap numpy would copy while it writes, and memory may
    run out then.
    """
    place = make_tensor_slice(past, ROWS, move.target, move.target + move.length)
    return place, make_tensor_slice(past, ROWS, move.source, move.source + move.length).copy()


def _migrate(source: CacheGroup, target: CacheGroup, length: int) -> None:
    """Copy slots [0, length) between two views of one memory whose slots lie at different distances.

    Buffer by buffer, from the end where they move apart, so that none is overwritten before it is read.
    numpy sees to the overlap within one.
    """
    grows = target.layout.capacity > source.layout.capacity
    buffers = range(len(source.past))
    for index in reversed(buffers) if grows else buffers:
        rows = make_tensor_slice(source.past[index], ROWS - 1, 0, length)
        make_tensor_slice(target.past[index], ROWS - 1, 0, length)[...] = rows


def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """A zeroed array; pages are taken from the machine as they are first written."""
    return np.zeros(shape, dtype)
