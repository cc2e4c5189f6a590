"""The graph's side of a layout, in integers: which key slot of a step holds which position.

A step has C past slots and a block of S rows of which the last n are real; P tokens were stored before it and
T = P + n after it. Attention is one rule over all frames (`Frame.visible`); a frame supplies only
`filled(h)` and `key_position(h)`. The same arithmetic is lowered into the graphs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from npusim.layout.bounds import check_window, require_window
from npusim.layout.layouts import RollingLayout


@dataclass(frozen=True, kw_only=True)
class Frame(ABC):
    """One step: `capacity` past slots, `block_size` rows, `num_new` of them real, `stored` tokens before."""

    capacity: int
    block_size: int
    stored: int
    num_new: int
    local_window_size: int = -1

    def __post_init__(self) -> None:
        check_window(self.local_window_size, "frame's")
        if self.capacity < 0 or self.stored < 0:
            raise ValueError(f"capacity {self.capacity} and stored {self.stored} are counts; give 0 or more")
        if not 1 <= self.num_new <= self.block_size:
            raise ValueError(f"num_new is {self.num_new}; a block of {self.block_size} rows has 1 or more")

    @property
    def total(self) -> int:
        """T: tokens stored once the block is."""
        return self.stored + self.num_new

    @property
    def num_keys(self) -> int:
        """Key slots that the attention of this frame sees: the past ones, then the block's."""
        return self.num_past_keys + self.block_size

    @property
    def num_past_keys(self) -> int:
        """Key slots before the block's."""
        return self.capacity

    @abstractmethod
    def filled(self, slot: int) -> bool:
        """Whether the slot holds a key at all."""

    @abstractmethod
    def key_position(self, slot: int) -> int:
        """Absolute position of the slot's key; meaningless where `filled` is false."""

    def query_position(self, row: int) -> int:
        """Absolute position of a block row; padding rows come out before the first real one."""
        return self.total - self.block_size + row

    def visible(self, row: int, slot: int) -> bool:
        """Whether a block row attends to a key slot: real, filled, not newer, inside the window."""
        distance = self.query_position(row) - self.key_position(slot)
        is_real = row >= self.block_size - self.num_new
        in_window = self.local_window_size < 0 or distance < self.local_window_size
        return is_real and self.filled(slot) and distance >= 0 and in_window


@dataclass(frozen=True, kw_only=True)
class RightAlignedFrame(Frame):
    """Past and block form one right-aligned run that ends with the last slot (the prefill branch)."""

    def filled(self, slot: int) -> bool:
        """h >= K - T."""
        return slot >= self.num_keys - self.total

    def key_position(self, slot: int) -> int:
        """T - K + h: slot distance is token distance."""
        return self.total - self.num_keys + slot


@dataclass(frozen=True, kw_only=True)
class SplitFrame(Frame):
    """The past in slots [0, C) by some layout, the block in the fixed slots behind it (generate branch)."""

    def filled(self, slot: int) -> bool:
        """In the block the last n rows; in the past what the layout says."""
        in_block = slot - self.num_past_keys
        if in_block >= 0:
            return in_block >= self.block_size - self.num_new
        return self.past_filled(slot)

    def key_position(self, slot: int) -> int:
        """In the block T - S + row; in the past what the layout says."""
        in_block = slot - self.num_past_keys
        if in_block >= 0:
            return self.total - self.block_size + in_block
        return self.past_position(slot)

    @abstractmethod
    def past_filled(self, slot: int) -> bool:
        """`filled` of a past slot."""

    @abstractmethod
    def past_position(self, slot: int) -> int:
        """`key_position` of a past slot."""


@dataclass(frozen=True, kw_only=True)
class LinearFrame(SplitFrame):
    """Past slot h holds position h; P may exceed C, then the rows beyond C are not there."""

    def past_filled(self, slot: int) -> bool:
        """h < min(P, C)."""
        return slot < min(self.stored, self.capacity)

    def past_position(self, slot: int) -> int:
        """h."""
        return slot


@dataclass(frozen=True, kw_only=True)
class RollingFrame(SplitFrame):
    """Past slots [0, L(P)) hold the L(P) newest positions in order."""

    @property
    def num_resident(self) -> int:
        """L(P)."""
        layout = RollingLayout(capacity=self.capacity, local_window_size=self.local_window_size)
        return layout.num_resident(self.stored)

    def past_filled(self, slot: int) -> bool:
        """h < L(P)."""
        return slot < self.num_resident

    def past_position(self, slot: int) -> int:
        """P - L(P) + h."""
        return self.stored - self.num_resident + slot


@dataclass(frozen=True, kw_only=True)
class RingFrame(SplitFrame):
    """Past slot h holds the largest position below P that is h modulo C."""

    def past_filled(self, slot: int) -> bool:
        """P > 0 and k(h) >= max(0, P - C)."""
        return self.stored > 0 and self.past_position(slot) >= max(0, self.stored - self.capacity)

    def past_position(self, slot: int) -> int:
        """P - 1 less the distance, modulo C, from the slot to that of P - 1."""
        newest = self.stored - 1
        return newest - (newest - slot) % self.capacity


@dataclass(frozen=True, kw_only=True)
class GatheredFrame(SplitFrame):
    """A linear cache of which the graph first gathers the W - 1 newest rows; past slot j is the j-th."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window(self.local_window_size, "gathered")

    @property
    def num_past_keys(self) -> int:
        """W - 1."""
        return self.local_window_size - 1

    def gather_index(self, slot: int) -> int:
        """The buffer slot that past key j is gathered from: clamp(P - (W - 1) + j, 0, C - 1)."""
        return min(max(self.past_position(slot), 0), self.capacity - 1)

    def past_filled(self, slot: int) -> bool:
        """0 <= P - (W - 1) + j < C: P may exceed C, then the rows beyond C are not there."""
        return 0 <= self.past_position(slot) < self.capacity

    def past_position(self, slot: int) -> int:
        """P - (W - 1) + j."""
        return self.stored - self.num_past_keys + slot
