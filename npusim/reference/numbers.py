"""What counts as an integer and as rows here: what is none is refused, never rounded."""

from typing import TypeGuard

import numpy as np

from npusim.errors import InputError


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python's or numpy's; 2.0 and True are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_rows(name: str, rows: object) -> None:
    """InputError unless `rows` is an array of real numbers."""
    if not isinstance(rows, np.ndarray):
        raise InputError(f"{name} is a {type(rows).__name__}; give a numpy array")
    if rows.dtype.kind not in "fiu":
        raise InputError(f"{name} is {rows.dtype}; give real numbers")


def check_count(name: str, value: object) -> None:
    """InputError unless a value is an integer of 0 or more."""
    if not is_integer(value) or value < 0:
        raise InputError(f"{name} is {value!r}; give an integer of 0 or more")
