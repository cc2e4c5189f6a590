"""ONNX models of nothing but GroupQueryAttention, built from a hashable description.

Separate query, key and value [1, S, heads * D] are graph inputs, so that a test hands in exactly what the op
attends over. A dimension given as None is dynamic: ONNX Runtime runs such a model at any S and C, while
OpenVINO's lowering needs numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPTIONAL_INPUTS = (
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
)


class Bias(Enum):
    """Heads of an attention_bias input."""

    SHARED = "shared"
    PER_HEAD = "per head"


@dataclass(frozen=True, kw_only=True)
class RotaryTable:
    """cos and sin for `positions` positions, rotating `channels` channels."""

    channels: int = 16
    positions: int = 64
    interleaved: bool = False
    as_inputs: bool = False

    def tables(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(cos, sin), each [positions, channels / 2]. The base is small, so near positions differ much."""
        half = self.channels // 2
        angles = np.arange(self.positions)[:, None] * 70.0 ** (-np.arange(half) / half)
        return np.cos(angles), np.sin(angles)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A KV cache of codes: `bits` 8 (int8) or 4 (two to a uint8), `kind` PER_TENSOR or PER_CHANNEL.

    float8 makes the 8 bits an e4m3 number, which ONNX Runtime's CPU has no kernel for.
    """

    bits: int = 8
    kind: str = "PER_TENSOR"
    float8: bool = False


@dataclass(frozen=True, kw_only=True)
class GQA:
    """One GroupQueryAttention node and the ports around it; defaults are those of the op.

    ONNX Runtime wants D to be a multiple of 16 and the rotated channels too. bias_length is the last
    dimension of attention_bias. symbolic_head_size leaves D open in the cache inputs, as real models do.
    """

    num_heads: int = 4
    kv_num_heads: int = 2
    head_size: int = 16
    sequence_length: int | None = None
    capacity: int | None = None
    batch: int = 1
    float16: bool = False
    local_window_size: int = -1
    causal: bool = True
    scale: float = 0.0
    rotary: RotaryTable | None = None
    position_ids: bool = False
    bias: Bias | None = None
    bias_length: int | None = None
    head_sink: tuple[float, ...] | None = None
    smooth_softmax: bool = False
    sliding_window_cache: bool = False
    softcap: float = 0.0
    quantized: Quantized | None = None
    symbolic_head_size: bool = False

    @property
    def dtype(self) -> type[np.floating]:
        """Of queries, keys and values."""
        return np.float16 if self.float16 else np.float32


@dataclass(frozen=True, kw_only=True)
class TokenCount:
    """An extra graph input `num_tokens`, a scalar that the op does not read; it is also an output."""

    int64: bool = False


def build(gqa: GQA, *, num_tokens: TokenCount | None = None) -> bytes:
    """One node: inputs named as in the op, outputs attention, present_key and present_value."""
    return build_layers([gqa], num_tokens=num_tokens)


def build_layers(layers: Sequence[GQA], *, num_tokens: TokenCount | None = None) -> bytes:
    """Independent nodes side by side, sharing seqlens_k, total_sequence_length and position_ids.

    With more than one, all other ports of node i are prefixed: layers.1.query, layers.1.present_key.
    """
    graph = _Graph(layers)
    for index, layer in enumerate(layers):
        graph.add(layer, f"layers.{index}." if len(layers) > 1 else "")
    if num_tokens is not None:
        kind = TensorProto.INT64 if num_tokens.int64 else TensorProto.INT32
        graph.inputs.append(helper.make_tensor_value_info("num_tokens", kind, []))
        graph.outputs.append(helper.make_tensor_value_info("num_tokens_out", kind, []))
        graph.nodes.append(helper.make_node("Identity", ["num_tokens"], ["num_tokens_out"]))
    return graph.serialized()


class _Graph:
    def __init__(self, layers: Sequence[GQA]) -> None:
        batch, rows = layers[0].batch, layers[0].sequence_length
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._shared = [
            helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [batch]),
            helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []),
        ]
        if any(layer.position_ids for layer in layers):
            self._shared.append(_port("position_ids", TensorProto.INT64, [batch, rows]))

    def add(self, gqa: GQA, prefix: str) -> None:
        kind = TensorProto.FLOAT16 if gqa.float16 else TensorProto.FLOAT
        cache = _cache_kind(gqa, kind)
        rows = [gqa.batch, gqa.sequence_length]
        past = [gqa.batch, gqa.kv_num_heads, gqa.capacity, _cache_head_size(gqa)]
        for name, element, shape in (
            ("query", kind, [*rows, gqa.num_heads * gqa.head_size]),
            ("key", kind, [*rows, gqa.kv_num_heads * gqa.head_size]),
            ("value", kind, [*rows, gqa.kv_num_heads * gqa.head_size]),
            ("past_key", cache, past),
            ("past_value", cache, past),
        ):
            self.inputs.append(_port(prefix + name, element, shape))
        optional = self._optional(gqa, prefix, kind)
        names = [prefix + name for name in ("query", "key", "value", "past_key", "past_value")]
        names += ["seqlens_k", "total_sequence_length"]
        names += [optional.get(name, "") for name in OPTIONAL_INPUTS]
        outputs = [prefix + name for name in ("attention", "present_key", "present_value")]
        node = helper.make_node(
            "GroupQueryAttention", names, outputs, name=f"{prefix}gqa", domain="com.microsoft"
        )
        node.attribute.extend(_attributes(gqa))
        self.nodes.append(node)
        for name, element in zip(outputs, (kind, cache, cache), strict=True):
            self.outputs.append(helper.make_tensor_value_info(name, element, None))

    def _optional(self, gqa: GQA, prefix: str, kind: int) -> dict[str, str]:
        """Name of the value bound to each optional input that is used."""
        bound: dict[str, str] = {}
        if gqa.rotary is not None:
            for name, table in zip(("cos_cache", "sin_cache"), gqa.rotary.tables(), strict=True):
                bound[name] = prefix + name
                if gqa.rotary.as_inputs:
                    self.inputs.append(_port(prefix + name, kind, list(table.shape)))
                else:
                    self._constant(prefix + name, table.astype(gqa.dtype))
        if gqa.position_ids:
            bound["position_ids"] = "position_ids"
        if gqa.bias is not None:
            heads = gqa.num_heads if gqa.bias is Bias.PER_HEAD else 1
            shape = [gqa.batch, heads, gqa.sequence_length, gqa.bias_length]
            bound["attention_bias"] = prefix + "attention_bias"
            self.inputs.append(_port(prefix + "attention_bias", kind, shape))
        if gqa.head_sink is not None:
            bound["head_sink"] = prefix + "head_sink"
            self._constant(prefix + "head_sink", np.array(gqa.head_sink, gqa.dtype))
        if gqa.quantized is not None:
            per_tensor = gqa.quantized.kind == "PER_TENSOR"
            shape = [1] if per_tensor else [1, gqa.kv_num_heads, 1, gqa.head_size]
            for name in ("k_scale", "v_scale"):
                bound[name] = prefix + name
                self.inputs.append(_port(prefix + name, TensorProto.FLOAT, shape))
        return bound

    def _constant(self, name: str, value: NDArray[np.floating]) -> None:
        self.initializers.append(numpy_helper.from_array(value, name))

    def serialized(self) -> bytes:
        inputs = [*self.inputs, *self._shared]
        graph = helper.make_graph(self.nodes, "gqa", inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        return data


def _port(name: str, kind: int, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _cache_kind(gqa: GQA, kind: int) -> int:
    if gqa.quantized is None:
        return kind
    if gqa.quantized.float8:
        return int(TensorProto.FLOAT8E4M3FN)
    return int(TensorProto.INT8 if gqa.quantized.bits == 8 else TensorProto.UINT8)


def _cache_head_size(gqa: GQA) -> int | str:
    if gqa.symbolic_head_size:
        return "kv_cache_dim"
    packed = gqa.quantized is not None and gqa.quantized.bits == 4
    return gqa.head_size // 2 if packed else gqa.head_size


def _attributes(gqa: GQA) -> list[onnx.AttributeProto]:
    """Attributes that differ from the op's defaults; those left out test the defaults."""
    values: dict[str, int | float | str] = {"num_heads": gqa.num_heads, "kv_num_heads": gqa.kv_num_heads}
    if gqa.local_window_size != -1:
        values["local_window_size"] = gqa.local_window_size
    if not gqa.causal:
        values["causal"] = 0
    if gqa.scale != 0.0:
        values["scale"] = gqa.scale
    if gqa.softcap != 0.0:
        values["softcap"] = gqa.softcap
    if gqa.rotary is not None:
        values["do_rotary"] = 1
        values["rotary_interleaved"] = int(gqa.rotary.interleaved)
    if gqa.smooth_softmax:
        values["smooth_softmax"] = 1
    if gqa.sliding_window_cache:
        values["sliding_window_cache"] = 1
    if gqa.quantized is not None:
        values["kv_cache_bit_width"] = gqa.quantized.bits
        values["k_quant_type"] = values["v_quant_type"] = gqa.quantized.kind
    return [helper.make_attribute(name, value) for name, value in values.items()]
