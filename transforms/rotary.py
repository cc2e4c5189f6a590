"""Rotary embedding of a block: table rows gathered by position, then the half-split or interleaved form."""

from dataclasses import dataclass, field

import openvino.opset13 as ops
from openvino import Output

from transforms.gqa_node import RotaryInputs
from transforms.opset import OutputKey, concat, i32, i64, key_of, reshape


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What `rotate` in its half-split form was given: source [1, heads, S, D], cos and sin [1, 1, S, R]."""

    source: Output = field(repr=False)
    cos: Output = field(repr=False)
    sin: Output = field(repr=False)


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


def read_rotation(rotated: Output) -> Rotation | None:
    """Find what `rotated` was made from, or None where it is no half-split rotation of a static block."""
    join = rotated.get_node()
    pieces = _operands(rotated, "Concat")
    if len(pieces) < 2 or join.get_attributes()["axis"] not in (3, -1):
        return None
    terms = [*_operands(pieces[0], "Subtract"), *_operands(pieces[1], "Add")]
    factors = [factor for term in terms for factor in _operands(term, "Multiply")]
    if len(factors) != 8:  # two of each of the four products
        return None
    first, cos, second, sin = factors[:4]
    split = first.get_node()
    if split.get_type_name() != "VariadicSplit":
        return None
    source = split.input_value(0)
    turned = [list(factor.get_partial_shape())[3:] for factor in (first, second, cos, sin)]
    is_rotation = (
        _keys(factors[4:]) == _keys([second, cos, first, sin])
        and _keys([first, second, *pieces[2:]]) == _keys(split.outputs())
        and turned == [turned[0]] * 4
        and source.get_partial_shape().is_static
        and source.get_shape()[:3] == first.get_shape()[:3]  # split along the channels
    )
    return Rotation(source=source, cos=cos, sin=sin) if is_rotation else None


def _operands(source: Output, op_type: str) -> list[Output]:
    """The inputs of the op that gives `source`, none where it is of another type."""
    node = source.get_node()
    return list(node.input_values()) if node.get_type_name() == op_type else []


def _keys(sources: list[Output]) -> list[OutputKey]:
    return [key_of(source) for source in sources]


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
