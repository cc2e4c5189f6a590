"""The only way rows are written: a view that cannot leave its tensor."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def make_tensor_slice(tensor: Array, axis: int, start: int, stop: int) -> Array:
    """Rows [start, stop) of an axis as a zero-copy view; IndexError when they are not all there.

    numpy clips a slice that leaves an array, and a clipped row is a row lost in silence.
    """
    length = tensor.shape[axis]
    if not 0 <= start <= stop <= length:
        raise IndexError(f"slice [{start}, {stop}) of axis {axis}, which has {length} rows")
    return tensor[(slice(None),) * axis + (slice(start, stop),)]
