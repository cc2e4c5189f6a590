"""ONNX models of any size with random weights, in the manner of onnxruntime-genai's model builder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from npusim.errors import ConfigError
from npusim.memory import physical_memory

MICROSOFT = "com.microsoft"
_IR_VERSION, _OPSET = 9, 17
_ROTARY_BASE = 10000.0
_FLOAT_BYTES = 4
MOST_LAYERS = 1000
MOST_POSITIONS = 2**31 - 1
"""Of an int32, in which the op counts."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """num_heads query heads over kv_num_heads of head_size; a window of -1 is none."""

    num_heads: int = 8
    kv_num_heads: int = 2
    head_size: int = 64
    local_window_size: int = -1
    sliding_window_cache: bool = False

    def __post_init__(self) -> None:
        if min(self.num_heads, self.kv_num_heads) < 1 or self.num_heads % self.kv_num_heads:
            raise ConfigError(
                f"{self.num_heads} query heads, {self.kv_num_heads} key-value heads; both are at least 1 and "
                "the first is a multiple of the second"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ConfigError(f"head size {self.head_size}; rotary needs an even one of at least 2")
        if self.local_window_size == 0 or not -1 <= self.local_window_size <= MOST_POSITIONS:
            raise ConfigError(
                f"window {self.local_window_size}; give 1 to {MOST_POSITIONS:,}, or -1 for none"
            )

    @property
    def query_size(self) -> int:
        """H D."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """KV D."""
        return self.kv_num_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A language model of equal layers with a gated MLP."""

    attention: AttentionShape = AttentionShape()
    hidden_size: int = 512
    num_layers: int = 8
    intermediate_size: int = 1536
    vocab_size: int = 4096
    max_positions: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "intermediate_size", "vocab_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"{self.num_layers:,} layers; at most {MOST_LAYERS:,} are made")

    @property
    def nbytes(self) -> int:
        """Of the weights and rotary tables."""
        attention, hidden = self.attention, self.hidden_size
        per_layer = (
            2 * hidden * (attention.query_size + attention.kv_size) + 3 * hidden * self.intermediate_size
        )
        tables = self.max_positions * attention.head_size
        return _FLOAT_BYTES * (self.num_layers * per_layer + 2 * self.vocab_size * hidden + tables)


def build_model(shape: ModelShape) -> onnx.ModelProto:
    """Logits for every row, packed QKV, rotary inside the op, lengths from attention_mask [1, T].

    Raises ConfigError for a shape that takes more than half of the machine's memory.
    """
    memory = physical_memory()
    if memory is not None and shape.nbytes > memory // 2:  # a runtime makes copies of its own
        raise ConfigError(
            f"a model of {shape.nbytes / 2**30:,.1f} GiB; this machine has room for one of "
            f"{memory / 2**31:,.1f} GiB: give smaller sizes"
        )
    graph = _Graph(shape.seed)
    graph.input("input_ids", TensorProto.INT64, [1, "sequence_length"])
    graph.input("attention_mask", TensorProto.INT64, [1, "total_sequence_length"])
    _sequence_lengths(graph)
    _rotary_tables(graph, shape)
    hidden = shape.hidden_size
    embedding = graph.weight("embedding", (shape.vocab_size, hidden), scale=1.0)
    state = graph.node("Gather", [embedding, "input_ids"])
    logits_shape: list[int | str] = [1, "sequence_length", shape.vocab_size]
    graph.output("logits", TensorProto.FLOAT, logits_shape)
    for index in range(shape.num_layers):
        state = _layer(graph, shape, index, state)
    head = graph.weight("lm_head", (hidden, shape.vocab_size))
    graph.node("MatMul", [_norm(graph, state, hidden), head], ["logits"])
    return graph.build("synthetic")


