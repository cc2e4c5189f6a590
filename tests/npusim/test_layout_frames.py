"""Graph frames against the host's slots, and the least capacities, by simulation of whole conversations."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_sim import Simulation, fed, frame_of, ring

from npusim.errors import ConfigError
from npusim.layout import (
    CommitPolicy,
    Frame,
    GatheredFrame,
    Layout,
    LinearFrame,
    LinearLayout,
    RightAlignedFrame,
    RingFrame,
    RingLayout,
    RollingFrame,
    RollingLayout,
    ring_min_capacity,
    rolling_min_capacity,
)

WINDOWED = [(RollingLayout, RollingFrame), (RingLayout, RingFrame)]


# --- frames and layouts say the same ----------------------------------------------------------------------


@pytest.mark.parametrize(("layout_kind", "frame_kind"), [(LinearLayout, LinearFrame), *WINDOWED])
def test_every_past_slot_of_frame_and_layout_agrees(
    layout_kind: type[Layout], frame_kind: type[Frame]
) -> None:
    compared = 0
    for capacity, window, stored in itertools.product(range(1, 25), range(1, 25), range(49)):
        least = {LinearLayout: 1, RollingLayout: window, RingLayout: window - 1}[layout_kind]
        if capacity < least or (layout_kind is LinearLayout and window > 1):
            continue
        layout = layout_kind(capacity=capacity, local_window_size=window)
        frame = frame_kind(
            capacity=capacity, block_size=3, stored=stored, num_new=2, local_window_size=window
        )
        for slot in range(capacity):
            position = layout.position_at(slot, stored)
            assert frame.filled(slot) == (position is not None), (layout, stored, slot)
            assert position is None or frame.key_position(slot) == position, (layout, stored, slot)
            compared += 1
    assert compared > 12_000


@pytest.mark.parametrize("frame_kind", [LinearFrame, RollingFrame, RingFrame, GatheredFrame])
def test_the_block_lies_behind_the_capacity_right_aligned(frame_kind: type[Frame]) -> None:
    for stored, size in itertools.product(range(25), range(1, 25)):
        for new in range(1, size + 1):
            frame = frame_kind(capacity=7, block_size=size, stored=stored, num_new=new, local_window_size=5)
            first = 4 if frame_kind is GatheredFrame else 7
            assert frame.num_keys == first + size
            real = [h for h in range(first, frame.num_keys) if frame.filled(h)]
            assert real == list(range(first + size - new, first + size))
            assert [frame.key_position(h) for h in real] == list(range(stored, stored + new))


def test_right_aligned_frame_puts_the_newest_key_last() -> None:
    frame = RightAlignedFrame(capacity=6, block_size=10, stored=3, num_new=10, local_window_size=4)
    assert [h for h in range(16) if frame.filled(h)] == list(range(3, 16))
    assert [frame.key_position(h) for h in range(3, 16)] == list(range(13))
    prompt = RightAlignedFrame(capacity=0, block_size=16, stored=0, num_new=10, local_window_size=4)
    assert [h for h in range(16) if prompt.filled(h)] == list(range(6, 16))
    assert [h for h in range(16) if prompt.visible(9, h)] == [6, 7, 8, 9]
    assert not any(prompt.visible(5, h) for h in range(16))


def test_linear_frame_with_the_past_left_aligned() -> None:
    """Ten stored in 16: the new token sees slots 7, 8, 9 and its own, never the unused ones before it."""
    one = LinearFrame(capacity=16, block_size=1, stored=10, num_new=1, local_window_size=4)
    assert [h for h in range(17) if one.visible(0, h)] == [7, 8, 9, 16]
    three = LinearFrame(capacity=16, block_size=3, stored=10, num_new=3, local_window_size=4)
    seen = [[three.key_position(h) for h in range(19) if three.visible(row, h)] for row in range(3)]
    assert seen == [[7, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 12]]


def test_padding_rows_see_nothing() -> None:
    frame = LinearFrame(capacity=8, block_size=4, stored=5, num_new=2, local_window_size=6)
    assert [sum(frame.visible(row, h) for h in range(12)) for row in range(4)] == [0, 0, 6, 6]


def test_linear_frame_may_be_told_of_more_than_it_holds() -> None:
    frame = LinearFrame(capacity=5, block_size=2, stored=8, num_new=2, local_window_size=-1)
    assert [h for h in range(7) if frame.visible(1, h)] == [0, 1, 2, 3, 4, 5, 6]
    assert [frame.key_position(h) for h in range(7)] == [0, 1, 2, 3, 4, 8, 9]


def test_gathered_rows_are_clamped_into_the_buffer() -> None:
    frame = GatheredFrame(capacity=9, block_size=2, stored=2, num_new=1, local_window_size=5)
    assert [frame.gather_index(j) for j in range(4)] == [0, 0, 0, 1]
    assert [frame.filled(j) for j in range(4)] == [False, False, True, True]
    beyond = GatheredFrame(capacity=9, block_size=2, stored=11, num_new=1, local_window_size=5)
    assert [beyond.gather_index(j) for j in range(4)] == [7, 8, 8, 8]


def test_cached_keys_differ_from_row_to_row() -> None:
    for kind, frame_kind in WINDOWED:
        frame = frame_of(frame_kind, fed(kind(capacity=4, local_window_size=4), [4]), 4)
        assert [sum(frame.visible(row, h) for h in range(4)) for row in range(4)] == [3, 2, 1, 0]


# --- a conversation under a layout sees exactly its windows -----------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, type[Frame]]:
    window = draw(st.integers(1, 8))
    kind = draw(st.sampled_from([LinearFrame, GatheredFrame, RollingFrame, RingFrame]))
    slack = draw(st.integers(0, 6))
    if kind is RollingFrame:
        return RollingLayout(capacity=window + slack, local_window_size=window), kind
    if kind is RingFrame:
        return ring(max(1, window - 1 + slack), window), kind
    return LinearLayout(capacity=80, local_window_size=window), kind


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    cases(),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=9),
)
def test_deferred_commit_is_exact_at_the_least_capacity(
    case: tuple[Layout, type[Frame]], steps: list[tuple[int, int, int]]
) -> None:
    """Any block, padding and number accepted: only accepted rows are stored, and none is ever missing."""
    layout, frame_kind = case
    simulation = Simulation(layout)
    for length, padding, accepted in steps:
        tokens = simulation.new_tokens(length)
        frame = frame_of(frame_kind, simulation, length, length + padding)
        assert simulation.keys_seen(frame, tokens) == simulation.keys_needed(tokens)
        simulation.append(tokens[:accepted])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    cases(),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=2, max_size=9),
)
def test_eager_commit_with_allowed_trims_is_exact(
    case: tuple[Layout, type[Frame]], steps: list[tuple[int, int]]
) -> None:
    layout, frame_kind = case
    simulation = Simulation(layout)
    for length, rejected in steps:
        tokens = simulation.new_tokens(length)
        frame = frame_of(frame_kind, simulation, length)
        assert simulation.keys_seen(frame, tokens) == simulation.keys_needed(tokens)
        simulation.append(tokens)
        target = max(0, len(simulation.history) - rejected)
        if layout.can_trim(len(simulation.history), simulation.high_water, target):
            simulation.trim(target)


# --- least capacities are tight ---------------------------------------------------------------------------


class Unchecked(RingLayout):
    """A ring that accepts any capacity, to see what the refused ones would lose."""

    def __post_init__(self) -> None:
        pass


def worst_loss(capacity: int, window: int, block: int, min_kept: int) -> int:
    """Most keys that the next query misses after a block is written and all but some rows are taken back."""
    worst = 0
    for stored, kept in itertools.product(range(window, window + 20), range(min_kept, block + 1)):
        simulation = fed(Unchecked(capacity=capacity, local_window_size=window), [stored])
        simulation.append(simulation.new_tokens(block))
        simulation.trim(stored + kept)
        worst = max(worst, len(simulation.past_lost()))
    return worst


@pytest.mark.parametrize(("min_kept", "expected"), [(0, [3, 2, 1, 0, 0]), (1, [2, 1, 0, 0, 0])])
def test_keys_lost_to_rejected_tokens(min_kept: int, expected: list[int]) -> None:
    assert [worst_loss(capacity, 4, 4, min_kept) for capacity in range(4, 9)] == expected


@pytest.mark.parametrize(("window", "block"), [*itertools.product(range(2, 8), range(1, 7))])
def test_eager_bounds_are_tight(window: int, block: int) -> None:
    for kept in (0, 1):
        bound = ring_min_capacity(window, CommitPolicy.EAGER, block_size=block, min_kept=kept)
        assert bound == window + block - 1 - kept
        assert worst_loss(bound, window, block, kept) == 0
        assert bound == 1 or worst_loss(bound - 1, window, block, kept) == 1


@pytest.mark.parametrize("window", range(2, 12))
def test_deferred_bound_is_tight(window: int) -> None:
    bound = ring_min_capacity(window, CommitPolicy.DEFERRED, block_size=5)
    assert bound == window - 1
    for stored in range(window, 3 * window):
        assert fed(ring(bound, window), [stored]).past_lost() == []
        if bound > 1:
            smaller = fed(Unchecked(capacity=bound - 1, local_window_size=window), [stored])
            assert smaller.past_lost() == [stored - window + 1]


def test_a_window_of_one_reads_no_past_but_keeps_one_row() -> None:
    assert ring_min_capacity(1, CommitPolicy.DEFERRED) == 1
    assert ring_min_capacity(1, CommitPolicy.EAGER, block_size=1, min_kept=1) == 1
    assert ring_min_capacity(1, CommitPolicy.EAGER, block_size=3) == 3
    frame = frame_of(RingFrame, fed(ring(1, 1), [5]), 2)
    assert [[h for h in range(3) if frame.visible(row, h)] for row in range(2)] == [[1], [2]]


def test_rolling_bound_is_tight() -> None:
    """Below W there is no eviction step at all; at W every length keeps the whole window."""
    for window in range(1, 10):
        bound = rolling_min_capacity(window)
        assert bound == window
        layout = RollingLayout(capacity=bound, local_window_size=window)
        assert layout.gap == 1
        assert min(layout.num_resident(stored) for stored in range(window, 40)) == window
        with pytest.raises(ConfigError, match=f"capacity {bound - 1} is below the least of {bound}"):
            RollingLayout(capacity=bound - 1, local_window_size=window)


@pytest.mark.parametrize(
    ("block_size", "min_kept", "message"),
    [(0, 0, "block_size is 0"), (3, 4, r"min_kept is 4; of a block of 3 rows 0\.\.3"), (3, -1, "min_kept")],
)
def test_impossible_blocks_are_refused(block_size: int, min_kept: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ring_min_capacity(5, CommitPolicy.EAGER, block_size=block_size, min_kept=min_kept)


# --- why the block is its own key range -------------------------------------------------------------------


def lost_append_first(layout: Layout, stored: int, length: int) -> dict[int, list[int]]:
    """Per query, the keys of its window that are gone where a cache appends before it attends."""
    resident = layout.resident(stored + length)
    lost = {}
    for query in range(stored, stored + length):
        needed = range(max(0, query - layout.local_window_size + 1), query + 1)
        missing = [position for position in needed if position not in resident]
        lost.update({query: missing} if missing else {})
    return lost


@pytest.mark.parametrize(
    ("capacity", "stored", "length", "lost"),
    [
        (4, 6, 3, {6: [3, 4], 7: [4]}),
        (6, 6, 3, {}),
        (8, 8, 8, {8: [5, 6, 7], 9: [6, 7], 10: [7]}),
        (8, 8, 4, {}),
        (11, 8, 8, {}),
    ],
)
def test_append_first_loses_what_a_block_of_its_own_keeps(
    capacity: int, stored: int, length: int, lost: dict[int, list[int]]
) -> None:
    layout = ring(capacity, 4)
    assert lost_append_first(layout, stored, length) == lost
    simulation = fed(layout, [stored])
    tokens = simulation.new_tokens(length)
    frame = frame_of(RingFrame, simulation, length)
    assert simulation.keys_seen(frame, tokens) == simulation.keys_needed(tokens)


@pytest.mark.parametrize(("capacity", "window"), [(8, 4), (11, 4), (9, 6)])
def test_largest_chunk_that_append_first_survives(capacity: int, window: int) -> None:
    safe = capacity - window + 1
    assert lost_append_first(ring(capacity, window), 3 * capacity, safe) == {}
    assert len(lost_append_first(ring(capacity, window), 3 * capacity, safe + 1)) == 1


# --- refusals ---------------------------------------------------------------------------------------------


def test_frames_refuse_impossible_steps() -> None:
    with pytest.raises(ValueError, match="num_new is 4; a block of 3 rows"):
        LinearFrame(capacity=5, block_size=3, stored=2, num_new=4)
    with pytest.raises(ValueError, match="num_new is 0; a block of 3 rows"):
        LinearFrame(capacity=5, block_size=3, stored=2, num_new=0)
    with pytest.raises(ValueError, match="capacity 5 and stored -1 are counts"):
        LinearFrame(capacity=5, block_size=3, stored=-1, num_new=2)
    with pytest.raises(ConfigError, match="gathered layout: local_window_size is -1"):
        GatheredFrame(capacity=5, block_size=3, stored=2, num_new=2)
    with pytest.raises(ConfigError, match="local_window_size is 0"):
        LinearFrame(capacity=5, block_size=3, stored=2, num_new=2, local_window_size=0)
