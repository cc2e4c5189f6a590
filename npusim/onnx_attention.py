"""What an ONNX file itself says about its attention layers, read with the `onnx` package.

The file is the only witness that never loses anything: frontends refuse some attributes and older ones drop
others without a word. Weights are not needed and external data is not loaded.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import onnx
from google.protobuf.message import DecodeError

from npusim.errors import ModelError
from npusim.layer_numbers import layer_numbers

GQA_TYPE = "GroupQueryAttention"
PACKED_4_BIT = 4


class Sink(Enum):
    """What is added to the softmax denominator."""

    NONE = "none"
    HEAD_SINK = "head_sink"
    """One learnt logit per head; wins over the flag."""
    SMOOTH_SOFTMAX = "smooth_softmax"
    """The flag: a logit of 0 per head."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary embedding inside the op; None where the file leaves a number open."""

    interleaved: bool
    rotated_channels: int | None
    table_length: int | None


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One GroupQueryAttention node as the file has it.

    index: its place in the file. number: what it goes by (`layer_numbers`). name: its output's, as
    `transforms.node_label` has it. node_name: of the ONNX node; the output's where it has none.
    """

    index: int
    number: int
    name: str
    node_name: str
    num_heads: int
    kv_num_heads: int
    head_size: int | None
    local_window_size: int
    causal: bool
    sink: Sink
    rotary: Rotary | None
    rolling_cache: bool
    kv_cache_type: str
    softcap: float
    smooth_softmax: int
    has_qk_norm: bool
    has_past: bool

    @property
    def has_sink(self) -> bool:
        """Whether the softmax denominator holds one more logit."""
        return self.sink is not Sink.NONE

    @property
    def is_partial_rotary(self) -> bool:
        """Whether only the first channels of a head are rotated."""
        if self.rotary is None or self.rotary.rotated_channels is None or self.head_size is None:
            return False
        return self.rotary.rotated_channels < self.head_size


@dataclass(frozen=True, kw_only=True)
class OnnxAttention:
    """The attention layers of a file in file order, and how often each op type occurs ("domain.Type")."""

    layers: tuple[AttentionLayer, ...]
    op_counts: Mapping[str, int]


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise ModelError for a path that is no regular file, or one that may not be read."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb"):
                return
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file; give the path of a model") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error.strerror}); give an ONNX model") from error
    kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
    raise ModelError(f"{path}: is {kind}; give the path of a model")


def load_onnx(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The file without its external data. Raises ModelError for a file that is no ONNX model."""
    require_file(path)
    try:
        model = onnx.load(os.fspath(path), format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise ModelError(f"{path}: no ONNX model, or a truncated one ({error}); export it again") from error
    if not model.graph.node:
        raise ModelError(f"{path}: the file holds no graph; give an ONNX language model")
    damaged = next((name for name in _names(model.graph) if not isinstance(name, str)), None)
    if damaged is not None:  # protobuf hands out what is no UTF-8 as bytes
        raise ModelError(f"{path}: the name {damaged!r} is no UTF-8, the file is damaged; export it again")
    return model


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for values in (graph.input, graph.output, graph.initializer, graph.value_info):
        yield from (value.name for value in values)


def read_onnx_attention(path: str | os.PathLike[str]) -> OnnxAttention:
    """Read the attention layers of an ONNX file. Raises ModelError for a file that is no ONNX model."""
    model = load_onnx(path)
    _refuse_nested(path, model.graph)
    shapes = _shapes(model.graph)
    nodes = [node for node in model.graph.node if node.op_type == GQA_TYPE]
    counts: dict[str, int] = {}
    for node in model.graph.node:
        kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        counts[kind] = counts.get(kind, 0) + 1
    numbers = layer_numbers([node.output[1] if len(node.output) > 1 else "" for node in nodes])
    layers = tuple(
        _read_layer(index, number, node, shapes)
        for index, (number, node) in enumerate(zip(numbers, nodes, strict=True))
    )
    return OnnxAttention(layers=layers, op_counts=counts)


def _refuse_nested(path: str | os.PathLike[str], graph: onnx.GraphProto) -> None:
    """Attention in the body of a control-flow op, where no list of layers would show it."""
    for node in graph.node:
        for hidden in _inside(node):
            if hidden.op_type == GQA_TYPE:
                raise ModelError(
                    f"{path}: {hidden.output[0]}: this {GQA_TYPE} is inside the body of "
                    f"{node.name or node.output[0]} ({node.op_type}); export it without control flow"
                )


def _inside(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield inner
                yield from _inside(inner)


@dataclass(frozen=True)
class _TensorInfo:
    """Element type name and shape; None for a symbolic dimension."""

    type_name: str
    shape: tuple[int | None, ...]


def _shapes(graph: onnx.GraphProto) -> dict[str, _TensorInfo]:
    infos = {
        tensor.name: _TensorInfo(_type_name(tensor.data_type), tuple(tensor.dims))
        for tensor in graph.initializer
    }
    for value in (*graph.input, *graph.value_info):
        tensor_type = value.type.tensor_type
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor_type.shape.dim)
        infos.setdefault(value.name, _TensorInfo(_type_name(tensor_type.elem_type), dims))
    return infos


def _type_name(number: int) -> str:
    name: str = onnx.TensorProto.DataType.Name(number)
    return "float32" if name == "FLOAT" else name.lower()


def _read_layer(
    index: int, number: int, node: onnx.NodeProto, infos: Mapping[str, _TensorInfo]
) -> AttentionLayer:
    attributes = {attribute.name: attribute for attribute in node.attribute}

    def integer(name: str, default: int) -> int:
        return int(attributes[name].i) if name in attributes else default

    def given(position: int) -> str:
        return node.input[position] if position < len(node.input) else ""

    num_heads, kv_num_heads = integer("num_heads", 0), integer("kv_num_heads", 0)
    sink = Sink.SMOOTH_SOFTMAX if integer("smooth_softmax", 0) == 1 else Sink.NONE
    return AttentionLayer(
        index=index,
        number=number,
        name=node.output[0],
        node_name=node.name or node.output[0],
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=_head_size(node, num_heads, kv_num_heads, infos),
        local_window_size=integer("local_window_size", -1),
        causal=integer("causal", 1) != 0,
        sink=Sink.HEAD_SINK if given(11) else sink,
        rotary=_rotary(infos.get(given(7)), integer("rotary_interleaved", 0))
        if integer("do_rotary", 0)
        else None,
        rolling_cache=integer("sliding_window_cache", 0) != 0,
        kv_cache_type=_kv_cache_type(attributes, infos.get(given(3))),
        softcap=attributes["softcap"].f if "softcap" in attributes else 0.0,
        smooth_softmax=integer("smooth_softmax", 0),
        has_qk_norm=bool(given(14) or given(15)),
        has_past=bool(given(3) and given(4)),
    )


def _rotary(table: _TensorInfo | None, interleaved: int) -> Rotary:
    """Tables are [positions, R] and rotate 2 R channels."""
    rows, half = table.shape if table is not None and len(table.shape) == 2 else (None, None)
    return Rotary(
        interleaved=interleaved != 0,
        rotated_channels=2 * half if half is not None else None,
        table_length=rows,
    )


def _head_size(
    node: onnx.NodeProto, num_heads: int, kv_num_heads: int, infos: Mapping[str, _TensorInfo]
) -> int | None:
    """From the query's last dimension; without a key input it holds query, key and value side by side."""
    query = infos.get(node.input[0])
    heads = num_heads if node.input[1] else num_heads + 2 * kv_num_heads
    if query is None or not query.shape or query.shape[-1] is None or heads < 1:
        return None
    return query.shape[-1] // heads


def _kv_cache_type(attributes: Mapping[str, onnx.AttributeProto], past: _TensorInfo | None) -> str:
    """The element type of the cache, with the scheme where it is quantized, e.g. "int8 per_channel"."""
    type_name = past.type_name if past is not None else "none"
    if "kv_cache_bit_width" in attributes and attributes["kv_cache_bit_width"].i == PACKED_4_BIT:
        type_name += " (4-bit)"
    schemes = [
        attributes[name].s.decode().lower() if name in attributes else "none"
        for name in ("k_quant_type", "v_quant_type")
    ]
    if schemes == ["none", "none"]:
        return type_name
    return f"{type_name} {schemes[0] if schemes[0] == schemes[1] else '/'.join(schemes)}"
