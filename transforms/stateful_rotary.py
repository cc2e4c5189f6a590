"""Rotary embedding of the stateful form: any batch and length, and no node with two outputs.

The static branches rotate with splits (`transforms.rotary`); a graph that NPUW partitions must not have them,
see `transforms.splits_to_slices`.
"""

import openvino.opset13 as ops
from openvino import Output

from transforms.opset import concat, i64


def table_rows(table: Output, position_ids: Output) -> Output:
    """Rows of a table [positions, R] at position_ids [B, S], as [B, 1, S, R]."""
    return ops.unsqueeze(ops.gather(table, position_ids, i64(0)), i64([1])).output(0)


def rotate(source: Output, cos: Output, sin: Output, *, interleaved: bool) -> Output:
    """Rotate the first 2 R channels of [B, heads, S, D]; the rest pass through. cos, sin: [B, 1, S, R]."""
    head_size = source.get_partial_shape()[3].get_length()
    half = cos.get_partial_shape()[3].get_length()
    rest = [_channels(source, 2 * half, head_size)] if head_size > 2 * half else []
    if not interleaved:
        first, second = _channels(source, 0, half), _channels(source, half, 2 * half)
        return concat([*_turn(first, second, cos, sin), *rest], 3)
    heads = source.get_partial_shape()[1].get_length()
    pairs = _reshaped(_channels(source, 0, 2 * half), [0, heads, -1, half, 2])
    even, odd = (ops.gather(pairs, i64(channel), i64(4)).output(0) for channel in (0, 1))
    turned = [ops.unsqueeze(part, i64([4])).output(0) for part in _turn(even, odd, cos, sin)]
    return concat([_reshaped(concat(turned, 4), [0, heads, -1, 2 * half]), *rest], 3)


def _turn(first: Output, second: Output, cos: Output, sin: Output) -> tuple[Output, Output]:
    """The plane rotation (a, b) -> (a cos - b sin, b cos + a sin)."""
    real = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin)).output(0)
    imaginary = ops.add(ops.multiply(second, cos), ops.multiply(first, sin)).output(0)
    return real, imaginary


def _channels(source: Output, start: int, stop: int) -> Output:
    return ops.slice(source, i64([start]), i64([stop]), i64([1]), i64([3])).output(0)


def _reshaped(source: Output, shape: list[int]) -> Output:
    """Reshape where 0 keeps a dimension."""
    return ops.reshape(source, i64(shape), True).output(0)
