"""Where keys lie: integer arithmetic over capacity, window, stored and new tokens; no arrays, no graphs.

`layouts` is the host's side (which slot a row is written to), `frames` the graph's (which position a slot
holds), `bounds` the least capacity with which each layout is sound, `rewind` what a layout can take back.
"""

from npusim.layout.bounds import CommitPolicy, ring_min_capacity, rolling_min_capacity
from npusim.layout.frames import (
    Frame,
    GatheredFrame,
    LinearFrame,
    RightAlignedFrame,
    RingFrame,
    RollingFrame,
)
from npusim.layout.layouts import (
    AppendPlan,
    Layout,
    LinearLayout,
    Move,
    RingLayout,
    RollingLayout,
    Write,
)
from npusim.layout.rewind import takes_back_blocks

__all__ = [
    "AppendPlan",
    "CommitPolicy",
    "Frame",
    "GatheredFrame",
    "Layout",
    "LinearFrame",
    "LinearLayout",
    "Move",
    "RightAlignedFrame",
    "RingFrame",
    "RingLayout",
    "RollingFrame",
    "RollingLayout",
    "Write",
    "ring_min_capacity",
    "rolling_min_capacity",
    "takes_back_blocks",
]
