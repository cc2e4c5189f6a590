"""Whether a token's row depends on the other rows of its block, outside of attention.

A block is padded, and a prompt may be cut into several. So what reduces, normalises, sorts, accumulates or
moves rows along the tokens would answer for other rows than the prompt's: for padding, and for those of one
chunk alone. Which axis counts the tokens is found by giving the model blocks of two lengths: it is the one
whose length differs.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import openvino as ov
from openvino import Node, Output

from npusim.data_flow import use_beyond
from npusim.errors import ModelError
from transforms import DecompositionError, StaticShapes, node_label
from transforms.gqa_node import GQA_TYPE, Port
from transforms.opset import OutputKey, key_of

BLOCKS = (2, 3)
"""Tokens of the blocks that a model is tried with; its past has 2 rows for both."""

_TOKEN_INPUTS = {"input_ids", "position_ids"}
_LENGTHS = (Port.SEQLENS_K, Port.TOTAL_SEQUENCE_LENGTH)

_Lengths = tuple[tuple[int, ...], ...]
"""The shapes of a value with blocks of each length."""

_BY_ELEMENT = (
    *("BitwiseNot", "Bucketize", "Convert", "ConvertLike", "ConvertPromoteTypes", "FakeConvert"),
    *("FakeQuantize", "HardSigmoid", "Identity", "IsFinite", "IsInf", "IsNaN", "LogicalNot", "OneHot"),
    *("PRelu", "Result", "Select", "Selu", "Swish"),
)
"""Ops that make each number of one number of each input, besides those that OpenVINO derives from such."""

_SAME_ORDER = ("Reshape", "Squeeze", "Transpose", "Unsqueeze")
_KEEPS_LENGTH = ("Broadcast", "Pad", "Slice", "StridedSlice", "Tile")
"""Ops that leave the rows as they are where the number of rows stays."""

_MOST_NUMBERS = 64

_AXIS_ATTRIBUTE = ("Concat", "GatherElements", "LogSoftmax", "Softmax", "TopK")
_AXIS_INPUT = {
    "CumSum": 1,
    "Gather": 2,
    "MVN": 1,
    "NormalizeL2": 1,
    "ScatterElementsUpdate": 3,
    "Split": 1,
    "VariadicSplit": 1,
}
"""Ops along an axis, and which input says it."""


def with_block(static: ov.Model, rows: int) -> None:
    """Give a model the shapes of one block, in place; ModelError where it cannot have them."""
    try:
        StaticShapes(sequence_length=rows, past_length=BLOCKS[0]).run_on_model(static)
    except DecompositionError as error:
        raise ModelError(str(error)) from error


def check_token_mixing(static: ov.Model) -> None:
    """No op besides attention makes a token's row of other rows. `static` has the first of `BLOCKS`.

    It comes out with the shapes of the second. What becomes seqlens_k or total_sequence_length alone is free
    here: `mask_use.check_seqlens` judges the one, the lowering does not read the other.

    Raises ModelError for the first op that does, or of which it is not known, with its name and type.
    """
    nodes = _with_rows_of_tokens(static)
    outputs = [output for node in nodes for output in node.outputs()]
    short = [_shape(output) for output in outputs]
    with_block(static, BLOCKS[1])
    shapes = {key_of(output): (shape, _shape(output)) for output, shape in zip(outputs, short, strict=True)}
    for node in nodes:
        if _mixes(node, shapes) and (use := use_beyond(node.outputs(), _LENGTHS)) is not None:
            raise ModelError(
                f"{node_label(node)} ({node.get_type_name()}), which goes into {use}, may mix the rows of "
                "different tokens; outside of GroupQueryAttention each row must come from its own token "
                "alone, as the padding of a block and other cuts of a prompt into blocks would change the "
                "answer"
            )


def _with_rows_of_tokens(static: ov.Model) -> list[Node]:
    """The inputs of the tokens, and what is computed from their numbers, in execution order."""
    found: list[Node] = []
    names: set[str] = set()
    for node in static.get_ordered_ops():
        is_input = node.get_type_name() == "Parameter" and node.output(0).get_names() & _TOKEN_INPUTS
        sources = {value.get_node().get_name() for value in node.input_values()}
        if is_input or (sources & names and node.get_type_name() != "ShapeOf"):
            found.append(node)
            names.add(node.get_name())
    return found


def _shape(output: Output) -> tuple[int, ...]:
    """By index, as OpenVINO's own iteration over a shape takes ten times as long."""
    shape = output.get_shape()
    return tuple([shape[axis] for axis in range(len(shape))])


def check_logits(static: ov.Model, vocab_size: int) -> None:
    """Every row has its logits: a model that keeps the last row alone cannot verify drafts."""
    rows = static.input("input_ids").get_shape()[1]
    shape = list(static.output("logits").get_shape())
    if shape != [1, rows, vocab_size]:
        raise ModelError(
            f"logits have shape {shape} for {rows} tokens; one row per token is needed, "
            "export the model with logits for every position"
        )


