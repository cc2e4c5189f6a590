"""Small spellings of OpenVINO ops that more than one file of this package needs."""

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Output

OutputKey = tuple[str, int]


def key_of(source: Output) -> OutputKey:
    """What tells one output of a model from every other: node name (unique in a process) and port."""
    return (source.get_node().get_name(), source.get_index())


def i32(values: int | list[int]) -> Node:
    """An int32 constant."""
    return ops.constant(np.asarray(values, dtype=np.int32))


def row(start: int, stop: int, step: int = 1) -> Node:
    """The int32 constant [1, length] of range(start, stop, step)."""
    return ops.constant(np.arange(start, stop, step, dtype=np.int32)[np.newaxis])


def i64(values: int | list[int]) -> Node:
    """An int64 constant, the type of shapes and axes."""
    return ops.constant(np.asarray(values, dtype=np.int64))


def reshape(source: Output, shape: list[int]) -> Output:
    """Reshape to a shape given in full (-1 for at most one dimension)."""
    return ops.reshape(source, i64(shape), False).output(0)


def concat(sources: list[Output], axis: int) -> Output:
    """Concatenate; a single source is returned as it is."""
    return sources[0] if len(sources) == 1 else ops.concat(sources, axis).output(0)


def scalar_i32(source: Output) -> Output:
    """A one-element tensor as an int32 of shape [1]."""
    converted = source if source.get_element_type() == ov.Type.i32 else ops.convert(source, "i32").output(0)
    return reshape(converted, [1])


def static_dimension(source: Output, axis: int) -> int | None:
    """The length of an axis, or None while it is dynamic."""
    dimension = source.get_partial_shape()[axis]
    return dimension.get_length() if dimension.is_static else None
