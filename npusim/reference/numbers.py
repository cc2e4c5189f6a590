"""What counts as an integer and as rows here: what is none is refused, never rounded."""

from math import isfinite
from numbers import Real
from typing import TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npusim.errors import InputError

LARGEST = 2**31 - 1
"""Sums of two such numbers, as positions are, are integers of numpy's."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python's or numpy's; 2.0 and True are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is one real number, neither infinite nor NaN, that a float64 holds; True is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False


def real_array(name: str, given: ArrayLike) -> NDArray[np.generic]:
    """What was given as an array of real numbers of its own type; InputError for anything else."""
    try:
        array = np.asarray(given)
    except ValueError as error:  # rows of different length
        raise InputError(f"{name} is no array: {error}") from error
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name} has type {array.dtype}, it must be real numbers")
    return array


def check_rows(name: str, rows: object) -> None:
    """InputError unless `rows` is an array of real numbers."""
    if not isinstance(rows, np.ndarray):
        raise InputError(f"{name} is a {type(rows).__name__}; give a numpy array")
    if rows.dtype.kind not in "fiu":
        raise InputError(f"{name} is {rows.dtype}; give real numbers")


def check_count(name: str, value: object) -> None:
    """InputError unless a value is an integer of 0 or more, and of 32 bits."""
    if not is_integer(value) or value < 0:
        raise InputError(f"{name} is {value!r}; give an integer of 0 or more")
    if value > LARGEST:
        raise InputError(f"{name} is {value}; at most {LARGEST} is possible")
