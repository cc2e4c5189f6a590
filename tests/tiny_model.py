"""A language model small enough to run thousands of conversations, as ONNX and as plain loops in float64.

The two share the weights and nothing else: `build` writes GroupQueryAttention nodes in the manner of the
model builder (packed QKV, rotary inside the op, lengths from attention_mask), `NaiveModel` walks over
positions with a list of keys and values per layer, without slots, masks or blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float64]

VOCAB_SIZE = 17
NUM_HEADS = 3
KV_NUM_HEADS = 1
HEAD_SIZE = 16
HIDDEN_SIZE = 20
SCALE = 0.37  # not 1 / sqrt(D)
SINKS = (0.4, -1.3, 1.1)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """windows: local_window_size of each layer, -1 for none. sinks: the layers that have a head_sink."""

    windows: tuple[int, ...]
    sinks: tuple[int, ...] = ()
    max_positions: int = 40
    position_ids: bool = False
    sliding_window_cache: bool = False
    seed: int = 11

    def weights(self) -> Weights:
        """The same on each call."""
        return _weights(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """embedding [V, E]; qkv per layer [E, (H + 2 KV) D]; output per layer [H D, E]; head [E, V]; cos and sin
    [positions, D / 2].
    """

    embedding: NDArray[np.float32]
    qkv: tuple[NDArray[np.float32], ...]
    output: tuple[NDArray[np.float32], ...]
    head: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


@cache
def _weights(model: TinyModel) -> Weights:
    rng = np.random.default_rng(model.seed)

    def matrix(rows: int, columns: int, size: float) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * size / math.sqrt(rows)).astype(np.float32)

    num_layers = len(model.windows)
    packed = (NUM_HEADS + 2 * KV_NUM_HEADS) * HEAD_SIZE
    angles = np.outer(np.arange(model.max_positions), 3.0 ** -np.arange(HEAD_SIZE // 2))
    return Weights(
        embedding=rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32),
        qkv=tuple(matrix(HIDDEN_SIZE, packed, 1.0) for _ in range(num_layers)),
        output=tuple(matrix(NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE, 1.2) for _ in range(num_layers)),
        head=matrix(HIDDEN_SIZE, VOCAB_SIZE, 0.3),
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
    )


def build(model: TinyModel) -> bytes:
    """The ONNX file: input_ids, attention_mask, past_key_values.N.* in; logits, present.N.* out."""
    weights = model.weights()
    tensors = {
        "embedding": weights.embedding,
        "head": weights.head,
        "cos": weights.cos,
        "sin": weights.sin,
        "sinks": np.array(SINKS, np.float32),
        "one": np.array([1], np.int64),
        "axis": np.array(1, np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["hidden.0"]),
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["num_tokens"], keepdims=0),
        helper.make_node("Sub", ["num_tokens", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Gather", ["mask_shape", "axis"], ["mask_length"]),
        helper.make_node("Cast", ["mask_length"], ["total"], to=TensorProto.INT32),
    ]
    for layer in range(len(model.windows)):
        tensors |= {f"qkv.{layer}": weights.qkv[layer], f"output.{layer}": weights.output[layer]}
        nodes += _layer_nodes(model, layer)
    nodes.append(helper.make_node("MatMul", [f"hidden.{len(model.windows)}", "head"], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "tiny",
        _inputs(model),
        _outputs(model),
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    serialized: bytes = proto.SerializeToString()
    return serialized


def _layer_nodes(model: TinyModel, layer: int) -> list[onnx.NodeProto]:
    inputs = [f"packed.{layer}", "", "", f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
    inputs += ["seqlens_k", "total", "cos", "sin", "position_ids" if model.position_ids else ""]
    inputs += ["", "sinks" if layer in model.sinks else ""]
    attention = helper.make_node(
        "GroupQueryAttention",
        inputs,
        [f"attention.{layer}", f"present.{layer}.key", f"present.{layer}.value"],
        domain="com.microsoft",
        num_heads=NUM_HEADS,
        kv_num_heads=KV_NUM_HEADS,
        scale=SCALE,
        do_rotary=1,
        local_window_size=model.windows[layer],
        **({"sliding_window_cache": 1} if model.sliding_window_cache and model.windows[layer] > 0 else {}),
    )
    return [
        helper.make_node("MatMul", [f"hidden.{layer}", f"qkv.{layer}"], [f"packed.{layer}"]),
        attention,
        helper.make_node("MatMul", [f"attention.{layer}", f"output.{layer}"], [f"mixed.{layer}"]),
        helper.make_node("Add", [f"hidden.{layer}", f"mixed.{layer}"], [f"hidden.{layer + 1}"]),
    ]


def _inputs(model: TinyModel) -> list[onnx.ValueInfoProto]:
    names = ["input_ids", "attention_mask"] + (["position_ids"] if model.position_ids else [])
    lengths = {"attention_mask": "total"}
    tokens = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", lengths.get(name, "sequence")])
        for name in names
    ]
    return tokens + _cache_ports(model, "past_key_values", "past")


def _outputs(model: TinyModel) -> list[onnx.ValueInfoProto]:
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCAB_SIZE])
    return [logits, *_cache_ports(model, "present", "present")]


def _cache_ports(model: TinyModel, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(
            f"{prefix}.{layer}.{kind}",
            TensorProto.FLOAT,
            ["batch", KV_NUM_HEADS, f"{length}_{layer}", HEAD_SIZE],
        )
        for layer in range(len(model.windows))
        for kind in ("key", "value")
    ]


@dataclass(frozen=True, eq=False)
class _Prefix:
    """What the model knows after some tokens: per layer the rows (key, value) of every position."""

    rows: tuple[tuple[tuple[Floats, Floats], ...], ...]
    logits: Floats


@dataclass(eq=False)
class NaiveModel:
    """The model's answers by definition; each prefix ever asked for is remembered.

    windows may be given to ask what another window would have answered.
    """

    model: TinyModel
    windows: tuple[int, ...] = ()
    _known: dict[tuple[int, ...], _Prefix] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.windows = self.windows or self.model.windows
        weights = self.model.weights()
        self._embedding, self._head = weights.embedding.astype(float), weights.head.astype(float)
        self._qkv = [matrix.astype(float) for matrix in weights.qkv]
        self._output = [matrix.astype(float) for matrix in weights.output]
        self._cos, self._sin = weights.cos.astype(float), weights.sin.astype(float)

    def logits(self, tokens: tuple[int, ...], count: int) -> Floats:
        """Logits [count, V] of the last `count` of these tokens in a run of nothing else."""
        first = len(tokens) - count + 1
        return np.stack([self._prefix(tokens[:end]).logits for end in range(first, len(tokens) + 1)])

    def _prefix(self, tokens: tuple[int, ...]) -> _Prefix:
        known = self._known.get(tokens)
        if known is None:
            before = self._prefix(tokens[:-1]).rows if len(tokens) > 1 else ((),) * len(self.windows)
            known = self._known[tokens] = self._extend(before, tokens[-1], len(tokens) - 1)
        return known

    def _extend(
        self, before: tuple[tuple[tuple[Floats, Floats], ...], ...], token: int, position: int
    ) -> _Prefix:
        hidden = self._embedding[token]
        rows = []
        for layer, past in enumerate(before):
            packed = (hidden @ self._qkv[layer]).reshape(NUM_HEADS + 2 * KV_NUM_HEADS, HEAD_SIZE)
            key = self._turn(packed[NUM_HEADS : NUM_HEADS + KV_NUM_HEADS], position)
            rows.append((*past, (key, packed[NUM_HEADS + KV_NUM_HEADS :])))
            attention = self._attend(layer, self._turn(packed[:NUM_HEADS], position), rows[layer], position)
            hidden = hidden + attention @ self._output[layer]
        return _Prefix(tuple(rows), hidden @ self._head)

    def _turn(self, heads: Floats, position: int) -> Floats:
        half = HEAD_SIZE // 2
        phase = self._cos[position] + 1j * self._sin[position]
        turned = (heads[:, :half] + 1j * heads[:, half:]) * phase
        return np.concatenate([turned.real, turned.imag], axis=1)

    def _attend(
        self, layer: int, query: Floats, rows: tuple[tuple[Floats, Floats], ...], position: int
    ) -> Floats:
        """One query [H, D] over the rows of positions 0..position: [H D]."""
        window = self.windows[layer]
        oldest = 0 if window < 0 else max(0, position + 1 - window)
        result = []
        for head in range(NUM_HEADS):
            source = head * KV_NUM_HEADS // NUM_HEADS
            weights = [math.exp(SCALE * float(query[head] @ key[source])) for key, _ in rows[oldest:]]
            total = sum(weights) + (math.exp(SINKS[head]) if layer in self.model.sinks else 0.0)
            shares = [weight / total for weight in weights]
            result.append(
                sum(share * value[source] for share, (_, value) in zip(shares, rows[oldest:], strict=True))
            )
        return np.concatenate(result)
