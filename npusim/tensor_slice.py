"""The only way rows are written: a view that cannot leave its tensor."""

import numpy as np
import numpy.typing as npt

from npusim.errors import SliceError

Array = npt.NDArray[np.generic]

_AXES_BEFORE = tuple((slice(None),) * axis for axis in range(64))  # as many as numpy knows


def make_tensor_slice(tensor: Array, axis: int, start: int, stop: int) -> Array:
    """Rows [start, stop) of an axis, counted from 0, as a zero-copy view.

    Raises SliceError for numbers that are no integers, an axis that is not there, and rows that are not all
    there: numpy clips a slice that leaves an array, and a clipped row is a row lost in silence.
    """
    try:
        shape = tensor.shape
        if not 0 <= axis < len(shape):
            raise SliceError(f"slice of axis {axis}; a tensor {list(shape)} has 0..{len(shape) - 1}")
        length = shape[axis]
        if not 0 <= start <= stop <= length:
            raise SliceError(
                f"slice [{start}, {stop}) of axis {axis}, which has {length} rows; give 0..{length}, in order"
            )
        return tensor[(*_AXES_BEFORE[axis], slice(start, stop))]
    except TypeError as error:
        raise SliceError(f"slice [{start!r}, {stop!r}) of axis {axis!r}: {error}; give integers") from error
