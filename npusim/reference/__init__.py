"""NumPy references, written from the definition of the op and not from its lowering.

They know absolute positions only: no slots, no frames, no padding. Nothing in here is fast, and nothing in
here shares a helper with `transforms` or with the KV manager, so that the two can be held against each other.
"""

from npusim.reference.attention import AttentionHistory, attend
from npusim.reference.caches import AttendSpec, CacheConfig, CacheSizing, MaskKind, attend_spec, band_spec
from npusim.reference.cell_tags import FlatStep, flatten_step
from npusim.reference.cells import CellReferenceCache
from npusim.reference.contiguous import ContiguousReferenceCache
from npusim.reference.options import AttentionOptions, Rotary, rotate

__all__ = [
    "AttendSpec",
    "AttentionHistory",
    "AttentionOptions",
    "CacheConfig",
    "CacheSizing",
    "CellReferenceCache",
    "ContiguousReferenceCache",
    "FlatStep",
    "MaskKind",
    "Rotary",
    "attend",
    "attend_spec",
    "band_spec",
    "flatten_step",
    "rotate",
]
