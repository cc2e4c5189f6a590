"""State of the contiguous reference cache: memory, capacity, storage type, rewind, reset."""

import re

import numpy as np
import pytest
from cache_log import cache_config, feed, peek

from npusim.errors import CapacityError, InputError, TrimError
from npusim.reference.caches import CacheSizing
from npusim.reference.contiguous import ContiguousReferenceCache


def cache_of(**changes: object) -> ContiguousReferenceCache:
    return ContiguousReferenceCache(cache_config(**changes))


# --- capacity and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizing", CacheSizing)
def test_an_exact_fit_is_a_fit(sizing: CacheSizing) -> None:
    cache = cache_of(sizing=sizing, windows=(-1,))
    feed(cache, 8)
    assert [n for n in range(1, 9) if cache.can_extend(n)] == [1, 2, 3, 4, 5]
    with pytest.raises(CapacityError, match="step of 6 at length 8 needs 14 rows, capacity is 13"):
        feed(cache, 6)
    assert cache.length == 8
    feed(cache, 5)
    assert cache.length == 13
    assert not cache.can_extend(1)
    cache.rewind(12)
    assert peek(cache, 1) == [*range(12), -1]


def test_dynamic_memory_doubles_up_to_the_capacity() -> None:
    """Capacity 13 is no power of two: after 8 rows the next growth stops at 13, not 16."""
    cache = cache_of(sizing=CacheSizing.DYNAMIC, num_layers=2, windows=(-1,))
    row = 2 * 2 * (5 + 3) * 8  # layers x heads x (key + value size) x float64
    rows = []
    for count in (1, 1, 2, 3, 1, 1, 4):
        feed(cache, count)
        rows.append(cache.nbytes // row)
    assert rows == [1, 2, 4, 8, 8, 13, 13]
    assert peek_full(cache) == list(range(13))


def peek_full(cache: ContiguousReferenceCache) -> list[float]:
    """What is stored when there is no room for one more: go one back, look, and add the last by hand."""
    last = cache.length - 1
    cache.rewind(last)
    return [*peek(cache, 0)[:-1], float(last)]


def test_static_memory_is_whole_and_window_sized_at_once() -> None:
    row = 2 * (5 + 3) * 8
    assert cache_of().nbytes == (3 + 13 + 3 + 5) * row
    assert cache_of(window_slack=4).nbytes == (7 + 13 + 7 + 9) * row
    assert cache_of(dtype=np.float16).nbytes == (3 + 13 + 3 + 5) * row // 4
    assert cache_of(sizing=CacheSizing.DYNAMIC).nbytes == 0


def test_dynamic_memory_of_a_windowed_layer_stops_at_its_slots() -> None:
    cache = cache_of(sizing=CacheSizing.DYNAMIC)
    for _ in range(13):
        feed(cache, 1)
    assert cache.nbytes == cache_of().nbytes


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_are_rounded_to_the_storage_type_once_and_for_all(dtype: type[np.floating]) -> None:
    cache = cache_of(num_layers=1, windows=(-1,), dtype=dtype)
    rng = np.random.default_rng(5)
    key, value = rng.normal(size=(1, 2, 4, 5)), rng.normal(size=(1, 2, 4, 3))
    fresh = cache.update_and_fetch(0, key[:, :, :3], value[:, :, :3], np.arange(3))
    stored = cache.update_and_fetch(0, key[:, :, 3:], value[:, :, 3:], np.array([3]))
    for rows, upto in ((fresh, 3), (stored, 4)):
        assert rows[0].dtype == rows[1].dtype == dtype
        assert np.array_equal(rows[0], key[:, :, :upto].astype(dtype))
        assert np.array_equal(rows[1], value[:, :, :upto].astype(dtype))


# --- rewind -----------------------------------------------------------------------------------------------


def test_a_rewind_is_for_all_layers_or_none() -> None:
    """Windows 4, none, 4, none in rings of 7, 14 stored: back by 2 works, back by 6 cannot."""
    cache = cache_of(windows=(4, -1, 4, -1), window_slack=4, capacity=20)
    feed(cache, 14)
    with pytest.raises(TrimError, match=re.escape("layers [0, 2] no longer hold the window before 8")):
        cache.rewind(8)
    assert cache.length == 14
    assert [peek(cache, layer) for layer in (0, 2)] == [[11, 12, 13, -1]] * 2
    assert peek(cache, 1) == [*range(14), -1]
    assert cache.rewind(12) == 2
    assert [peek(cache, layer) for layer in (0, 2)] == [[9, 10, 11, -1]] * 2
    assert peek(cache, 3) == [*range(12), -1]


def test_a_ring_rewound_twice() -> None:
    """The second rewind counts from the highest position ever written, not from where the first one ended."""
    cache = cache_of(num_layers=2, windows=(4,), window_slack=4, capacity=20)
    feed(cache, 12)
    assert [m for m in range(13) if cache.can_rewind(m)] == [0, 8, 9, 10, 11, 12]
    cache.rewind(10)
    assert cache.high_water == 12
    assert [m for m in range(11) if cache.can_rewind(m)] == [0, 8, 9, 10]
    feed(cache, 1, marker=0.5)
    assert [m for m in range(12) if cache.can_rewind(m)] == [0, 8, 9, 10, 11]
    assert peek(cache, 0) == [8, 9, 10.5, -1]
    cache.rewind(8)
    assert peek(cache, 0) == [5, 6, 7, -1]


def test_rewind_rule_against_what_the_ring_really_holds() -> None:
    for slack, first, second, back in [
        (s, a, b, c) for s in range(5) for a in range(1, 9) for b in range(1, 6) for c in range(1, 5)
    ]:
        cache = cache_of(num_layers=2, windows=(4,), window_slack=slack, capacity=30)
        feed(cache, first)
        feed(cache, second, marker=0.25)
        written = [*map(float, range(first)), *(first + i + 0.25 for i in range(second))]
        if cache.can_rewind(cache.length - back):
            cache.rewind(cache.length - back)
            feed(cache, 1, marker=0.5)
            written = [*written[: cache.length - 1], cache.length - 0.5]
        for target in range(cache.length + 1):
            slots = 3 + slack
            newest = {p % slots: p for p in range(cache.high_water)}
            held = all(newest[p % slots] == p for p in range(max(0, target - 3), target))
            assert cache.can_rewind(target) == held, (slack, first, second, back, target)
        assert peek(cache, 0)[:-1] == written[-3:]


def test_an_emptied_cache_starts_over() -> None:
    cache = cache_of(num_layers=2, windows=(4,))
    feed(cache, 12)
    assert cache.rewind(0) == 12
    feed(cache, 3, marker=0.5)
    assert cache.high_water == 3
    assert peek(cache, 0) == [0.5, 1.5, 2.5, -1]
    assert cache.rewind(2) == 1


def test_a_window_larger_than_the_capacity_never_evicts() -> None:
    cache = cache_of(num_layers=2, windows=(40,))
    feed(cache, 13)
    assert all(cache.can_rewind(m) for m in range(14))
    cache.rewind(3)
    assert peek(cache, 0) == [0, 1, 2, -1]


def test_a_window_of_one_sees_no_past() -> None:
    cache = cache_of(num_layers=2, windows=(1,))
    feed(cache, 4)
    assert peek(cache, 0) == [-1]


def test_rewinds_beyond_what_exists_are_refused() -> None:
    cache = cache_of()
    feed(cache, 5)
    for target in (6, -1):
        assert not cache.can_rewind(target)
        with pytest.raises(TrimError, match=rf"rewind to {target}, but stored are 5; give 0\.\.5"):
            cache.rewind(target)
    assert cache.rewind(5) == 0


# --- reset ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizing", CacheSizing)
def test_reset_leaves_nothing(sizing: CacheSizing) -> None:
    cache, fresh = cache_of(sizing=sizing), cache_of(sizing=sizing)
    feed(cache, 12, marker=0.5)
    position = np.array([12])
    cache.update_and_fetch(0, np.ones((1, 2, 1, 5)), np.ones((1, 2, 1, 3)), position)
    cache.reset()
    assert (cache.length, cache.high_water, cache.nbytes) == (0, 0, fresh.nbytes)
    assert cache.can_extend(13)
    feed(cache, 2)
    assert peek(cache, 0) == [0, 1, -1]
    assert cache.rewind(1) == 1
    feed(cache, 12)
    assert cache.length == 13


def test_reset_zeroes_static_rows() -> None:
    cache = cache_of(num_layers=2, windows=(-1,))
    feed(cache, 12, marker=0.5)
    cache.reset()
    key, value = cache._stores[0].read(np.arange(13))
    assert not key.any()
    assert not value.any()


# --- steps broken off, and steps that continue nothing ----------------------------------------------------


def test_a_step_broken_off_leaves_the_cache_as_it_was() -> None:
    cache = cache_of()
    feed(cache, 9)
    position = 9 + np.arange(3)
    for layer in (0, 1, 3):
        cache.update_and_fetch(layer, np.ones((1, 2, 3, 5)), np.ones((1, 2, 3, 3)), position)
    assert (cache.length, cache.high_water) == (9, 9)
    assert not cache.can_rewind(0)
    with pytest.raises(InputError, match="a step is under way; finish or abandon it before a rewind"):
        cache.rewind(9)
    cache.abandon_step()
    assert peek(cache, 0) == [6, 7, 8, -1]
    assert peek(cache, 1) == [*range(9), -1]
    feed(cache, 2)
    assert peek(cache, 3) == [6, 7, 8, 9, 10, -1]
    with pytest.raises(InputError, match="no step is under way"):
        cache.abandon_step()


def test_what_does_not_fit_the_step_is_refused_and_changes_nothing() -> None:
    cache = cache_of()
    feed(cache, 4)
    key, value, at = np.zeros((1, 2, 2, 5)), np.zeros((1, 2, 2, 3)), np.array([4, 5])
    with pytest.raises(InputError, match=re.escape("positions [5, 6] do not continue 4 stored tokens")):
        cache.update_and_fetch(0, key, value, at + 1)
    with pytest.raises(InputError, match=re.escape("positions [3, 4] do not continue 4 stored tokens")):
        cache.update_and_fetch(0, key, value, at - 1)
    with pytest.raises(InputError, match=r"layer is 4; the cache has layers 0\.\.3"):
        cache.update_and_fetch(4, key, value, at)
    with pytest.raises(InputError, match=re.escape("value has shape (1, 2, 2, 5), it must be (1, 2, 2, 3)")):
        cache.update_and_fetch(0, key, key, at)
    with pytest.raises(InputError, match=re.escape("key has shape (1, 2, 2, 3), it must be (1, 2, 2, 5)")):
        cache.update_and_fetch(0, value, value, at)
    with pytest.raises(InputError, match=re.escape("position is float64 (2,); give integers")):
        cache.update_and_fetch(0, key, value, at.astype(np.float64))
    cache.update_and_fetch(0, key, value, at)
    with pytest.raises(InputError, match=r"layer 0 was served already at positions \[4, 5\]; 3 other layers"):
        cache.update_and_fetch(0, key, value, at)
    with pytest.raises(InputError, match=r"layer 1: positions \[4\] differ from those of the step, \[4, 5\]"):
        cache.update_and_fetch(1, key[:, :, :1], value[:, :, :1], at[:1])
    at += 1  # the step goes by the positions it began with, whatever becomes of the caller's array
    with pytest.raises(InputError, match=r"positions \[5, 6\] differ from those of the step, \[4, 5\]"):
        cache.update_and_fetch(1, key, value, at)
    for layer in (1, 2, 3):
        cache.update_and_fetch(layer, key, value, at - 1)
    assert cache.length == 6
