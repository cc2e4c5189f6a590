"""Host layouts: what is resident where, what an append writes, what a trim may undo."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_sim import Simulation, fed, linear, ring, rolling, windowed_layouts

from npusim.errors import CapacityError, ConfigError
from npusim.layout import (
    AppendPlan,
    Layout,
    LinearLayout,
    Move,
    RingLayout,
    RollingLayout,
    Write,
)


def positions(layout: Layout, stored: int) -> list[int | None]:
    return [layout.position_at(slot, stored) for slot in range(layout.capacity)]


def held(simulation: Simulation) -> list[int | None]:
    """Positions found in the slots; a token that is no longer part of the history would raise."""
    return [None if token is None else simulation.history.index(token) for token in simulation.slots]


# --- the published table of the rolling cache -------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "window", "expected"),
    [
        (6, 4, [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5]),
        (8, 4, [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4]),
        (4, 4, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        (5, 1, [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4]),
    ],
)
def test_rolling_resident_counts(capacity: int, window: int, expected: list[int]) -> None:
    layout = rolling(capacity, window)
    assert [layout.num_resident(stored) for stored in range(1, 15)] == expected
    assert [len(layout.resident(stored)) for stored in range(1, 15)] == expected


@pytest.mark.parametrize("feeds", [[3] + [1] * 8, [8, 1, 1, 1], [3, 3, 3, 2], [5, 4, 2], [11]])
def test_rolling_holds_the_newest_in_order_whatever_the_feed(feeds: list[int]) -> None:
    simulation = fed(rolling(6, 4), feeds)
    assert len(simulation.history) == 11
    assert held(simulation)[:5] == [6, 7, 8, 9, 10]


def test_rolling_moves_only_once_per_gap() -> None:
    simulation = Simulation(rolling(6, 4))
    moved = [bool(simulation.append(simulation.new_tokens(1)).moves) for _ in range(13)]
    assert [step + 1 for step, did in enumerate(moved) if did] == [7, 10, 13]


def test_rolling_plan_in_numbers() -> None:
    # 9 stored in C = 6, W = 4: positions 3..8 held; 2 more evict 3..5
    assert rolling(6, 4).plan_append(9, 2) == AppendPlan(
        moves=(Move(source=3, target=0, length=3),), writes=(Write(row=0, slot=3, length=2),)
    )


def test_rolling_block_longer_than_the_buffer_writes_its_newest_rows() -> None:
    assert rolling(6, 4).plan_append(2, 12) == AppendPlan(moves=(), writes=(Write(row=7, slot=0, length=5),))


# --- the ring ---------------------------------------------------------------------------------------------


def test_ring_plan_in_numbers() -> None:
    assert ring(7, 5).plan_append(12, 4) == AppendPlan(
        moves=(), writes=(Write(row=0, slot=5, length=2), Write(row=2, slot=0, length=2))
    )
    assert ring(7, 5).plan_append(3, 20).writes == (
        Write(row=13, slot=2, length=5),
        Write(row=18, slot=0, length=2),
    )


def test_ring_at_the_exact_boundary() -> None:
    """Window and ring of 8, prompt of 6, decoded to 18: nothing goes at 8, position 0 at 9."""
    simulation = fed(ring(8, 8), [6])
    for total in range(7, 19):
        simulation.append(simulation.new_tokens(1))
        newest = list(range(max(0, total - 8), total))
        assert sorted(p for p in held(simulation) if p is not None) == newest
        assert list(simulation.layout.resident(total)) == newest
    assert positions(ring(8, 8), 8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert positions(ring(8, 8), 9) == [8, 1, 2, 3, 4, 5, 6, 7]
    assert positions(ring(8, 8), 16) == [8, 9, 10, 11, 12, 13, 14, 15]
    assert positions(ring(8, 8), 17) == [16, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("layout", [linear(8), rolling(8, 8), ring(8, 8)], ids=lambda x: type(x).__name__)
def test_fresh_slots_are_empty_not_position_zero(layout: Layout) -> None:
    assert positions(layout, 0) == [None] * 8
    assert positions(layout, 3) == [0, 1, 2] + [None] * 5
    assert layout.readable_slots(0) == ()


# --- appends that do not fit, and padding -----------------------------------------------------------------


@pytest.mark.parametrize(("stored", "length", "fits"), [(14, 2, True), (15, 2, False), (10, 6, True)])
def test_linear_capacity_counts_real_rows_only(stored: int, length: int, fits: bool) -> None:
    if fits:
        assert linear(16).plan_append(stored, length).writes == (Write(0, stored, length),)
        return
    with pytest.raises(CapacityError, match="2 tokens at length 15 need 17 slots, capacity is 16"):
        linear(16).plan_append(stored, length)


def test_linear_holds_no_more_than_its_slots() -> None:
    assert linear(5).resident(8) == range(5)
    assert linear(5).readable_slots(8) == (range(5),)


def test_padding_of_the_last_chunk_would_evict_window_rows() -> None:
    """Prompt 13 as 8 + 5 real rows of a chunk of 8: storing the 3 padding rows as well loses 10 and 11."""
    real = fed(ring(4, 4), [8, 5])
    assert sorted(p for p in held(real) if p is not None) == [9, 10, 11, 12]
    padded = fed(ring(4, 4), [8, 8])
    padded.trim(13)
    assert padded.past_lost() == [10, 11]


def test_an_append_of_nothing_plans_nothing() -> None:
    for layout in (linear(5), rolling(5, 3), ring(5, 3)):
        assert layout.plan_append(4, 0) == AppendPlan(moves=(), writes=())


# --- laws -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(windowed_layouts(), st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_slots_depend_on_the_total_alone(layout: Layout, chunks: list[int]) -> None:
    simulation, total = fed(layout, chunks), sum(chunks)
    expected = positions(layout, total)
    assert sorted(position for position in expected if position is not None) == list(layout.resident(total))
    for slot, position in enumerate(expected):
        if position is not None:
            assert simulation.slots[slot] == simulation.history[position]
            assert layout.slot_of(position, total) == slot


@settings(max_examples=100, deadline=None, derandomize=True)
@given(windowed_layouts(), st.integers(0, 30))
def test_readable_slots_are_the_window_of_the_next_query(layout: Layout, stored: int) -> None:
    window = layout.local_window_size
    runs = layout.readable_slots(stored)
    slots = [slot for run in runs for slot in run]
    assert len(runs) <= 2
    assert all(run for run in runs)
    assert [layout.position_at(slot, stored) for slot in slots] == list(
        range(max(0, stored - window + 1), stored)
    )


def test_without_a_window_every_stored_slot_is_readable() -> None:
    assert linear(9).readable_slots(6) == (range(6),)
    assert linear(9, 4).readable_slots(6) == (range(3, 6),)
    assert ring(5, 4).readable_slots(6) == (range(3, 5), range(1))


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "capacity", "window", "message"),
    [
        (RollingLayout, 4, 5, "rolling layout: capacity 4 is below the least of 5 (C >= W"),
        (RingLayout, 3, 5, "ring layout: capacity 3 is below the least of 4 (C >= W - 1"),
        (RingLayout, 0, 1, "ring layout: capacity 0 is below the least of 1"),
        (LinearLayout, 0, -1, "linear layout: capacity 0 is below the least of 1"),
        (RollingLayout, 9, -1, "local_window_size is -1 (no window), but rows are evicted here"),
        (RingLayout, 9, -1, "local_window_size is -1 (no window), but rows are evicted here"),
        (LinearLayout, 9, 0, "linear layout: local_window_size is 0"),
        (RingLayout, 9, -2, "ring layout: local_window_size is -2"),
    ],
)
def test_layouts_that_cannot_hold_are_refused(
    kind: type[Layout], capacity: int, window: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(capacity=capacity, local_window_size=window)


@pytest.mark.parametrize("layout", [linear(6), rolling(6, 4), ring(6, 4)], ids=lambda x: type(x).__name__)
def test_questions_about_what_is_not_there_are_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"position 4 is not held with 4 tokens stored; held are 0\.\.3"):
        layout.slot_of(4, 4)
    with pytest.raises(ValueError, match=r"slot 6 is outside the buffer; slots are 0\.\.5"):
        layout.position_at(6, 4)
    with pytest.raises(ValueError, match="stored 4 and length -1 are counts"):
        layout.plan_append(4, -1)
    with pytest.raises(ValueError, match=r"stored 5 must be 0\.\.high_water, and high_water is 4"):
        layout.can_trim(5, 4, 3)
