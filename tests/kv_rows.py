"""A KV manager fed with rows that carry their position."""

from __future__ import annotations

import numpy as np

from npusim.kv_manager import BlockRows, CacheGroup, KVManager, allocate
from npusim.layout import CommitPolicy, Layout, LinearLayout, RingLayout, RollingLayout

HEADS, HEAD_SIZE, BLOCK = 2, 3, 5
EMPTY = 0.0

LINEAR = LinearLayout(capacity=20)
RING = RingLayout(capacity=6, local_window_size=3)
ROLLING = RollingLayout(capacity=6, local_window_size=4)


def manager(*layouts: Layout, commit: CommitPolicy = CommitPolicy.EAGER) -> KVManager:
    """Layer i has layouts[i], each in a group of its own."""
    groups = tuple(
        CacheGroup(
            layers=(layer,),
            layout=layout,
            past=allocate((2, HEADS, layout.capacity, HEAD_SIZE), np.dtype(np.float32)),
        )
        for layer, layout in enumerate(layouts)
    )
    return KVManager({20: groups}, commit=commit)


def pyramid(*shared: CacheGroup, commit: CommitPolicy = CommitPolicy.EAGER) -> KVManager:
    """A linear layer, seen by graphs of 6, 11 and 20 slots over one memory, and groups that they share."""
    past = allocate((2, HEADS, 20, HEAD_SIZE), np.dtype(np.float32))
    variants = {}
    for capacity in (6, 11, 20):
        shape = (2, HEADS, capacity, HEAD_SIZE)
        view = past.reshape(-1)[: np.prod(shape)].reshape(shape)
        layout = LinearLayout(capacity=capacity)
        variants[capacity] = (CacheGroup(layers=(0,), layout=layout, past=view), *shared)
    return KVManager(variants, commit=commit)


def marked(plane: int, position: int, mark: int) -> float:
    """A row's number: its plane (0 key, 1 value), its position, and which of its kind it is."""
    return 1000 * mark + 10 * (position + 1) + plane


def block(kv: KVManager, start: int, length: int, mark: int = 0) -> BlockRows:
    """Right-aligned rows of positions start..; the padding before them must never show."""
    array = np.full((2, HEADS, BLOCK, HEAD_SIZE), -1.0, np.float32)
    for plane in range(2):
        for row in range(length):
            array[plane, :, BLOCK - length + row] = marked(plane, start + row, mark)
    return BlockRows(arrays=tuple(array.copy() for _ in kv.groups), first=BLOCK - length, length=length)


def step(kv: KVManager, start: int, length: int, mark: int = 0) -> None:
    """What a request does around the run of a graph."""
    kv.settle(start)
    kv.commit(start, block(kv, start, length, mark))


def slots(kv: KVManager, group: int = 0, count: int | None = None) -> list[int | None]:
    """The position in each of the first `count` slots, None for one never filled.

    Every plane, head and channel must agree.
    """
    past = kv.groups[group].past
    found: list[int | None] = []
    for slot in range(past.shape[2] if count is None else count):
        key, value = past[0, 0, slot, 0], past[1, 0, slot, 0]
        assert (past[0, :, slot] == key).all()
        assert (past[1, :, slot] == value).all()
        assert value == (key + 1 if key != EMPTY else EMPTY)
        found.append(None if key == EMPTY else int(key) % 1000 // 10 - 1)
    return found
