"""What counts as a rotation that a factor may be moved through: all that `rotate` builds, nothing like it."""

import openvino as ov
import openvino.opset13 as ops
import pytest
from execution_cases import make_case, types
from gqa_models import RotaryTable
from openvino import Node, Output

from transforms import ExecutionForm
from transforms.form_choice import AttentionForm
from transforms.rotary import read_rotation, rotate


def parameter(*shape: int) -> Output:
    return ops.parameter(list(shape), ov.Type.f32).output(0)


def split(source: Output, *lengths: int, axis: int = 3) -> list[Output]:
    return list(ops.variadic_split(source, ops.constant(axis), ops.constant(list(lengths))).outputs())


@pytest.mark.parametrize("rest", [0, 6])
def test_a_half_split_rotation_is_read_as_it_was_given(rest: int) -> None:
    source, cos, sin = parameter(1, 3, 5, 8 + rest), parameter(1, 1, 5, 4), parameter(1, 1, 5, 4)
    found = read_rotation(rotate(source, cos, sin, interleaved=False))
    assert found is not None
    assert (found.source, found.cos, found.sin) == (source, cos, sin)


def test_an_interleaved_rotation_is_not_read() -> None:
    rotated = rotate(parameter(1, 3, 5, 8), parameter(1, 1, 5, 4), parameter(1, 1, 5, 4), interleaved=True)
    assert read_rotation(rotated) is None


A, B, REST = split(parameter(1, 3, 5, 14), 4, 4, 6)
C, D = ops.split(parameter(1, 3, 5, 8), ops.constant(3), 2).outputs()
COS, SIN, OTHER = (parameter(1, 1, 5, 4) for _ in range(3))
WIDE = parameter(1, 1, 5, 1)


def turned(
    real: tuple[Output, Output, Output, Output] = (A, COS, B, SIN),
    imaginary: tuple[Output, Output, Output, Output] = (B, COS, A, SIN),
    rest: tuple[Output, ...] = (REST,),
    axis: int = 3,
) -> Output:
    """(a cos - b sin, b cos + a sin, ..): each argument gives the four factors of one term."""
    first = ops.subtract(ops.multiply(*real[:2]), ops.multiply(*real[2:]))
    second = ops.add(ops.multiply(*imaginary[:2]), ops.multiply(*imaginary[2:]))
    return ops.concat([first, second, *rest], axis).output(0)


def added() -> Node:
    return ops.concat([ops.add(ops.multiply(A, COS), ops.multiply(B, SIN)), turned(), REST], 3)


NO_ROTATIONS = {
    "halves swapped in the second": turned(imaginary=(A, COS, B, SIN)),
    "sine of another table": turned(imaginary=(B, COS, A, OTHER)),
    "cosine of another table": turned(imaginary=(B, OTHER, A, SIN)),
    "rest left out": turned(rest=()),
    "something else for the rest": turned(rest=(parameter(1, 3, 5, 6),)),
    "joined along the heads": turned(rest=(), axis=1),
    "one channel of table for all": turned((A, WIDE, B, WIDE), (B, WIDE, A, WIDE)),
    "another op in place of the split": turned((C, COS, D, SIN), (D, COS, C, SIN), ()),
    "no split before it": turned((COS, COS, SIN, SIN), (SIN, COS, COS, SIN), ()),
    "a sum in place of the difference": added().output(0),
    "no join": ops.subtract(ops.multiply(A, COS), ops.multiply(B, SIN)).output(0),
    "a join of one": ops.concat([A], 3).output(0),
    "an input": A,
}


@pytest.mark.parametrize("rotated", NO_ROTATIONS.values(), ids=NO_ROTATIONS.keys())
def test_what_is_like_a_rotation_is_not_read(rotated: Output) -> None:
    assert read_rotation(turned()) is not None
    assert read_rotation(rotated) is None


@pytest.mark.parametrize("axis", [1, 2])
def test_halves_of_the_heads_or_of_the_rows_are_not_read(axis: int) -> None:
    shape = [1, 3, 5, 4]
    shape[axis] *= 2
    lengths = [shape[axis] // 2] * 2
    a, b = split(parameter(*shape), *lengths, axis=axis)
    assert read_rotation(turned((a, COS, b, SIN), (b, COS, a, SIN), ())) is None


def test_a_source_of_open_size_is_not_read() -> None:
    """The query of static shape that comes of it is left to be scaled itself."""
    a, b = split(parameter(1, -1, 5, 8), 4, 4)
    wide_cos, wide_sin = parameter(1, 3, 5, 4), parameter(1, 3, 5, 4)
    rotated = turned((a, wide_cos, b, wide_sin), (b, wide_cos, a, wide_sin), ())
    assert rotated.get_partial_shape().is_static
    assert read_rotation(rotated) is None


def test_halves_of_unequal_length_are_not_read() -> None:
    a, b = split(parameter(1, 3, 5, 5), 4, 1)
    assert read_rotation(turned((a, COS, b, SIN), (b, COS, a, SIN), ())) is None


@pytest.mark.parametrize(
    ("rotary", "scaled_before"),
    [
        (RotaryTable(channels=16), True),
        (RotaryTable(channels=8), True),
        (RotaryTable(channels=16, interleaved=True), False),
        (None, False),
    ],
)
def test_the_scale_is_put_before_a_rotation(rotary: RotaryTable | None, scaled_before: bool) -> None:
    """So the split of a rotated query reads the scaled one, that of the key does not."""
    model = make_case((6, 2), 3, 7, rotary=rotary).device_form()
    ExecutionForm(lambda _sizes: AttentionForm.JOINED).run_on_model(model)
    assert types(model)["ScaledDotProductAttention"] == 0
    splits = [node for node in model.get_ops() if node.get_type_name() == "VariadicSplit"]
    readers = [node.input_value(0).get_node().get_type_name() for node in splits]
    assert readers.count("Multiply") == (1 if scaled_before else 0)
