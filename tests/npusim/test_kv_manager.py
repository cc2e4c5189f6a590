"""The KV manager on rows that carry their position: which row is in which slot after every kind of step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kv_rows import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LINEAR,
    RING,
    ROLLING,
    block,
    manager,
    pyramid,
    slots,
    step,
)

from npusim.errors import TrimError
from npusim.kv_manager import BlockRows, CacheGroup, KVManager, allocate
from npusim.layout import CommitPolicy


def test_linear_rows_lie_at_their_positions() -> None:
    kv = manager(LINEAR)
    step(kv, 0, 5)
    step(kv, 5, 2)
    step(kv, 7, 1)
    assert slots(kv) == [*range(8), *[None] * 12]
    assert (kv.num_stored_tokens, kv.num_committed_tokens, kv.high_water, kv.rows_moved) == (8, 8, 8, 0)


def test_ring_rows_lie_at_their_positions_modulo_the_capacity() -> None:
    kv = manager(RING)
    step(kv, 0, 5)
    assert slots(kv) == [0, 1, 2, 3, 4, None]
    step(kv, 5, 4)
    assert slots(kv) == [6, 7, 8, 3, 4, 5]
    step(kv, 9, 1)
    assert slots(kv) == [6, 7, 8, 9, 4, 5]
    assert kv.rows_moved == 0


def test_rolling_rows_lie_in_order() -> None:
    kv, held = manager(ROLLING), []
    for position in range(14):
        step(kv, position, 1)
        held.append([at for at in slots(kv) if at is not None])
    sizes = [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5]
    resident = [list(range(total - size, total)) for total, size in zip(range(1, 15), sizes, strict=True)]
    # behind the resident rows an eviction leaves the old ones
    assert [rows[: len(expected)] for rows, expected in zip(held, resident, strict=True)] == resident
    assert kv.rows_moved == 3 * 3  # three evictions, each moving the window less the new row


def test_layers_of_one_group_are_written_together() -> None:
    past = allocate((4, HEADS, 20, HEAD_SIZE), np.dtype(np.float16))
    group = CacheGroup(layers=(2, 5), layout=LINEAR, past=past)
    kv = KVManager({20: (group,)}, commit=CommitPolicy.EAGER)
    rows = np.arange(4 * HEADS * BLOCK * HEAD_SIZE).reshape(4, HEADS, BLOCK, HEAD_SIZE).astype(np.float16)
    kv.commit(0, BlockRows(arrays=(rows,), first=2, length=3))
    for place, buffer in enumerate((group.key(2), group.value(2), group.key(5), group.value(5))):
        assert np.shares_memory(buffer, past)
        assert buffer.shape == (1, HEADS, 20, HEAD_SIZE)
        assert np.array_equal(buffer[0, :, :3], rows[place, :, 2:])
    assert kv.nbytes == past.nbytes == 4 * HEADS * 20 * HEAD_SIZE * 2


def test_eager_commit_writes_at_once_and_trims_later() -> None:
    kv = manager(LINEAR)
    step(kv, 0, 5)
    step(kv, 5, 3, mark=1)
    step(kv, 6, 2, mark=2)  # positions 6 and 7 were rejected
    marks = kv.groups[0].past[0, 0, :8, 0] // 1000
    assert marks.tolist() == [0, 0, 0, 0, 0, 1, 2, 2]
    assert (kv.num_stored_tokens, kv.high_water) == (8, 8)


def test_deferred_commit_writes_what_the_next_step_accepts() -> None:
    kv = manager(LINEAR, commit=CommitPolicy.DEFERRED)
    step(kv, 0, 4)
    assert (kv.num_stored_tokens, kv.num_committed_tokens, kv.high_water) == (4, 0, 0)
    assert slots(kv) == [None] * 20
    step(kv, 3, 3, mark=1)
    assert (kv.num_stored_tokens, kv.num_committed_tokens, kv.high_water) == (6, 3, 3)
    assert slots(kv) == [0, 1, 2, *[None] * 17]
    step(kv, 6, 1, mark=2)
    marks = kv.groups[0].past[0, 0, :7, 0] // 1000
    assert marks.tolist() == [0, 0, 0, 1, 1, 1, 0]


def test_rows_held_back_survive_a_step_that_fails() -> None:
    """`settle` copies what stays undecided: a graph that runs overwrites the arrays, and may fail then."""
    kv = manager(LINEAR, commit=CommitPolicy.DEFERRED)
    rows = block(kv, 0, 5)
    kv.commit(0, rows)
    kv.settle(2)  # a step at position 2 begins ...
    rows.arrays[0][...] = -1  # ... its graph writes its outputs, and fails
    assert (kv.num_stored_tokens, kv.num_committed_tokens) == (5, 2)
    step(kv, 5, 1)
    assert slots(kv) == [0, 1, 2, 3, 4, *[None] * 15]
    kv.settle(1)  # a step before all that is written: nothing more is, and nothing is lost
    assert (kv.num_stored_tokens, kv.num_committed_tokens) == (6, 5)


def test_trim_reaches_first_into_what_is_held_back() -> None:
    kv = manager(RING, commit=CommitPolicy.DEFERRED)
    step(kv, 0, 5)
    step(kv, 5, 4)
    assert kv.trim(7) == 2
    assert (kv.num_stored_tokens, kv.num_committed_tokens) == (7, 5)
    assert kv.trim(7) == 0
    assert kv.trim(4) == 3
    assert (kv.num_stored_tokens, kv.num_committed_tokens) == (4, 4)
    step(kv, 4, 1, mark=1)
    kv.settle(5)
    assert slots(kv) == [0, 1, 2, 3, 4, None]


def test_a_trim_is_for_all_layers_or_none() -> None:
    kv = manager(LINEAR, RING, ROLLING)
    for start in range(0, 10, 5):
        step(kv, start, 5)
    # the ring of 6 held 10: positions 4.. are there; the rolling one holds 6, 7, 8, 9 and evicted at 7 and 10
    before = [group.past.copy() for group in kv.groups]
    for num_tokens, layers in ((9, r"\[2\]"), (5, r"\[1, 2\]")):
        assert not kv.can_trim(num_tokens)
        with pytest.raises(TrimError, match=f"trim from 10 to {num_tokens} tokens: layers {layers} have"):
            kv.trim(num_tokens)
    assert kv.num_stored_tokens == 10
    assert all(np.array_equal(group.past, old) for group, old in zip(kv.groups, before, strict=True))
    assert kv.can_trim(0)
    assert kv.trim(0) == 10


@pytest.mark.parametrize("commit", CommitPolicy)
def test_a_trim_that_fails_advises_what_is_not_so_already(commit: CommitPolicy) -> None:
    kv = manager(ROLLING, commit=commit)
    for start in range(0, 15, 5):
        step(kv, start, 5)
    with pytest.raises(
        TrimError, match=r"or use .*more NPUSIM_KV_SLACK, or NPUSIM_KV_LAYOUT=LINEAR"
    ) as caught:
        kv.trim(5)
    assert ("NPUSIM_COMMIT=DEFERRED" in str(caught.value)) == (commit is CommitPolicy.EAGER)


def test_the_high_water_mark_outlives_a_trim_but_not_a_new_sequence() -> None:
    kv = manager(RING)
    step(kv, 0, 5)
    step(kv, 5, 4)
    assert [m for m in range(10) if kv.can_trim(m)] == [0, 5, 6, 7, 8, 9]
    assert kv.trim(6) == 3
    assert kv.high_water == 9
    assert [m for m in range(7) if kv.can_trim(m)] == [0, 5, 6]
    step(kv, 0, 3)
    assert kv.high_water == 3
    assert [m for m in range(4) if kv.can_trim(m)] == [0, 1, 2, 3]


@pytest.mark.parametrize("commit", CommitPolicy, ids=lambda commit: commit.value)
def test_reset_zeroes_every_row_ever_written(commit: CommitPolicy) -> None:
    kv = manager(LINEAR, RING, ROLLING, commit=commit)
    for start in range(0, 15, 5):
        step(kv, start, 5)
    step(kv, 0, 2)  # a shorter sequence: the rows of the longer one are still there
    kv.reset()
    assert not any(group.past.any() for group in kv.groups)
    assert (kv.num_stored_tokens, kv.num_committed_tokens, kv.high_water) == (0, 0, 0)
    assert not kv.can_trim(1)
    step(kv, 0, 2)
    kv.settle(2)
    assert slots(kv) == [0, 1, *[None] * 18]


def test_rows_keep_their_positions_between_capacities() -> None:
    kv = pyramid()
    kv.arrange(6)
    step(kv, 0, 5)
    assert slots(kv, count=5) == [0, 1, 2, 3, 4]
    kv.arrange(20)
    step(kv, 5, 5)
    assert slots(kv, count=10) == list(range(10))
    kv.arrange(11)
    step(kv, 10, 1)
    assert slots(kv) == list(range(11))
    kv.trim(4)
    kv.arrange(6)
    step(kv, 4, 2, mark=3)
    assert slots(kv) == [0, 1, 2, 3, 4, 5]
    assert (kv.groups[0].past[0, 0, :, 0] // 1000).tolist() == [0, 0, 0, 0, 3, 3]
    kv.arrange(20)
    assert slots(kv, count=6) == [0, 1, 2, 3, 4, 5]


def test_a_ring_is_the_same_at_every_capacity() -> None:
    kv = pyramid(replace(manager(RING).groups[0], layers=(1,)))
    for capacity, start, length in ((6, 0, 4), (11, 4, 5), (20, 9, 1)):
        kv.arrange(capacity)
        step(kv, start, length)
    assert slots(kv, count=10) == list(range(10))
    assert slots(kv, 1) == [6, 7, 8, 9, 4, 5]
    assert kv.nbytes == (20 + 6) * 2 * HEADS * HEAD_SIZE * 4


@pytest.mark.parametrize("commit", CommitPolicy, ids=lambda commit: commit.value)
def test_the_smallest_capacity_has_room_for_the_step_and_for_every_row(commit: CommitPolicy) -> None:
    kv = pyramid(commit=commit)
    assert [kv.smallest_capacity(n) for n in (1, 6, 7, 11, 12, 20)] == [6, 6, 11, 11, 20, 20]
    kv.arrange(11)
    for start in (0, 5):
        step(kv, start, 5)
    # a step at position 2 drops rows 2.. only when it succeeds: those written (all, or 5) must fit until then
    assert kv.smallest_capacity(3) == {CommitPolicy.EAGER: 11, CommitPolicy.DEFERRED: 6}[commit]
    kv.trim(3)
    assert kv.smallest_capacity(6) == 6


def test_reset_zeroes_what_was_written_at_every_capacity() -> None:
    kv = pyramid()
    memory = kv.groups[0].past
    for capacity, length in ((20, 5), (11, 3), (6, 4), (20, 2)):
        kv.arrange(capacity)
        step(kv, 0, length)
    assert memory.any()
    kv.reset()
    assert not memory.any()
