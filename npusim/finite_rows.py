"""Refuse KV rows that are no numbers, before they are stored."""

from math import isfinite

import numpy as np

from npusim.errors import ModelError
from npusim.tensor_slice import Array

_PLANES = ("key", "value")
_FLOAT32 = np.dtype(np.float32)
_LARGEST = {2: 65504.0, 4: float(np.finfo(np.float32).max)}


def check_finite(layers: tuple[int, ...], rows: Array, start: int) -> None:
    """ModelError, naming layer and position, unless all of `rows` [2 L, KV, n, D] are finite numbers.

    rows: key and value of each of the layers, in turn, of positions start.. . A stored infinity would outlive
    its row: a masked slot has weight 0, and 0 times infinity is NaN, in this conversation after a rewind and
    in every later one. Rows of codes are always numbers.
    """
    if rows.dtype is _FLOAT32:
        # The fastest look through few rows, in float32 alone: all are finite if the extremes are, and a NaN
        # counts as one. Graphs hand rows out with the heads outermost: seen so, numpy need not copy them.
        in_memory = rows.swapaxes(0, 1)
        if isfinite(in_memory.item(in_memory.argmax())) and isfinite(in_memory.item(in_memory.argmin())):
            return
    elif rows.dtype.kind != "f":
        return
    finite = np.isfinite(rows)
    if finite.all():
        return
    buffer, row = (int(index) for index in np.argwhere(~finite.all(axis=(1, 3)))[0])
    advice = (
        "leave the token out, or use NPUSIM_KV_PRECISION=F32"
        if rows.dtype == np.float16
        else "the model computes no number there"
    )
    raise ModelError(
        f"layer {layers[buffer // 2]}: the {_PLANES[buffer % 2]} of position {start + row} is infinite or "
        f"NaN as {rows.dtype}, whose numbers end at {_LARGEST[rows.dtype.itemsize]:g}; {advice}"
    )
