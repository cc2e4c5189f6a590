"""Trim rules against brute force: what a slot really holds, for every length the cache might go back to."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_sim import Simulation, fed, linear, ring, rolling, windowed_layouts

from npusim.layout import Layout, RingLayout, RollingLayout, takes_back_blocks


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    windowed_layouts(),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=10),
)
def test_trim_rule_is_sound_and_complete(layout: Layout, steps: list[tuple[bool, int]]) -> None:
    """`can_trim` says yes exactly where every slot that the shorter cache relies on is still right."""
    simulation = Simulation(layout)
    for is_append, amount in steps:
        stored = len(simulation.history)
        target = max(0, stored - amount)
        if is_append:
            simulation.append(simulation.new_tokens(amount))
        elif layout.can_trim(stored, simulation.high_water, target):
            simulation.trim(target)
        for num_tokens in range(len(simulation.history) + 1):
            check_trim_rule(simulation, num_tokens)


@pytest.mark.parametrize("slack", [0, 1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [RollingLayout, RingLayout])
def test_trim_rule_after_a_block_a_trim_and_another_block(
    kind: type[Layout], window: int, slack: int
) -> None:
    capacity = window + slack if kind is RollingLayout else max(1, window - 1 + slack)
    layout = kind(capacity=capacity, local_window_size=window)
    for stored, block, rejected, again in itertools.product(range(11), range(1, 5), range(4), range(3)):
        simulation = fed(layout, [stored, block])
        target = max(0, stored + block - rejected)
        if layout.can_trim(stored + block, simulation.high_water, target):
            simulation.trim(target)
            simulation.append(simulation.new_tokens(again))
            for num_tokens in range(len(simulation.history) + 1):
                check_trim_rule(simulation, num_tokens)


def check_trim_rule(simulation: Simulation, num_tokens: int) -> None:
    layout = simulation.layout
    allowed = layout.can_trim(len(simulation.history), simulation.high_water, num_tokens)
    relied_on = layout.readable_positions(num_tokens)
    if isinstance(layout, RollingLayout):  # its contract is about every row, not the window's alone
        relied_on = layout.resident(num_tokens)
    exact = all(
        simulation.slots[layout.slot_of(position, num_tokens)] == simulation.history[position]
        for position in relied_on
    )
    if isinstance(layout, RingLayout) and layout.local_window_size == 1:
        # nothing of the past is ever read, yet the rule asks for position m: it only errs on the safe side
        assert exact
    else:
        assert allowed == exact, num_tokens


def test_rolling_trim_follows_the_resident_counts() -> None:
    layout = rolling(6, 4)
    counts = {total: layout.num_resident(total) for total in range(15)}
    for stored in range(1, 15):
        for k in range(stored):
            expected = counts[stored - k] == counts[stored] - k
            assert layout.can_trim(stored, stored + 3, stored - k) is expected


@pytest.mark.parametrize(
    "layout", [rolling(4, 4), rolling(6, 4), rolling(9, 2), ring(3, 4), ring(5, 4), ring(7, 4), linear(24, 3)]
)
def test_taking_blocks_back_is_said_of_every_length(layout: Layout) -> None:
    for block_size, num_tokens in itertools.product(range(1, 6), range(1, 25)):
        expected = all(
            layout.can_trim(stored, stored, num_kept)
            for stored in range(block_size, num_tokens + 1)
            for num_kept in range(stored - block_size + 1, stored)
        )
        assert takes_back_blocks(layout, block_size=block_size, num_tokens=num_tokens) is expected


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("slack", [0, 1, 3])
def test_a_ring_is_trimmed_by_the_rule_and_nothing_stricter(window: int, slack: int) -> None:
    capacity = max(1, window - 1 + slack)
    layout = ring(capacity, window)
    for high_water in range(15):
        for stored in range(high_water + 1):
            for m in range(stored):
                rule = m == 0 or max(0, m - window + 1) >= high_water - capacity
                assert layout.can_trim(stored, high_water, m) is rule


def test_a_ring_rewound_twice_remembers_how_far_it_was_written() -> None:
    simulation = fed(ring(7, 4), [12])
    assert [m for m in range(13) if simulation.layout.can_trim(12, 12, m)] == [0, 8, 9, 10, 11, 12]
    simulation.trim(10)
    assert not simulation.layout.can_trim(10, 12, 7)
    # had the mark sunk to 10 with the trim, 6 and 7 would pass as well: positions 3 and 4 are overwritten
    assert [m for m in range(11) if simulation.layout.can_trim(10, 12, m)] == [0, 8, 9, 10]
    assert [m for m in range(11) if simulation.layout.can_trim(10, 10, m)] == [0, 6, 7, 8, 9, 10]


def test_a_trim_to_what_is_stored_is_always_possible() -> None:
    """Even where the mark was kept up over a trim to 0, after which no older row is ever read."""
    assert [m for m in range(4) if ring(4, 4).can_trim(3, 20, m)] == [0, 3]


def test_linear_trim_needs_only_that_the_positions_exist() -> None:
    layout = linear(9, 3)
    assert [m for m in range(-2, 10) if layout.can_trim(6, 8, m)] == [0, 1, 2, 3, 4, 5, 6]