def _mixes(node: Node, shapes: Mapping[OutputKey, _Lengths]) -> bool:
    """Whether an op may mix tokens, given the shapes of all values that have rows of tokens."""
    kind = node.get_type_name()
    if kind in (GQA_TYPE, "Parameter"):
        return False
    keys = {port: key_of(value) for port, value in enumerate(node.input_values())}
    inputs = {port: _token_axes(shapes[key]) for port, key in keys.items() if key in shapes}
    outputs = [_token_axes(shapes[key_of(output)]) for output in node.outputs()]
    if any(len(axes) != 1 for axes in outputs):
        return True  # the tokens are reduced to one row, or paired with each other
    if kind == "MatMul":
        return any(_contracted(node, port, shapes) in axes for port, axes in inputs.items())
    if kind in _KEEPS_LENGTH:
        return not _keeps_rows(node, shapes)
    if kind in _AXIS_ATTRIBUTE or kind in _AXIS_INPUT:
        return _along_tokens(node, inputs, shapes)
    return not (kind in _BY_ELEMENT or kind in _SAME_ORDER or _derives_from_known(node))


def _token_axes(lengths: _Lengths) -> list[int]:
    """Axes whose length differs between the blocks."""
    return [axis for axis, pair in enumerate(zip(*lengths, strict=True)) if len(set(pair)) > 1]


def _derives_from_known(node: Node) -> bool:
    """An elementwise op; or a reduction, which behind the check of its output reduces other axes."""
    known = ("UnaryElementwise", "BinaryElementwise", "ReductionBase")
    return any(name.startswith(known) for name in _kinds(node))


def _kinds(node: Node) -> Iterator[str]:
    kind = node.get_type_info()
    while kind is not None:
        yield kind.name
        kind = kind.parent


def _contracted(node: Node, port: int, shapes: Mapping[OutputKey, _Lengths]) -> int:
    """The axis of an input that a MatMul sums over."""
    rank = len(shapes[key_of(node.input_value(port))][0])
    if rank == 1:
        return 0
    transposed = node.get_attributes()["transpose_b" if port else "transpose_a"]
    return rank - 1 if bool(transposed) == bool(port) else rank - 2


def _keeps_rows(node: Node, shapes: Mapping[OutputKey, _Lengths]) -> bool:
    """Whether an op leaves as many rows as there were, neither turned nor shifted."""
    before, after = (shapes[key_of(value)] for value in (node.input_value(0), node.output(0)))
    if _token_lengths(before) != _token_lengths(after):
        return False
    match node.get_type_name():
        case "Slice" | "StridedSlice":
            return min(_constants(node.input_value(3)), default=0) > 0
        case "Pad":
            pads = [_constants(node.input_value(port)) for port in (1, 2)]
            return all(min(pad, default=-1) >= 0 for pad in pads)
        case _:
            return True


def _token_lengths(lengths: _Lengths) -> list[list[int]]:
    return [[shape[axis] for shape in lengths] for axis in _token_axes(lengths)]


def _along_tokens(node: Node, inputs: Mapping[int, list[int]], shapes: Mapping[OutputKey, _Lengths]) -> bool:
    """Whether an op along some axes may work along the tokens'; axes that are not known may be any."""
    kind = node.get_type_name()
    if kind == "Gather":
        inputs = {port: axes for port, axes in inputs.items() if port == 0}
    given = _constants(node.input_value(_AXIS_INPUT[kind])) if kind in _AXIS_INPUT else [_axis(node)]
    for port, tokens in inputs.items():
        rank = len(shapes[key_of(node.input_value(port))][0])
        if not given or {axis % rank for axis in given} & set(tokens):
            return True
    return False


def _axis(node: Node) -> int:
    axis: int = node.get_attributes()["axis"]
    return axis


def _constants(source: Output) -> list[int]:
    """The numbers of a constant, or of what is computed from constants; none where that is not so."""
    values = _computed(source)
    return [] if values is None else [int(value) for value in values.data.flat]


def _computed(source: Output) -> ov.Tensor | None:
    """What constants and the shapes of values make of it; None for what depends on the values themselves."""
    node = source.get_node()
    if node.get_type_name() == "ShapeOf":
        shape = np.array(_shape(node.input_value(0)), source.get_element_type().to_dtype())
        return ov.Tensor(shape)
    # Axes, bounds and pads are a few numbers; past those lies the graph of the hidden states.
    if math.prod(_shape(source)) > _MOST_NUMBERS or node.get_output_size() != 1:
        return None
    if node.get_type_name() == "Constant":
        return ov.Tensor(node.get_data())
    inputs = [_computed(value) for value in node.input_values()]
    known = [values for values in inputs if values is not None]
    if not inputs or len(known) < len(inputs):
        return None
    result = ov.Tensor(source.get_element_type(), source.get_shape())
    return result if node.evaluate([result], known) else None
