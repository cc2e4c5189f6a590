"""Query, key and value of a packed projection, each cut out by a node of its own.

NPUW's partitioner remembers what it cut by node, not by output: where two outputs of one split cross the same
border between its subgraphs it loses one, and the model does not compile. A slice has one output. It is put
before the transpose, so that the value rows come out of a transpose, which is how NPUW knows them.
"""

import openvino.opset13 as ops
from openvino import Node, Output

from transforms.opset import i64


def unpacked(source: Output) -> Output:
    """The rows [B, heads, S, D] that `source` yields, without its split; any other source as it is."""
    split = source.get_node()
    if split.get_type_name() != "VariadicSplit":
        return source
    axis = constant_values(split.input_value(1))
    starts = _starts(split, axis[0]) if axis is not None else None
    if axis is None or starts is None:
        return source
    index = source.get_index()
    return _cut(split.input_value(0), axis[0], starts[index], starts[index + 1])


def constant_values(source: Output) -> list[int] | None:
    """The integers of a constant, flat; None for anything else."""
    node = source.get_node()
    if node.get_type_name() != "Constant":
        return None
    return [int(value) for value in node.data.reshape(-1)]


def _starts(split: Node, axis: int) -> list[int] | None:
    """Where the outputs of a split begin and where the last one ends; None while a length is open."""
    starts = [0]
    for output in split.outputs():
        length = output.get_partial_shape()[axis]
        if length.is_dynamic:
            return None
        starts.append(starts[-1] + length.get_length())
    return starts


def _cut(packed: Output, axis: int, start: int, stop: int) -> Output:
    transpose = packed.get_node()
    order = constant_values(transpose.input_value(1)) if transpose.get_type_name() == "Transpose" else None
    if order is None:
        return _sliced(packed, axis, start, stop)
    return ops.transpose(_sliced(transpose.input_value(0), order[axis], start, stop), i64(order)).output(0)


def _sliced(source: Output, axis: int, start: int, stop: int) -> Output:
    return ops.slice(source, i64([start]), i64([stop]), i64([1]), i64([axis])).output(0)
