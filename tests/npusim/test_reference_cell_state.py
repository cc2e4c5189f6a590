"""State of the pool of cells: capacity, memory, storage type, reset, steps and what is refused."""

import re

import numpy as np
import pytest
from cache_log import Log, flat_step, layer_rows
from cell_steps import cells_of, log_of, serve, store

from npusim.errors import CapacityError, ConfigError, InputError, TrimError
from npusim.reference.caches import CacheSizing
from npusim.reference.cell_tags import flatten_step

# --- memory and capacity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizing", CacheSizing)
def test_an_exact_fit_is_a_fit(sizing: CacheSizing) -> None:
    cache = cells_of(sizing=sizing)
    log = log_of(cache)
    store(cache, log, s0=9)
    assert [n for n in range(1, 7) if cache.can_extend(n)] == [1, 2, 3, 4]
    with pytest.raises(CapacityError, match="step of 5 tokens, but 4 of 13 cells are free"):
        store(cache, Log(cache.config, log.rng), s0=2, s1=3)
    assert (cache.seq_len(0), cache.seq_len(1), cache.free_cells) == (9, 0, 4)
    store(cache, log, s0=2, s1=2)
    assert cache.free_cells == 0


def test_pools_double_up_to_the_capacity_and_keep_their_cells() -> None:
    cache = cells_of(sizing=CacheSizing.DYNAMIC, num_layers=1, windows=(-1,))
    log = log_of(cache)
    row = 2 * (5 + 3) * 8
    rows = []
    for count in (3, 2, 1, 2, 5):
        store(cache, log, s0=count)
        rows.append(cache.nbytes // row)
    assert rows == [3, 6, 6, 12, 13]
    assert cache.nbytes == cells_of(num_layers=1, windows=(-1,)).nbytes


def test_rows_are_kept_in_the_storage_type() -> None:
    cache = cells_of(dtype=np.float16)
    entries = log_of(cache).new_entries(0, 0, 3)
    key_pool, value_pool, _ = serve(cache, entries)[2]
    key, value = layer_rows(entries, 2)
    assert key_pool.dtype == value_pool.dtype == np.float16
    assert np.array_equal(key_pool, key.astype(np.float16))
    assert np.array_equal(value_pool, value.astype(np.float16))


@pytest.mark.parametrize("sizing", CacheSizing)
def test_reset_leaves_nothing(sizing: CacheSizing) -> None:
    cache, fresh = cells_of(sizing=sizing), cells_of(sizing=sizing)
    log = log_of(cache)
    store(cache, log, s0=6, s1=5)
    cache.begin_step(flat_step(log.new_entries(0, 6, 1)))
    cache.reset()
    assert (cache.free_cells, cache.seq_len(0), cache.seq_len(1)) == (13, 0, 0)
    assert cache.nbytes == fresh.nbytes
    assert not any(rows.any() for rows in cache._stores[1].read(np.arange(cache._stores[1].num_rows)))
    log.entries.clear()
    store(cache, log, s1=13)


# --- steps ------------------------------------------------------------------------------------------------


def test_a_step_counts_once_its_last_layer_was_served() -> None:
    cache = cells_of()
    log = log_of(cache)
    store(cache, log, s0=4)
    entries = log.new_entries(0, 4, 3)
    step = flat_step(entries)
    cache.begin_step(step)
    for layer in (3, 0, 1):
        cache.update_and_fetch(layer, *layer_rows(entries, layer), step.positions)
    assert (cache.seq_len(0), cache.free_cells) == (4, 9)
    cache.abandon_step()
    assert (cache.seq_len(0), cache.free_cells) == (4, 9)
    store(cache, log, s0=2)
    with pytest.raises(InputError, match="no step is under way"):
        cache.abandon_step()


def test_layers_are_served_once_per_step_with_the_declared_positions() -> None:
    cache = cells_of()
    entries = log_of(cache).new_entries(0, 0, 2)
    key, value = layer_rows(entries, 0)
    at = np.arange(2)
    with pytest.raises(InputError, match="layer 0: no step is under way; call begin_step first"):
        cache.update_and_fetch(0, key, value, at)
    step = flat_step(entries)
    cache.begin_step(step)
    step.positions[:] += 1  # the caller's array may change; what was declared does not
    with pytest.raises(
        InputError, match=r"layer 1: positions \[1, 2\] differ from those of the step, \[0, 1\]"
    ):
        cache.update_and_fetch(1, key, value, at + 1)
    with pytest.raises(InputError, match=re.escape("key has shape (1, 2, 1, 5), it must be (1, 2, 2, 5)")):
        cache.update_and_fetch(1, key[:, :, 1:], value, at)
    cache.update_and_fetch(1, key, value, at)
    with pytest.raises(InputError, match="layer 1 was served already in this step"):
        cache.update_and_fetch(1, key, value, at)


def test_nothing_else_happens_within_a_step() -> None:
    cache = cells_of()
    log = log_of(cache)
    store(cache, log, s0=2)
    step = flat_step(log.new_entries(0, 2, 1))
    cache.begin_step(step)
    with pytest.raises(
        InputError, match="a step is under way; finish or abandon it before you begin another"
    ):
        cache.begin_step(step)
    with pytest.raises(InputError, match="before you fork"):
        cache.seq_cp(0, 1)
    with pytest.raises(InputError, match="before you remove"):
        cache.seq_rm(0)
    cache.abandon_step()
    assert cache.seq_cp(0, 1) == 2


@pytest.mark.parametrize(("sequence", "first"), [(0, 4), (0, 2), (1, 3), (-1, 0)])
def test_steps_that_continue_no_sequence_are_refused(sequence: int, first: int) -> None:
    cache = cells_of()
    log = log_of(cache)
    store(cache, log, s0=3)
    with pytest.raises(InputError, match=f"sequence {sequence}: positions .* must be"):
        cache.begin_step(flat_step(log.new_entries(sequence, first, 1)))
    assert cache.free_cells == 10
    store(cache, log, s0=1)


def test_impossible_forks_and_removals_are_refused() -> None:
    cache = cells_of()
    store(cache, log_of(cache), s0=3, s1=1)
    for source, target, upto, message in [
        (0, 1, 2, "sequence 1 is no number of 0 or more, or has tokens"),
        (0, -1, 2, "sequence -1 is no number of 0 or more, or has tokens"),
        (0, 2, 4, "fork of sequence 0 up to 4; it has length 3"),
        (0, 2, 0, "fork of sequence 0 up to 0"),
        (7, 2, None, "fork of sequence 7 up to 0; it has length 0"),
    ]:
        with pytest.raises(InputError, match=message):
            cache.seq_cp(source, target, upto)
    for start, end in [(2, 1), (-1, 2), (0, 4)]:
        with pytest.raises(TrimError, match=rf"removal of {start}\.\.{end} from sequence 0 of length 3"):
            cache.seq_rm(0, start, end)
    assert cache.free_cells == 9


def test_configs_that_cells_cannot_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size is 2; cells lie on one flat token axis"):
        cells_of(batch_size=2)
    with pytest.raises(ConfigError, match="window_slack is 3; cells evict nothing"):
        cells_of(window_slack=3)


def test_flatten_step_lays_sequences_side_by_side() -> None:
    step = flatten_step({4: ([70, 71, 72], 5), 2: ([90], 0), 9: ([30, 31], 8)})
    assert step.tokens.tolist() == [70, 71, 72, 90, 30, 31]
    assert step.positions.tolist() == [5, 6, 7, 0, 8, 9]
    assert step.sequences.tolist() == [4, 4, 4, 2, 9, 9]
    assert step.last_rows == {4: 2, 2: 3, 9: 5}
    for feeds in ({}, {4: ([], 5)}):
        with pytest.raises(InputError, match="a step needs at least one sequence"):
            flatten_step(feeds)
