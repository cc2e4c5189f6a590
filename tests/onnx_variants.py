"""ONNX files that differ from another in their attention layers: what a faulty exporter writes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
from onnx import helper

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
