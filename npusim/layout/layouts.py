"""The host's side of a cache layout: which slot of a buffer holds which position, and what an append does.

Pure integers. `stored` is the number of tokens a sequence has in the cache, so positions 0..stored-1 exist;
which of them are still held is the layout's matter. Trimming changes `stored` alone, never a row, so a layout
says for which new lengths its slots still mean what `position_at` says.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from npusim.errors import CapacityError, ConfigError
from npusim.layout.bounds import (
    CommitPolicy,
    check_window,
    require_window,
    ring_min_capacity,
    rolling_min_capacity,
)

_make = tuple.__new__
"""`_make(Write, (0, 5, 1))` is Write(0, 5, 1), past the Python function that a named tuple is made by.

An append is planned right after the run of a graph, which leaves the caches of the processor cold.
"""


class Write(NamedTuple):
    """New rows [row, row + length) go to slots [slot, slot + length); row 0 is the first real new row."""

    row: int
    slot: int
    length: int


class Move(NamedTuple):
    """Slots [source, source + length) go to [target, target + length); the two may overlap (memmove)."""

    source: int
    target: int
    length: int


class AppendPlan(NamedTuple):
    """What an append does to a buffer: first the moves, then the writes, each in order."""

    moves: tuple[Move, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """A buffer of `capacity` slots for a layer with window `local_window_size` (-1: none)."""

    capacity: int
    local_window_size: int = -1

    @abstractmethod
    def resident(self, stored: int) -> range:
        """Positions in the buffer when `stored` tokens are stored, oldest first."""

    @abstractmethod
    def slot_of(self, position: int, stored: int) -> int:
        """The slot of a resident position; ValueError when it is not resident."""

    @abstractmethod
    def position_at(self, slot: int, stored: int) -> int | None:
        """The position in a slot, or None when the slot holds nothing."""

    @abstractmethod
    def plan_append(self, stored: int, length: int) -> AppendPlan:
        """How `length` new tokens at positions stored.. enter the buffer; CapacityError when they cannot."""

    @abstractmethod
    def can_trim(self, stored: int, high_water: int, num_tokens: int) -> bool:
        """Whether the rows held serve a cache trimmed from `stored` to `num_tokens` exactly.

        `high_water` is one past the highest position ever written since reset; a trim does not lower it,
        except that a trim to 0 is a reset (kept up after one, it would only make the answer too careful).
        """

    def readable_positions(self, stored: int) -> range:
        """Past positions that some row of the next block may read, whatever the block's length.

        The oldest new row, at position `stored`, sees furthest back; every later row sees fewer past keys.
        They are held after any trim that `can_trim` allowed.
        """
        resident = self.resident(stored)
        if self.local_window_size < 0:
            return resident
        return range(max(resident.start, stored - self.local_window_size + 1), resident.stop)

    def readable_slots(self, stored: int) -> tuple[range, ...]:
        """The slots of `readable_positions`, as at most two runs, oldest first; all others must not matter.

        A slot left out may still hold a row that a trim brings back, so it may be overwritten only for the
        time of one step.
        """
        positions = self.readable_positions(stored)
        if not positions:
            return ()
        first = self.slot_of(positions.start, stored)
        until_end = min(len(positions), self.capacity - first)
        runs = (range(first, first + until_end), range(len(positions) - until_end))
        return tuple(run for run in runs if run)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.capacity:
            raise ValueError(f"slot {slot} is outside the buffer; slots are 0..{self.capacity - 1}")

    def _check_resident(self, position: int, stored: int) -> None:
        resident = self.resident(stored)
        if position not in resident:
            raise ValueError(
                f"position {position} is not held with {stored} tokens stored; "
                f"held are {resident.start}..{resident.stop - 1}"
            )


def _check_lengths(stored: int, length: int) -> None:
    if stored < 0 or length < 0:
        raise ValueError(f"stored {stored} and length {length} are counts of tokens; give 0 or more")


def _check_trim(stored: int, high_water: int) -> None:
    if not 0 <= stored <= high_water:
        raise ValueError(f"stored {stored} must be 0..high_water, and high_water is {high_water}")


def _check_capacity(capacity: int, bound: int, layout: str, reason: str) -> None:
    if capacity < bound:
        raise ConfigError(
            f"{layout} layout: capacity {capacity} is below the least of {bound} ({reason}); "
            f"give at least {bound} rows"
        )


@dataclass(frozen=True, kw_only=True)
class LinearLayout(Layout):
    """Position p in slot p; nothing moves and nothing is forgotten. A window only masks."""

    def __post_init__(self) -> None:
        check_window(self.local_window_size, "linear")
        _check_capacity(self.capacity, 1, "linear", "a buffer has rows")

    def resident(self, stored: int) -> range:
        """Every stored position; at most `capacity` of them can be held."""
        _check_lengths(stored, 0)
        return range(min(stored, self.capacity))

    def slot_of(self, position: int, stored: int) -> int:
        """The position itself."""
        self._check_resident(position, stored)
        return position

    def position_at(self, slot: int, stored: int) -> int | None:
        """The slot itself while it is below `stored`."""
        self._check_slot(slot)
        return slot if slot < stored else None

    def plan_append(self, stored: int, length: int) -> AppendPlan:
        """One write; CapacityError when it would pass the end of the buffer."""
        if not 0 <= stored <= stored + length <= self.capacity:
            _check_lengths(stored, length)
            raise CapacityError(
                f"{length} tokens at length {stored} need {stored + length} slots, "
                f"capacity is {self.capacity}; store fewer tokens or compile with more capacity"
            )
        writes = (_make(Write, (0, stored, length)),) if length else ()
        return _make(AppendPlan, ((), writes))

    def can_trim(self, stored: int, high_water: int, num_tokens: int) -> bool:
        """Always, as far as the positions exist."""
        _check_trim(stored, high_water)
        return 0 <= num_tokens <= stored


@dataclass(frozen=True, kw_only=True)
class RollingLayout(Layout):
    """The windowed cache of ONNX Runtime: slots [0, L) hold the L newest positions in order.

    With gap = C - W + 1, L(T) = T up to T = C and T - gap * ceil((T - C) / gap) beyond: when the buffer
    overflows, the oldest `gap` rows (or a multiple) go at once. L depends on T alone, not on the chunks.
    """

    def __post_init__(self) -> None:
        bound = rolling_min_capacity(self.local_window_size)
        _check_capacity(self.capacity, bound, "rolling", f"C >= W, local_window_size {bound}")

    @property
    def gap(self) -> int:
        """Rows evicted at once."""
        return self.capacity - self.local_window_size + 1

    def num_resident(self, stored: int) -> int:
        """L(stored)."""
        _check_lengths(stored, 0)
        overflow = stored - self.capacity
        if overflow <= 0:
            return stored
        evictions = -(-overflow // self.gap)
        return stored - self.gap * evictions

    def resident(self, stored: int) -> range:
        """The L(stored) newest positions."""
        return range(stored - self.num_resident(stored), stored)

    def slot_of(self, position: int, stored: int) -> int:
        """The position counted from the oldest one held."""
        self._check_resident(position, stored)
        return position - self.resident(stored).start

    def position_at(self, slot: int, stored: int) -> int | None:
        """The slot counted from the oldest position held, while it is below L(stored)."""
        self._check_slot(slot)
        resident = self.resident(stored)
        return resident[slot] if slot < len(resident) else None

    def plan_append(self, stored: int, length: int) -> AppendPlan:
        """At most one move (the survivors, to the front) and one write (the newest rows that are kept)."""
        _check_lengths(stored, length)
        before, after = self.resident(stored), self.resident(stored + length)
        kept = max(0, stored - after.start)
        evicted = after.start - before.start
        moves = (_make(Move, (evicted, 0, kept)),) if kept and evicted else ()
        first = max(stored, after.start)
        count = after.stop - first
        writes = (_make(Write, (first - stored, kept, count)),) if count else ()
        return _make(AppendPlan, (moves, writes))

    def can_trim(self, stored: int, high_water: int, num_tokens: int) -> bool:
        """When nothing was evicted in between: L(m) = L(stored) - (stored - m); an empty cache always is."""
        _check_trim(stored, high_water)
        if not 0 <= num_tokens <= stored:
            return False
        same_start = self.resident(num_tokens).start == self.resident(stored).start
        return num_tokens == 0 or same_start


@dataclass(frozen=True, kw_only=True)
class RingLayout(Layout):
    """Position p in slot p mod C; nothing ever moves.

    The layout alone accepts the deferred bound, C >= W - 1 (and >= 1); who commits eagerly checks
    `ring_min_capacity` for its block size as well.
    """

    def __post_init__(self) -> None:
        require_window(self.local_window_size, "ring")
        bound = ring_min_capacity(self.local_window_size, CommitPolicy.DEFERRED)
        _check_capacity(
            self.capacity, bound, "ring", f"C >= W - 1, local_window_size {self.local_window_size}"
        )

    def resident(self, stored: int) -> range:
        """The newest min(stored, C) positions.

        After a trim the oldest of them may be overwritten; `can_trim` sees to it that these lie outside
        the window, where no query reads them.
        """
        _check_lengths(stored, 0)
        return range(max(0, stored - self.capacity), stored)

    def slot_of(self, position: int, stored: int) -> int:
        """The position modulo the capacity."""
        self._check_resident(position, stored)
        return position % self.capacity

    def position_at(self, slot: int, stored: int) -> int | None:
        """The largest stored position that falls on the slot."""
        self._check_slot(slot)
        newest = stored - 1
        position = newest - (newest - slot) % self.capacity
        return position if position >= 0 else None

    def plan_append(self, stored: int, length: int) -> AppendPlan:
        """At most two writes: the newest min(length, C) rows, broken where the ring wraps."""
        _check_lengths(stored, length)
        count = min(length, self.capacity)
        row = length - count
        slot = (stored + row) % self.capacity
        until_end = min(count, self.capacity - slot)
        writes: tuple[Write, ...] = (_make(Write, (row, slot, until_end)),) if until_end else ()
        if count > until_end:
            writes += (_make(Write, (row + until_end, 0, count - until_end)),)
        return _make(AppendPlan, ((), writes))

    def can_trim(self, stored: int, high_water: int, num_tokens: int) -> bool:
        """When no key of the new end's window was overwritten: max(0, m - W + 1) >= high_water - C.

        The slot of position p was last written by p + C exactly when p + C < high_water.
        """
        _check_trim(stored, high_water)
        if not 0 <= num_tokens <= stored:
            return False
        oldest_needed = max(0, num_tokens - self.local_window_size + 1)
        return num_tokens in (0, stored) or oldest_needed >= high_water - self.capacity