def build_attention_chain(
    shape: AttentionShape, *, num_layers: int, sequence_length: int, capacity: int
) -> onnx.ModelProto:
    """Attention alone: each layer's result is the next one's query; static shapes, no rotary.

    Inputs query [1, S, H D], key and value [1, S, KV D] (the same for all layers), past_key.i and
    past_value.i [1, KV, C, D], seqlens_k [1], total_sequence_length []; outputs attention and present_*.
    """
    graph = _Graph(0)
    graph.input("query", TensorProto.FLOAT, [1, sequence_length, shape.query_size])
    graph.input("key", TensorProto.FLOAT, [1, sequence_length, shape.kv_size])
    graph.input("value", TensorProto.FLOAT, [1, sequence_length, shape.kv_size])
    graph.input("seqlens_k", TensorProto.INT32, [1])
    graph.input("total_sequence_length", TensorProto.INT32, [])
    graph.output("attention", TensorProto.FLOAT, [1, sequence_length, shape.query_size])
    cache: list[int | str] = [1, shape.kv_num_heads, capacity, shape.head_size]
    # What the op hands back is named by the op's own rules, so its length stays open.
    present: list[int | str] = [1, shape.kv_num_heads, "present_length", shape.head_size]
    query = "query"
    for index in range(num_layers):
        for kind in ("key", "value"):
            graph.input(f"past_{kind}.{index}", TensorProto.FLOAT, cache)
            graph.output(f"present_{kind}.{index}", TensorProto.FLOAT, present)
        names = [f"past_key.{index}", f"past_value.{index}", "seqlens_k", "total_sequence_length"]
        result = "attention" if index == num_layers - 1 else f"attention.{index}"
        graph.node(
            "GroupQueryAttention",
            [query, "key", "value", *names],
            [result, f"present_key.{index}", f"present_value.{index}"],
            domain=MICROSOFT,
            **_attributes(shape),
        )
        query = result
    return graph.build("attention_chain")


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model with its weights in a file beside it, as exporters of large models do."""
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)


def _layer(graph: _Graph, shape: ModelShape, index: int, state: str) -> str:
    """Attention and MLP with their residuals: [1, S, E] -> [1, S, E]."""
    hidden, attention = shape.hidden_size, shape.attention
    packed = attention.query_size + 2 * attention.kv_size
    qkv = graph.weight(f"qkv.{index}", (hidden, packed))
    rows = graph.node("MatMul", [_norm(graph, state, hidden), qkv])
    attended = _attention(graph, attention, index, rows)
    projection = graph.weight(f"projection.{index}", (attention.query_size, hidden))
    state = graph.node("Add", [state, graph.node("MatMul", [attended, projection])])
    normed, wide = _norm(graph, state, hidden), shape.intermediate_size
    gate = graph.node("MatMul", [normed, graph.weight(f"gate.{index}", (hidden, wide))])
    up = graph.node("MatMul", [normed, graph.weight(f"up.{index}", (hidden, wide))])
    silu = graph.node("Mul", [gate, graph.node("Sigmoid", [gate])])
    down = graph.weight(f"down.{index}", (wide, hidden))
    result = graph.node("MatMul", [graph.node("Mul", [silu, up]), down])
    return graph.node("Add", [state, result])


def _attention(graph: _Graph, shape: AttentionShape, index: int, rows: str) -> str:
    past: list[int | str] = [1, shape.kv_num_heads, "past_sequence_length", shape.head_size]
    present: list[int | str] = [1, shape.kv_num_heads, "present_length", shape.head_size]
    names = {kind: f"past_key_values.{index}.{kind}" for kind in ("key", "value")}
    outputs = [f"present.{index}.{kind}" for kind in names]
    for name, output in zip(names.values(), outputs, strict=True):
        graph.input(name, TensorProto.FLOAT, past)
        graph.output(output, TensorProto.FLOAT, present)
    return graph.node(
        "GroupQueryAttention",
        [rows, "", "", *names.values(), "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"],
        [f"attention.{index}", *outputs],
        domain=MICROSOFT,
        do_rotary=1,
        rotary_interleaved=0,
        **_attributes(shape),
    )


def _attributes(shape: AttentionShape) -> dict[str, int | float]:
    attributes: dict[str, int | float] = {
        "num_heads": shape.num_heads,
        "kv_num_heads": shape.kv_num_heads,
        "scale": 1 / math.sqrt(shape.head_size),
        "local_window_size": shape.local_window_size,
    }
    if shape.sliding_window_cache:
        attributes["sliding_window_cache"] = 1
    return attributes


def _norm(graph: _Graph, state: str, hidden: int) -> str:
    ones = graph.constant(np.ones(hidden, np.float32))
    return graph.node("SimplifiedLayerNormalization", [state, ones], axis=-1, epsilon=1e-5, stash_type=1)


def _sequence_lengths(graph: _Graph) -> None:
    """seqlens_k [1] and total_sequence_length [] from attention_mask."""
    one = graph.constant(np.array([1], np.int64))
    total = graph.node("ReduceSum", ["attention_mask", one], keepdims=0)
    graph.node("Cast", [graph.node("Sub", [total, one])], ["seqlens_k"], to=TensorProto.INT32)
    index = graph.constant(np.array(1, np.int64))
    length = graph.node("Gather", [graph.node("Shape", ["attention_mask"]), index])
    graph.node("Cast", [length], ["total_sequence_length"], to=TensorProto.INT32)


def _rotary_tables(graph: _Graph, shape: ModelShape) -> None:
    half = shape.attention.head_size // 2
    frequency = _ROTARY_BASE ** (-np.arange(half) / half)
    angle = np.arange(shape.max_positions)[:, None] * frequency
    graph.constant(np.cos(angle).astype(np.float32), "cos_cache")
    graph.constant(np.sin(angle).astype(np.float32), "sin_cache")


class _Graph:
    """Collects nodes, ports and weights; names what is not named."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, array: NDArray[np.generic], name: str = "") -> str:
        name = name or f"constant.{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, shape: tuple[int, int], scale: float | None = None) -> str:
        """Normal numbers, scaled so that a product keeps the size of its input."""
        values = self._rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(shape[0] ** -0.5 if scale is None else scale)
        return self.constant(values, name)

    def node(
        self,
        operator: str,
        inputs: list[str],
        outputs: list[str] | None = None,
        *,
        domain: str = "",
        **attributes: int | float,
    ) -> str:
        """Append a node; the name of its first output."""
        outputs = outputs or [f"{operator}.{len(self._nodes)}"]
        node = helper.make_node(operator, inputs, outputs, domain=domain)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self._nodes.append(node)
        return outputs[0]

    def build(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._weights)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
