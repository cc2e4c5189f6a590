"""A commit that fails: in whichever group of layers, no group has changed."""

from __future__ import annotations

import numpy as np
import pytest
from kv_rows import LINEAR, RING, ROLLING, block, manager, step

from npusim.errors import InputError, ModelError, SliceError
from npusim.kv_manager import BlockRows
from npusim.layout import Layout


def unfit(rows: BlockRows, fault: str) -> BlockRows:
    """The rows of a block, those of the last group with a fault."""
    *good, last = rows.arrays
    match fault:
        case "shape":
            last = last[:, :1]
        case "type":
            last = last.astype(np.float16)
        case "rows":
            last = last[:, :, : rows.first + 1]
        case "groups":
            return rows._replace(arrays=tuple(good))
        case _:
            last[1, 0, rows.first + 1, 2] = float(fault)
    return rows._replace(arrays=(*good, last))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (
            "shape",
            InputError,
            r"layers \[2\]: rows \[2, 1, 5, 3\] of float32 do not fit buffers \[2, 2, \d+, 3\]",
        ),
        ("type", InputError, r"of float16 do not fit buffers \[2, 2, \d+, 3\] of float32"),
        ("rows", SliceError, r"slice \[3, 5\) of axis 2, which has 4 rows"),
        ("groups", InputError, "rows of 2 groups of layers; there are 3"),
        ("inf", ModelError, "layer 2: the value of position 7 is infinite or NaN as float32"),
        ("-inf", ModelError, "layer 2: the value of position 7 is infinite or NaN as float32"),
        ("nan", ModelError, "layer 2: the value of position 7 is infinite or NaN as float32"),
    ],
)
@pytest.mark.parametrize("layouts", [(ROLLING, RING, LINEAR), (LINEAR, RING, ROLLING)], ids=["0", "2"])
def test_rows_that_do_not_fit_the_last_group_leave_the_first_as_they_were(
    layouts: tuple[Layout, ...], fault: str, error: type[Exception], message: str
) -> None:
    """The step drops position 6 and evicts from the rolling layer, so every group would change."""
    kv = manager(*layouts)
    step(kv, 0, 4)
    step(kv, 4, 3)
    before = [group.past.copy() for group in kv.groups]
    with pytest.raises(error, match=message):
        kv.commit(6, unfit(block(kv, 6, 2), fault))
    assert all(np.array_equal(group.past, old) for group, old in zip(kv.groups, before, strict=True))
    assert (kv.num_stored_tokens, kv.high_water, kv.rows_moved) == (7, 7, 1)
