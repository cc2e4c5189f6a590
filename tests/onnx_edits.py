"""Changes to the ONNX files that `tiny_model` builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import openvino as ov
from numpy.typing import ArrayLike
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Edit = Callable[[ModelProto], None]


def attention(model: ModelProto) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def remove_ports(ports: list[onnx.ValueInfoProto], prefix: str) -> None:
    for port in [port for port in ports if port.name.startswith(prefix)]:
        ports.remove(port)


def with_attribute(name: str, value: float | str) -> Edit:
    def edit(model: ModelProto) -> None:
        node = attention(model)[1]
        for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
            node.attribute.remove(attribute)
        node.attribute.append(helper.make_attribute(name, value))

    return edit


def unchanged(_model: ModelProto) -> None:
    """No change."""


def inside_an_if(model: ModelProto) -> None:
    """The second attention in both branches of an If."""
    node = attention(model)[1]
    body = helper.make_graph(
        [node],
        "body",
        [],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output],
    )
    other = type(body)()
    other.CopyFrom(body)
    chosen = helper.make_node("If", ["condition"], list(node.output), then_branch=body, else_branch=other)
    model.graph.node[list(model.graph.node).index(node)].CopyFrom(chosen)
    condition = helper.make_node("Cast", ["num_tokens"], ["condition.1"], to=TensorProto.BOOL)
    squeezed = helper.make_node("Squeeze", ["condition.1"], ["condition"])
    model.graph.node.insert(2, squeezed)
    model.graph.node.insert(2, condition)


def with_last_logits_only(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last_row"))
    head = model.graph.node.pop()
    model.graph.node.append(helper.make_node("Gather", [head.input[0], "last_row"], ["row"], axis=1))
    model.graph.node.append(helper.make_node("MatMul", ["row", "head"], ["logits"]))


def with_shared_rows(model: ModelProto) -> None:
    """The second layer attends over the keys and values of the first, in a cache of its own."""
    first, second = attention(model)[:2]
    packed = next(node for node in model.graph.node if node.output[0] == second.input[0])
    model.graph.node.remove(packed)
    second.input[0] = first.input[0]


def of_float16(model: ModelProto) -> None:
    """Weights, ports and so the computation in float16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for port in (*model.graph.input, *model.graph.output):
        if port.type.tensor_type.elem_type == TensorProto.FLOAT:
            port.type.tensor_type.elem_type = TensorProto.FLOAT16


def with_numbers_of_layers(numbers: Sequence[int]) -> Edit:
    """Caches renamed: past_key_values.0 and present.0 carry the first of the numbers, and so on."""

    def edit(model: ModelProto) -> None:
        ports = (*model.graph.input, *model.graph.output)
        lists = [names for node in attention(model) for names in (node.input, node.output)]
        for port in ports:
            port.name = renumbered(port.name)
        for names in lists:
            names[:] = [renumbered(name) for name in names]

    def renumbered(name: str) -> str:
        for old, new in enumerate(numbers):
            for prefix in ("past_key_values", "present"):
                if name.startswith(f"{prefix}.{old}."):
                    return name.replace(f".{old}.", f".{new}.")
        return name

    return edit


def edited(serialized: bytes, edit: Edit) -> ov.Model:
    """The model that OpenVINO reads from a file after the change."""
    model = onnx.load_model_from_string(serialized)
    edit(model)
    return ov.Core().read_model(model.SerializeToString())


def make(op: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    """A node; its inputs separated by blanks."""
    domain = "com.microsoft" if op in ("Gelu", "SkipSimplifiedLayerNormalization") else ""
    return helper.make_node(op, inputs.split(), output.split(), domain=domain, **attributes)


def insert(model: ModelProto, place: int, nodes: Sequence[NodeProto], **constants: ArrayLike) -> None:
    """Nodes in a row before that of a place, and the constants that they read."""
    tensors = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    model.graph.initializer.extend(tensors)
    for node in reversed(nodes):
        model.graph.node.insert(place, node)


def with_hidden(*nodes: NodeProto, **constants: ArrayLike) -> Edit:
    """What nodes make of "embedded" [1, S, 20], the rows of the embedding, as "hidden.0" that layers read."""

    def edit(model: ModelProto) -> None:
        model.graph.node[0].output[0] = "embedded"
        insert(model, 1, nodes, **constants)

    return edit
