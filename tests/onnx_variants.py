"""ONNX files that differ from another: in their attention layers, as a faulty exporter writes, or in type."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEAD_SINK = 11


def write_variant(
    source: Path,
    target: Path,
    *,
    layers: Collection[int] | None = None,
    drop_sink: bool = False,
    **attributes: int | float,
) -> Path:
    """`source` with attributes set on the attention of `layers` (None: all), or its sink taken away."""
    model = onnx.load(source)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    for index, node in enumerate(nodes):
        if layers is not None and index not in layers:
            continue
        kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        if drop_sink:
            node.input[HEAD_SINK] = ""
    onnx.save(model, target)
    return target


def write_float16(source: Path, target: Path) -> Path:
    """`source` with all weights, caches and logits float16."""
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for port in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if port.type.tensor_type.elem_type == TensorProto.FLOAT:
            port.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, target)
    return target
