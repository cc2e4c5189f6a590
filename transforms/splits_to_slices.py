"""Slices in place of splits: every node of the graph has one output.

NPUW's partitioner remembers what it cut by node, not by output: where two outputs of one split cross the
same border between its subgraphs it loses one, and the model does not compile. Packed projections of query,
key and value are split so, inside the op (the frontend shows it as a split) and outside of it.
"""

import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Output
from openvino.passes import ModelPass

from transforms.opset import i64


class SplitsToSlices(ModelPass):
    """Replace every VariadicSplit of known lengths by slices; `replaced` counts the splits of the last run.

    A split behind a transpose is cut before it, so that value rows come out of a transpose of their own,
    which is how NPUW knows a value cache that it may keep transposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Replace what can be; True when the model changed."""
        self.replaced = 0
        for node in model.get_ordered_ops():
            if node.get_type_name() == "VariadicSplit" and _replace(node):
                self.replaced += 1
        return self.replaced > 0


def _replace(split: Node) -> bool:
    axis = _constant_values(split.input_value(1))
    starts = _starts(split, axis[0]) if axis is not None else None
    if axis is None or starts is None:
        return False
    for index, output in enumerate(split.outputs()):
        output.replace(_cut(split.input_value(0), axis[0], starts[index], starts[index + 1]))
    return True


def _constant_values(source: Output) -> list[int] | None:
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
    order = _constant_values(transpose.input_value(1)) if transpose.get_type_name() == "Transpose" else None
    if order is None:
        return _sliced(packed, axis, start, stop)
    return ops.transpose(_sliced(transpose.input_value(0), order[axis], start, stop), i64(order)).output(0)


def _sliced(source: Output, axis: int, start: int, stop: int) -> Output:
    return ops.slice(source, i64([start]), i64([stop]), i64([1]), i64([axis])).output(0)
