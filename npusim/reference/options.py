"""What one attention layer computes: its options, its rotary tables, and the rotation itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npusim.errors import ConfigError, InputError
from npusim.reference.numbers import is_finite_number, is_integer, real_array

Array = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """Rotary tables, a row for each position: cos and sin, [positions, r], rotate the first 2 * r channels.

    Half-split pairs channel c with c + r, interleaved pairs 2c with 2c + 1; further channels pass through.
    """

    cos: ArrayLike
    sin: ArrayLike
    interleaved: bool = False

    def __post_init__(self) -> None:
        cos, sin = _own_numbers("rotary cos", self.cos), _own_numbers("rotary sin", self.sin)
        if cos.ndim != 2 or cos.shape != sin.shape or 0 in cos.shape:
            raise ConfigError(
                f"rotary tables of shapes {cos.shape} and {sin.shape}: cos and sin must be two equal, "
                "non-empty tables [positions, channels / 2]"
            )
        object.__setattr__(self, "cos", cos)
        object.__setattr__(self, "sin", sin)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOptions:
    """Options of one attention layer; names and defaults are those of the op's attributes and inputs.

    head_sink ([H]) adds one logit per head to the softmax denominator and no value; smooth_softmax is a sink
    of 0 for each head and gives way to head_sink. scale 0 is 1 / sqrt(D).
    """

    local_window_size: int = -1
    causal: bool = True
    scale: float = 0.0
    head_sink: ArrayLike | None = None
    smooth_softmax: bool = False
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        window = self.local_window_size
        if not is_integer(window) or (window != -1 and window < 1):
            raise ConfigError(f"local_window_size is {window!r}: it must be -1 (no window) or at least 1")
        if window != -1 and not self.causal:
            raise ConfigError(f"local_window_size is {window} with causal=0: a window needs causal=1")
        if not is_finite_number(self.scale):
            raise ConfigError(f"scale is {self.scale!r}: it must be finite; 0 means 1 / sqrt(head_size)")
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise ConfigError(f"rotary is {self.rotary!r}: it must be a Rotary, or None for no rotation")
        if self.head_sink is not None:
            sink = _own_numbers("head_sink", self.head_sink)
            if sink.ndim != 1 or not np.isfinite(sink).all():
                raise ConfigError(f"head_sink is {sink}: it must be one finite logit for each query head")
            object.__setattr__(self, "head_sink", sink)


def _own_numbers(name: str, given: ArrayLike) -> Array:
    """A float64 copy; ConfigError for what is no array of real numbers."""
    try:
        return np.array(real_array(name, given), np.float64)
    except InputError as error:
        raise ConfigError(str(error)) from error


def checked_array(name: str, given: ArrayLike) -> Array:
    """`given` as float64 [1, heads, rows, channels]; InputError if it is anything else."""
    raw = real_array(name, given)
    if raw.ndim != 4 or raw.shape[0] != 1 or 0 in raw.shape:
        raise InputError(
            f"{name} has shape {raw.shape}, it must be [1, heads, rows, head size], no dimension 0"
        )
    return raw.astype(np.float64)


def rotate(rows: ArrayLike, rotary: Rotary, positions: ArrayLike) -> Array:
    """Rotates rows [1, heads, S, D] by the angles of `positions` (S of them); same shape, float64."""
    x = checked_array("rows", rows)  # [1, heads, S, D]
    cos, sin = np.asarray(rotary.cos), np.asarray(rotary.sin)
    at = _checked_positions(positions, x.shape[2], len(cos))
    half = cos.shape[1]
    if 2 * half > x.shape[3]:
        raise InputError(f"rotary tables rotate {2 * half} channels, the head size is only {x.shape[3]}")
    if rotary.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    c, s = cos[at], sin[at]  # [S, half], broadcast over the heads
    turned = x.copy()
    turned[..., first] = x[..., first] * c - x[..., second] * s
    turned[..., second] = x[..., first] * s + x[..., second] * c
    return turned


def _checked_positions(given: ArrayLike, rows: int, table_rows: int) -> Positions:
    positions = real_array("rotary positions", given)
    if positions.dtype.kind not in "iu" or positions.size != rows:
        raise InputError(
            f"rotary positions of shape {positions.shape}, type {positions.dtype}: give one integer for each "
            f"of the {rows} rows"
        )
    if positions.min() < 0 or positions.max() >= table_rows:
        raise InputError(
            f"rotary positions {positions.min()} to {positions.max()}: the tables hold 0 to {table_rows - 1}"
        )
    return positions.reshape(-1).astype(np.int64)
