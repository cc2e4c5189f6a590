"""A buffer of tokens driven by layout plans, and the plain list that says what it ought to hold.

Every token ever written gets its own number, so a token that was rejected and one that took its position
afterwards are told apart: a stale slot shows as a wrong number, not as a right position.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from npusim.layout import (
    AppendPlan,
    Frame,
    GatheredFrame,
    Layout,
    LinearLayout,
    RingLayout,
    RollingLayout,
)


@dataclass
class Simulation:
    """`history` is the truth, position by position; `slots` is what the layout made of it."""

    layout: Layout
    history: list[int] = field(default_factory=list)
    slots: list[int | None] = field(default_factory=list)
    high_water: int = 0
    written: int = 0

    def __post_init__(self) -> None:
        self.slots = [None] * self.layout.capacity

    def new_tokens(self, length: int) -> list[int]:
        """Tokens that no one has seen before."""
        first = 1000 + self.written
        self.written += length
        return list(range(first, first + length))

    def append(self, tokens: list[int]) -> AppendPlan:
        """Store tokens as the layout plans it."""
        plan = self.layout.plan_append(len(self.history), len(tokens))
        for move in plan.moves:
            rows = self.slots[move.source : move.source + move.length]
            self.slots[move.target : move.target + move.length] = rows
        for write in plan.writes:
            rows = tokens[write.row : write.row + write.length]
            assert len(rows) == write.length > 0
            assert 0 <= write.slot <= write.slot + write.length <= self.layout.capacity
            self.slots[write.slot : write.slot + write.length] = rows
        assert len(self.slots) == self.layout.capacity
        self.history += tokens
        self.high_water = max(self.high_water, len(self.history))
        return plan

    def trim(self, num_tokens: int) -> None:
        """Forget the newest tokens without asking whether the layout can."""
        del self.history[num_tokens:]
        if num_tokens == 0:
            self.high_water = 0

    def keys_needed(self, tokens: list[int]) -> list[list[int]]:
        """Per new row, the tokens of its window, oldest first."""
        every, window = self.history + tokens, self.layout.local_window_size
        rows = []
        for query in range(len(self.history), len(every)):
            oldest = 0 if window < 0 else max(0, query - window + 1)
            rows.append(every[oldest : query + 1])
        return rows

    def keys_seen(self, frame: Frame, tokens: list[int]) -> list[list[int | None]]:
        """Per new row, the tokens that the frame lets it attend to, by position (block is its own range)."""
        past = self.slots
        if isinstance(frame, GatheredFrame):
            past = [self.slots[frame.gather_index(j)] for j in range(frame.num_past_keys)]
        padding: list[int | None] = [None] * (frame.block_size - len(tokens))
        keys = past + padding + tokens
        assert len(keys) == frame.num_keys
        rows = []
        for row in range(len(padding), frame.block_size):
            seen = [slot for slot in range(frame.num_keys) if frame.visible(row, slot)]
            rows.append([keys[slot] for slot in sorted(seen, key=frame.key_position)])
        return rows

    def past_lost(self) -> list[int]:
        """Positions in the window of the next query whose tokens are in no slot."""
        stored, window = len(self.history), self.layout.local_window_size
        needed = range(max(0, stored - window + 1), stored)
        return [position for position in needed if self.history[position] not in self.slots]


def frame_of(kind: type[Frame], simulation: Simulation, num_new: int, block_size: int | None = None) -> Frame:
    """The frame of a step of `num_new` tokens after what the simulation has stored."""
    return kind(
        capacity=simulation.layout.capacity,
        block_size=block_size or num_new,
        stored=len(simulation.history),
        num_new=num_new,
        local_window_size=simulation.layout.local_window_size,
    )


def linear(capacity: int, window: int = -1) -> LinearLayout:
    """Short for the keyword form, as the next two."""
    return LinearLayout(capacity=capacity, local_window_size=window)


def rolling(capacity: int, window: int) -> RollingLayout:
    """A rolling layout."""
    return RollingLayout(capacity=capacity, local_window_size=window)


def ring(capacity: int, window: int) -> RingLayout:
    """A ring layout."""
    return RingLayout(capacity=capacity, local_window_size=window)


def fed(layout: Layout, chunks: list[int]) -> Simulation:
    """A simulation to which chunks of these lengths were appended."""
    simulation = Simulation(layout)
    for chunk in chunks:
        simulation.append(simulation.new_tokens(chunk))
    return simulation


@st.composite
def windowed_layouts(draw: st.DrawFn) -> Layout:
    """Rolling and ring layouts from their least capacity up."""
    window = draw(st.integers(1, 9))
    slack = draw(st.integers(0, 7))
    if draw(st.booleans()):
        return rolling(window + slack, window)
    return ring(max(1, window - 1 + slack), window)
