"""Rotary embedding of a block: table rows gathered by position, then the half-split or interleaved form."""

import openvino.opset13 as ops
from openvino import Output

from transforms.gqa_node import RotaryInputs
from transforms.opset import concat, i32, i64, reshape


def rotary_positions(rotary: RotaryInputs, block_positions: Output, sequence_length: int) -> Output:
    """Position of each row, int32 [S]: position_ids where given, else that of the block, at least 0.

    Padded rows come before position 0; their value is never used, but the table must not be left.
    """
    source = block_positions
    if rotary.position_ids is not None:
        source = ops.convert(rotary.position_ids, "i32").output(0)
    return ops.maximum(reshape(source, [sequence_length]), i32(0)).output(0)


def gather_table(table: Output, positions: Output) -> Output:
    """Rows of a table [positions, R] as [1, 1, S, R]."""
    return ops.unsqueeze(ops.gather(table, positions, i32(0)), i32([0, 1])).output(0)


def rotate(source: Output, cos: Output, sin: Output, *, interleaved: bool) -> Output:
    """Rotate the first 2 R channels of [1, heads, S, D]; the rest pass through. cos, sin: [1, 1, S, R]."""
    heads, length, head_size = (source.get_partial_shape()[axis].get_length() for axis in (1, 2, 3))
    half = cos.get_partial_shape()[3].get_length()
    if interleaved:
        return _rotate_interleaved(source, cos, sin, [heads, length, head_size, half])
    pieces = [half, half] + ([head_size - 2 * half] if head_size > 2 * half else [])
    first, second, *rest = ops.variadic_split(source, i64(3), i64(pieces)).outputs()
    real, imaginary = _turn(first, second, cos, sin)
    return concat([real, imaginary, *rest], 3)


def _rotate_interleaved(source: Output, cos: Output, sin: Output, sizes: list[int]) -> Output:
    heads, length, head_size, half = sizes
    turned, *rest = [source]
    if head_size > 2 * half:
        turned, *rest = ops.variadic_split(source, i64(3), i64([2 * half, head_size - 2 * half])).outputs()
    pairs = reshape(turned, [1, heads, length, half, 2])
    even, odd = (
        reshape(channel, [1, heads, length, half]) for channel in ops.split(pairs, i64(4), 2).outputs()
    )
    parts = [reshape(part, [1, heads, length, half, 1]) for part in _turn(even, odd, cos, sin)]
    return concat([reshape(concat(parts, 4), [1, heads, length, 2 * half]), *rest], 3)


def _turn(first: Output, second: Output, cos: Output, sin: Output) -> tuple[Output, Output]:
    """The plane rotation (a, b) -> (a cos - b sin, b cos + a sin)."""
    real = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin)).output(0)
    imaginary = ops.add(ops.multiply(second, cos), ops.multiply(first, sin)).output(0)
    return real, imaginary
