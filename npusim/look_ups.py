"""Tables that token ids and positions look up: how long they are limits both.

An index beyond a table reads zeros on a CPU, or another row, without an error. So what indexes a table must
be understood: ids and positions themselves, or those plus a constant.
"""

from collections.abc import Iterable, Iterator

import openvino as ov
from openvino import Input, Node, Output

from npusim.data_flow import described, hands_on
from npusim.errors import ModelError
from npusim.mask_use import sums_of_mask
from transforms import GQANode
from transforms.gqa_node import GQA_TYPE, Port

_INDEX_TYPES = (ov.Type.i32, ov.Type.i64, ov.Type.u32, ov.Type.u64)
"""Types that hold every id and every position."""

_LOOK_UPS = ("Gather", "GatherElements", "GatherND")
_NEW_VALUES = (GQA_TYPE, "MatMul", "Cos", "Sin", "ShapeOf")
"""Ops behind which a number is a hidden state, an angle or a length, no longer an id or a position."""


def num_embeddings(model: ov.Model) -> int:
    """Token ids that the shortest table of embeddings has rows for.

    Raises ModelError where input_ids look up none, or one by another number than the id.
    """
    rows = [_limit(target, step, "input_ids") for target, step in _readers(_input(model, "input_ids"))]
    known = [limit for limit in rows if limit is not None]
    if not known:
        raise ModelError(
            "input_ids look up no table of embeddings (Gather), so how many token ids there are is unknown; "
            "export the model with one"
        )
    return min(known)


def max_positions(model: ov.Model, static: ov.Model, gqas: Iterable[GQANode]) -> int | None:
    """Positions that the shortest table covers, inside the ops or outside; None where there is none.

    static: the model in shapes of one block. Raises ModelError where a table is looked up by a number
    computed from positions or from the number of tokens.
    """
    for total in sums_of_mask(static):
        for target in total.get_target_inputs():
            _check_no_look_up(target, "the sum of attention_mask")
    readers = []
    if any("position_ids" in port.get_names() for port in model.inputs):
        readers = list(_readers(_input(model, "position_ids")))
    rows = [_limit(target, step, "position_ids") for target, step in readers]
    known = {target.get_node().get_name() for target, _ in readers}
    for gqa in gqas:
        if gqa.rotary is not None and gqa.rotary.position_ids is not None:
            _check_position_ids(gqa, gqa.rotary.position_ids, known)
        rows += _lengths_inside(gqa)
    return min((limit for limit in rows if limit is not None), default=None)


def _check_position_ids(gqa: GQANode, source: Output, known: set[str]) -> None:
    if gqa.node.get_name() not in known:
        node = source.get_node()
        raise ModelError(
            f"{gqa.name}: its rotary position_ids are computed by {node.get_friendly_name()} "
            f"({node.get_type_name()}), so how far they reach into its tables is unknown; give it the "
            "model's own position_ids, or leave them to the op"
        )


def _lengths_inside(gqa: GQANode) -> Iterator[int | None]:
    """Rows of the rotary tables, and columns of an attention_bias that does not grow."""
    if gqa.rotary is not None:
        yield gqa.rotary.table_rows
    if gqa.attention_bias is not None:
        yield _length(gqa.attention_bias, 3)


def _readers(source: Output, offset: int = 0) -> Iterator[tuple[Input, int]]:
    """Inputs that take a value plus a constant, and the constant."""
    for target in source.get_target_inputs():
        output = target.get_node().output(0) if target.get_node().get_output_size() else None
        if output is None or output.get_element_type() not in _INDEX_TYPES:
            yield target, offset
        elif hands_on(target):
            yield from _readers(output, offset)
        elif (step := _step(target)) is not None:
            yield from _readers(output, offset + step)
        else:
            yield target, offset


def _step(target: Input) -> int | None:
    """The constant that an op adds to the value that it reads here."""
    node, port = target.get_node(), target.get_index()
    if node.get_type_name() == "Add":
        return _constant(node.input_value(1 - port))
    if node.get_type_name() == "Subtract" and port == 0:
        step = _constant(node.input_value(1))
        return None if step is None else -step
    return None


def _limit(target: Input, offset: int, name: str) -> int | None:
    """How many values from 0 on a table has rows for; None where the input is no index of a table.

    (The attention op's own position_ids count as an index of its rotary tables.)
    """
    node, port = target.get_node(), target.get_index()
    if node.get_type_name() == GQA_TYPE and port == Port.POSITION_IDS:
        rows = _length(node.input_value(Port.COS_CACHE), 0)
        return None if rows is None else rows - offset
    if node.get_type_name() != "Gather" or port != 1:
        _check_no_look_up(target, name)
        return None
    axis = _constant(node.input_value(2))
    rows = None if axis is None else _length(node.input_value(0), axis)
    if rows is None:
        raise ModelError(
            f"{described(target)} looks {name} up in a table of unknown length; export the model with a "
            "table of a fixed one"
        )
    return rows - offset


def _check_no_look_up(target: Input, name: str) -> None:
    """That nothing computed by the op that reads here indexes a table."""
    seen: set[str] = set()
    waiting = [target]
    while waiting:
        reached = waiting.pop()
        node = reached.get_node()
        kind = node.get_type_name()
        if kind in _LOOK_UPS and reached.get_index() == 1:
            raise ModelError(
                f"{described(reached)} looks a table up by what {described(target)} makes of {name}, so how "
                "far it reaches is unknown; look up input_ids or position_ids themselves, or those plus a "
                "constant"
            )
        if kind not in _NEW_VALUES and node.get_name() not in seen:
            seen.add(node.get_name())
            waiting += [reader for output in node.outputs() for reader in output.get_target_inputs()]


def _input(model: ov.Model, name: str) -> Output:
    return model.input(name).get_node().output(0)


def _length(source: Output, axis: int) -> int | None:
    """Of one axis, where it is known."""
    shape = source.get_partial_shape()
    if shape.rank.is_dynamic or not -len(shape) <= axis < len(shape) or shape[axis].is_dynamic:
        return None
    length: int = shape[axis].get_length()
    return length


def _constant(source: Output) -> int | None:
    """The one whole number of a constant."""
    node: Node = source.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant" or node.get_output_shape(0) not in ([], [1], [1, 1]):
        return None
    return int(node.get_data().item())
