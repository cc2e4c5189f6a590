"""What attention reads and what the cache gets, from a past and the rows of a block."""

from dataclasses import dataclass

import openvino.opset13 as ops
from openvino import Output

from transforms.cache_codec import CacheCodec
from transforms.opset import concat, i32


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Keys or values of one node: read [1, KV, K, D], present [1, KV, C + S, .] as the cache stores them."""

    read: Output
    present: Output


@dataclass(frozen=True, kw_only=True)
class PastView:
    """Which rows of a past of C slots attention reads: all, or those at gather_index (None and no rows)."""

    capacity: int
    gathered: bool = False
    gather_index: Output | None = None

    def rows(self, past: Output) -> Output | None:
        """Past rows to read, as stored; None where there are none."""
        if not self.gathered:
            return past if self.capacity else None
        if self.gather_index is None:
            return None
        return ops.gather(past, self.gather_index, i32(2)).output(0)


def cached_rows(past: Output, new: Output, view: PastView, codec: CacheCodec | None) -> CachedRows:
    """Rows of a block put behind a past. With a codec they are stored, and read, as codes."""
    stored = new if codec is None else codec.store(new)
    present = stored if view.capacity == 0 else concat([past, stored], 2)
    if codec is None and not view.gathered:
        return CachedRows(read=present, present=present)
    past_rows = view.rows(past)
    pieces = [stored] if past_rows is None else [past_rows, stored]
    # The ranges are decoded before they are joined, so that past and block stay two ranges of float rows.
    read = pieces if codec is None else [codec.load(piece) for piece in pieces]
    return CachedRows(read=concat(read, 2), present=present)
