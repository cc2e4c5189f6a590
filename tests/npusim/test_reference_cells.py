"""The reference cache of cells: several sequences in one pool that fork, shrink and share steps."""

import numpy as np
import pytest
from cache_log import HEAD_SIZE, NUM_HEADS, SCALE, Log, cache_config, layer_rows
from cell_steps import cells_of, log_of, masks, serve, store
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.reference.caches import CacheSizing, attend_spec
from npusim.reference.cells import CellReferenceCache
from npusim.reference.contiguous import ContiguousReferenceCache

# --- sequences against the log ----------------------------------------------------------------------------


@st.composite
def verbs(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """(verb, sequence, another sequence, amount)."""
    verb = draw(st.sampled_from(["step", "step", "both", "fork", "shrink", "remove"]))
    return verb, draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 4))


@pytest.mark.parametrize("sizing", CacheSizing)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(given_verbs=st.lists(verbs(), min_size=3, max_size=12))
def test_any_history_of_sequences_equals_the_log(
    sizing: CacheSizing, given_verbs: list[tuple[str, int, int, int]]
) -> None:
    cache = cells_of(sizing=sizing, windows=(3, -1, 3, 5))
    log = log_of(cache)
    for verb, one, other, amount in given_verbs:
        apply(cache, log, verb, one, other, amount)
        for sequence in range(3):
            assert cache.seq_len(sequence) == log.length(sequence)
        assert cache.free_cells == 13 - len({id(entry.key) for entry in log.entries})


def apply(cache: CellReferenceCache, log: Log, verb: str, one: int, other: int, amount: int) -> None:
    """The verb on cache and log where it is possible."""
    length = cache.seq_len(one)
    if verb == "step" and cache.can_extend(amount):
        store(cache, log, **{f"s{one}": amount})
    elif verb == "both" and one != other and cache.can_extend(amount + 2):
        store(cache, log, **{f"s{one}": amount, f"s{other}": 2})
    elif verb == "fork" and length and cache.seq_len(other) == 0:
        upto = max(1, length - amount)
        assert cache.seq_cp(one, other, upto) == upto
        log.fork(one, other, upto)
    elif verb == "shrink":
        target = max(0, length - amount)
        assert cache.seq_rm(one, target) == length - target
        log.drop(one, target)
    elif verb == "remove":
        assert cache.seq_rm(one) == length
        log.drop(one, 0)


def test_sequences_that_share_a_step_do_not_see_each_other() -> None:
    cache = cells_of(windows=(2, -1, 2, 6))
    histories = store(cache, log_of(cache), s4=3, s9=2)
    full = [[0], [0, 1], [0, 1, 2], [3], [3, 4]]
    assert masks(histories) == [
        [[0], [0, 1], [1, 2], [3], [3, 4]],
        full,
        [[0], [0, 1], [1, 2], [3], [3, 4]],
        full,
    ]


def test_a_shared_step_equals_steps_of_their_own() -> None:
    together, apart = cells_of(), cells_of()
    log = log_of(together)
    first, second = log.new_entries(0, 0, 5), log.new_entries(1, 0, 4)
    both = serve(together, [*first, *second])
    alone = [serve(apart, first), serve(apart, second)]
    query = log.rng.normal(size=(1, NUM_HEADS, 9, HEAD_SIZE))
    for layer in range(4):
        output = attend_spec(query, *both[layer], scale=SCALE)
        parts = [
            attend_spec(query[:, :, :5], *alone[0][layer], scale=SCALE),
            attend_spec(query[:, :, 5:], *alone[1][layer], scale=SCALE),
        ]
        np.testing.assert_array_equal(output, np.concatenate(parts, axis=2))


def test_cells_and_contiguous_agree() -> None:
    cells, contiguous = cells_of(), ContiguousReferenceCache(cache_config())
    log = log_of(cells)
    for first, count in ((0, 5), (5, 1), (6, 4), (10, 3)):
        entries = log.new_entries(0, first, count)
        histories = serve(cells, entries)
        query = log.rng.normal(size=(1, NUM_HEADS, count, HEAD_SIZE))
        for layer, history in enumerate(histories):
            other = contiguous.update_and_fetch(layer, *layer_rows(entries, layer), first + np.arange(count))
            np.testing.assert_allclose(
                attend_spec(query, *history, scale=SCALE, out_dtype=np.float64),
                attend_spec(query, *other, scale=SCALE, out_dtype=np.float64),
                rtol=1e-12,
            )


# --- forks, removal, reuse --------------------------------------------------------------------------------


def test_a_fork_takes_no_cells_and_outlives_its_parent() -> None:
    cache = cells_of()
    log = log_of(cache)
    store(cache, log, s0=6)
    assert cache.seq_cp(0, 5, 4) == 4
    log.fork(0, 5, 4)
    assert (cache.free_cells, cache.seq_len(5)) == (7, 4)
    assert cache.seq_rm(0) == 6
    log.drop(0, 0)
    assert (cache.free_cells, cache.seq_len(0), cache.seq_len(5)) == (9, 0, 4)
    histories = store(cache, log, s5=2)
    assert masks(histories)[1] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert cache.seq_cp(5, 6) == 6
    log.fork(5, 6, 6)
    store(cache, log, s5=1, s6=2)


def test_the_lowest_free_cells_are_taken_and_the_read_window_shrinks() -> None:
    cache = cells_of()
    log = log_of(cache)
    store(cache, log, s0=3, s1=2, s2=4)
    assert cache.seq_rm(2) == 4
    log.drop(2, 0)
    assert cache.seq_rm(0, 1) == 2
    log.drop(0, 1)
    histories = store(cache, log, s1=3)
    # cells 1 and 2 are free again, 3 and 4 hold sequence 1, then comes 5; cells 6.. are not even read
    assert masks(histories)[1] == [[1, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert histories[1][0].shape[2] == 6


def test_a_hole_in_a_sequence_is_not_seen() -> None:
    cache = cells_of(windows=(4,))
    log = log_of(cache)
    store(cache, log, s0=7)
    assert cache.seq_rm(0, 4, 6) == 2
    log.entries = [entry for entry in log.entries if entry.position not in (4, 5)]
    assert cache.seq_len(0) == 7
    assert masks(store(cache, log, s0=1)) == [[[4, 6]]] * 4
    assert cache.seq_rm(0, 3, 7) == 2


def test_windows_mask_but_evict_nothing() -> None:
    cache = cells_of(windows=(2,))
    log = log_of(cache)
    store(cache, log, s0=12)
    assert cache.free_cells == 1
    cache.seq_rm(0, 3)
    log.drop(0, 3)
    store(cache, log, s0=4)


# --- masks ------------------------------------------------------------------------------------------------


def test_one_mask_per_window_and_step() -> None:
    cache = cells_of(windows=(4, -1, 4, 6))
    log = log_of(cache)
    first, second = store(cache, log, s0=8), store(cache, log, s0=1)
    specs = [spec for _, _, spec in first]
    assert specs[0] is specs[2]
    assert len({id(spec) for spec in specs}) == 3
    assert first[0][2] is not second[0][2]
    with pytest.raises(ValueError, match="read-only"):
        specs[0].mask[0, 0] = False  # type: ignore[index]
    assert [len(rows[-1]) for rows in masks(first)] == [4, 8, 4, 6]
