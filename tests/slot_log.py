"""What each slot of each layer really holds: every stored row has a number of its own, never used again.

Written from the layouts' definitions, token by token, so that a trim can be judged by what is in the slots
and not by the rule that is under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """kind: "linear" (position p in slot p), "ring" (in slot p mod rows), "rolling" (newest rows in order).

    A rolling buffer that is full drops its oldest rows - window + 1 rows at once.
    """

    kind: str
    rows: int
    window: int

    def needed(self, num_tokens: int) -> range:
        """The positions that a cache of num_tokens tokens must hold.

        Those that the next query reads; in a rolling buffer all that ONNX Runtime would hold.
        """
        if self.kind == "rolling":
            return range(num_tokens - len(self.fill(list(range(num_tokens)))), num_tokens)
        return range(0 if self.window < 0 else max(0, num_tokens - self.window + 1), num_tokens)

    def slot(self, position: int, num_tokens: int) -> int:
        """Where the cache of num_tokens tokens looks for a position."""
        match self.kind:
            case "rolling":
                return position - self.needed(num_tokens).start
            case "ring":
                return position % self.rows
            case _:
                return position

    def fill(self, numbers: list[int]) -> dict[int, int]:
        """An empty buffer after these rows."""
        slots: dict[int, int] = {}
        self.append(slots, 0, numbers)
        return slots

    def append(self, slots: dict[int, int], stored: int, numbers: list[int]) -> None:
        """Store rows at positions stored.., one after the other."""
        for position, number in enumerate(numbers, start=stored):
            if self.kind != "rolling":
                slots[self.slot(position, position)] = number
                continue
            if len(slots) == self.rows:
                gap = self.rows - self.window + 1
                kept = [slots[slot] for slot in range(gap, self.rows)]
                slots.clear()
                slots.update(enumerate(kept))
            slots[len(slots)] = number


@dataclass
class SlotLog:
    """All buffers of one cache; `history` holds the number of each stored position."""

    buffers: tuple[Buffer, ...]
    deferred: bool
    history: list[int] = field(default_factory=list)
    _held_back: int = 0
    _slots: list[dict[int, int]] = field(default_factory=list)
    _last_number: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.history, self._held_back = [], 0
        self._slots = [{} for _ in self.buffers]

    def settle(self, start: int) -> None:
        """Write the rows held back below position `start`."""
        written = len(self.history) - self._held_back
        accepted = max(0, min(start - written, self._held_back))
        self._write(written, self.history[written : written + accepted])
        self._held_back -= accepted

    def store(self, start: int, count: int) -> None:
        """A block of `count` tokens at `start`; what lay there and beyond is gone."""
        self.settle(start)
        self.trim(start)
        if start == 0:
            self.reset()
        numbers = list(range(self._last_number + 1, self._last_number + count + 1))
        self._last_number += count
        self.history += numbers
        if self.deferred:
            self._held_back = count
        else:
            self._write(start, numbers)

    def trim(self, num_tokens: int) -> None:
        """Keep num_tokens tokens, whether or not their rows are still there."""
        written = len(self.history) - self._held_back
        del self.history[num_tokens:]
        self._held_back = max(0, num_tokens - written)
        for buffer, slots in zip(self.buffers, self._slots, strict=True):
            if buffer.kind == "rolling" and num_tokens < written:
                for slot in [slot for slot in slots if slot >= len(buffer.needed(num_tokens))]:
                    del slots[slot]

    def holds(self, num_tokens: int) -> bool:
        """Whether a cache cut to num_tokens would find every row it needs in its slot."""
        if not 0 <= num_tokens <= len(self.history):
            return False
        written = len(self.history) - self._held_back
        return num_tokens >= written or all(
            slots.get(buffer.slot(position, num_tokens)) == self.history[position]
            for buffer, slots in zip(self.buffers, self._slots, strict=True)
            for position in buffer.needed(num_tokens)
        )

    def _write(self, stored: int, numbers: list[int]) -> None:
        for buffer, slots in zip(self.buffers, self._slots, strict=True):
            buffer.append(slots, stored, numbers)
