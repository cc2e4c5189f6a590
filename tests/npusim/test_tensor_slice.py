"""The slice that every write goes through."""

import numpy as np
import pytest

from npusim.errors import NpuSimError, SliceError
from npusim.tensor_slice import make_tensor_slice

TENSOR = np.arange(24).reshape(2, 4, 3)


def test_a_slice_is_a_view() -> None:
    view = make_tensor_slice(TENSOR, 1, 1, 3)
    assert np.shares_memory(view, TENSOR)
    assert np.array_equal(view, TENSOR[:, 1:3])
    assert make_tensor_slice(TENSOR, 1, 4, 4).shape == (2, 0, 3)
    assert np.shares_memory(make_tensor_slice(TENSOR, 2, 0, 3), TENSOR)
    assert make_tensor_slice(TENSOR, np.int64(0), np.int32(1), np.uint8(2)).shape == (1, 4, 3)


@pytest.mark.parametrize(("start", "stop"), [(1, 5), (-1, 2), (3, 2), (5, 5), (-2, -1)])
def test_a_slice_cannot_leave_its_tensor(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=rf"slice \[{start}, {stop}\) of axis 1, which has 4 rows") as caught:
        make_tensor_slice(TENSOR, 1, start, stop)
    assert isinstance(caught.value, NpuSimError)


@pytest.mark.parametrize(
    ("axis", "start", "stop", "message"),
    [
        (-1, 0, 1, r"slice of axis -1; a tensor \[2, 4, 3\] has 0\.\.2"),
        (3, 0, 1, r"slice of axis 3; a tensor \[2, 4, 3\] has 0\.\.2"),
        (1.0, 0, 1, r"of axis 1\.0: .* give integers"),
        (1, 0.0, 1, r"slice \[0.0, 1\) .* give integers"),
        (1, 0, 4.0, r"slice \[0, 4.0\) .* give integers"),
        (1, 0, np.array([4]), r"slice .* give integers"),
        (1, 0, None, r"slice \[0, None\) .* give integers"),
        (1, "0", 1, r"slice \['0', 1\) .* give integers"),
    ],
)
def test_a_slice_of_what_is_no_place_is_refused(
    axis: object, start: object, stop: object, message: str
) -> None:
    with pytest.raises(SliceError, match=message):
        make_tensor_slice(TENSOR, axis, start, stop)
