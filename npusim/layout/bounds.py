"""The least capacity with which a windowed layout never loses a key that a query may still need."""

from enum import Enum
from typing import assert_never

from npusim.errors import ConfigError


class CommitPolicy(Enum):
    """When the rows of a block go into the cache."""

    EAGER = "EAGER"
    """All real rows at once; what is rejected later is trimmed."""
    DEFERRED = "DEFERRED"
    """Held until the next call says how many were accepted; only those are written."""


def check_window(local_window_size: int, layout: str) -> None:
    """Refuse a window size that is neither -1 nor positive; `layout` names the layout in the message."""
    if local_window_size == 0 or local_window_size < -1:
        raise ConfigError(
            f"{layout} layout: local_window_size is {local_window_size}; "
            "give -1 for no window, or 1 or more (the window counts the query itself)"
        )


def require_window(local_window_size: int, layout: str) -> None:
    """Refuse a layer without a window: only a window lets a layout forget old keys."""
    check_window(local_window_size, layout)
    if local_window_size == -1:
        raise ConfigError(
            f"{layout} layout: local_window_size is -1 (no window), but rows are evicted here; "
            "give a window of 1 or more, or use the linear layout"
        )


def rolling_min_capacity(local_window_size: int) -> int:
    """W: the contract of the rolling cache keeps at least a whole window, so that gap = C - W + 1 >= 1."""
    require_window(local_window_size, "rolling")
    return local_window_size


def ring_min_capacity(
    local_window_size: int,
    commit: CommitPolicy,
    *,
    block_size: int = 1,
    min_kept: int = 0,
) -> int:
    """Rows a ring needs so that a trim inside the last block is always sound.

    Deferred: the W - 1 keys before the query. Eager: S rows may be written over older ones and all but
    `min_kept` of them taken back, so W - 1 + S - min_kept: W + S - 1, or W + S - 2 where at least one row of
    every block is kept. Never below 1: a buffer of no rows is no static shape (W = 1 reads no past at all).
    """
    require_window(local_window_size, "ring")
    if block_size < 1:
        raise ConfigError(f"ring layout: block_size is {block_size}; a block has at least 1 row")
    if not 0 <= min_kept <= block_size:
        raise ConfigError(
            f"ring layout: min_kept is {min_kept}; of a block of {block_size} rows 0..{block_size} are kept"
        )
    match commit:
        case CommitPolicy.DEFERRED:
            return max(1, local_window_size - 1)
        case CommitPolicy.EAGER:
            return max(1, local_window_size - 1 + block_size - min_kept)
        case _:
            assert_never(commit)
