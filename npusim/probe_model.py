"""A language model of one attention layer, as an ONNX file and as arithmetic: for asking what a runtime does.

Embedding, packed projection, GroupQueryAttention, projection to a small vocabulary; weights are random.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from npusim.onnx_attention import Sink
from npusim.reference.attention import attend
from npusim.reference.options import Array, AttentionOptions, Rotary

VOCAB_SIZE = 29
HIDDEN = 24


@dataclass(frozen=True, kw_only=True)
class ProbeLayer:
    """What the layer is. positions: rows of its rotary tables, 0 for no rotary inside the op."""

    num_heads: int
    kv_num_heads: int
    head_size: int
    local_window_size: int = -1
    sink: Sink = Sink.NONE
    rolling_cache: bool = False
    float16: bool = False
    positions: int = 64
    interleaved: bool = False

    @property
    def options(self) -> AttentionOptions:
        """The layer as the reference attention takes it."""
        rotary = None
        if self.positions:
            cos, sin = self.tables
            rotary = Rotary(cos=cos, sin=sin, interleaved=self.interleaved)
        return AttentionOptions(
            local_window_size=self.local_window_size,
            head_sink=self.head_sink if self.sink is Sink.HEAD_SINK else None,
            smooth_softmax=self.sink is Sink.SMOOTH_SOFTMAX,
            rotary=rotary,
        )

    @property
    def tables(self) -> tuple[Array, Array]:
        """cos and sin, [positions, head_size / 2]."""
        half = self.head_size // 2
        angles = np.outer(np.arange(self.positions), 100.0 ** (-np.arange(half) / half))
        return np.cos(angles), np.sin(angles)

    @property
    def head_sink(self) -> Array:
        """A logit per head, [H]: large enough for its loss to be seen."""
        return np.linspace(1.0, 3.0, self.num_heads)

    @cached_property
    def weights(self) -> dict[str, Array]:
        """embedding, qkv, head."""
        rng = np.random.default_rng(7)
        width = (self.num_heads + 2 * self.kv_num_heads) * self.head_size
        shapes = {
            "embedding": (VOCAB_SIZE, HIDDEN),
            "qkv": (HIDDEN, width),
            "head": (self.num_heads * self.head_size, VOCAB_SIZE),
        }
        return {
            name: rng.normal(size=shape) * (1.0 if name == "embedding" else shape[0] ** -0.5)
            for name, shape in shapes.items()
        }


def reference_logits(layer: ProbeLayer, tokens: list[int]) -> Array:
    """Logits [n, vocabulary] of a whole sequence, in float64."""
    weights = layer.weights
    rows = weights["embedding"][tokens] @ weights["qkv"]  # [n, (H + 2 KV) D]
    heads = rows.reshape(len(tokens), -1, layer.head_size).transpose(1, 0, 2)[None]  # [1, H + 2 KV, n, D]
    first, second = layer.num_heads, layer.num_heads + layer.kv_num_heads
    query, key, value = heads[:, :first], heads[:, first:second], heads[:, second:]
    logits: Array = attend(query, key, value, layer.options)[0] @ weights["head"]
    return logits


def build_onnx(layer: ProbeLayer) -> bytes:
    """The ONNX file, with the inputs and outputs that onnxruntime-genai's model builder gives a model."""
    dtype, onnx_type = (np.float16, TensorProto.FLOAT16) if layer.float16 else (np.float32, TensorProto.FLOAT)
    constants: dict[str, npt.NDArray[np.generic]] = {
        name: value.astype(dtype) for name, value in layer.weights.items()
    }
    constants["one"] = np.array([1], np.int64)
    caches, presents = (
        [f"{prefix}.0.{part}" for part in ("key", "value")] for prefix in ("past_key_values", "present")
    )
    inputs = ["rows", "", "", *caches, "seqlens_k", "total"]
    if layer.positions:
        constants["cos"], constants["sin"] = (table.astype(dtype) for table in layer.tables)
        inputs += ["cos", "sin"]
    if layer.sink is Sink.HEAD_SINK:
        constants["sink"] = layer.head_sink.astype(dtype)
        inputs += [""] * (11 - len(inputs)) + ["sink"]
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "qkv"], ["rows"]),
        *_length_nodes(),
        _attention_node(layer, inputs, ["attended", *presents]),
        helper.make_node("MatMul", ["attended", "head"], ["logits"]),
    ]
    shape: list[str | int | None] = ["batch", layer.kv_num_heads, "length", layer.head_size]
    token_inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length])
        for name, length in (("input_ids", "rows"), ("attention_mask", "total"))
    ]
    logits = helper.make_tensor_value_info("logits", onnx_type, ["batch", "rows", VOCAB_SIZE])
    graph = helper.make_graph(
        nodes,
        "probe",
        [*token_inputs, *(helper.make_tensor_value_info(name, onnx_type, shape) for name in caches)],
        [logits, *(helper.make_tensor_value_info(name, onnx_type, shape) for name in presents)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    serialized: bytes = model.SerializeToString()
    return serialized


def _length_nodes() -> list[onnx.NodeProto]:
    """seqlens_k [1] = tokens - 1 and total [] = tokens, from attention_mask."""
    return [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["sum"], keepdims=0),
        helper.make_node("Sub", ["sum", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"]),
        helper.make_node("Squeeze", ["length"], ["scalar"]),
        helper.make_node("Cast", ["scalar"], ["total"], to=TensorProto.INT32),
    ]


def _attention_node(layer: ProbeLayer, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
    return helper.make_node(
        "GroupQueryAttention",
        inputs,
        outputs,
        domain="com.microsoft",
        num_heads=layer.num_heads,
        kv_num_heads=layer.kv_num_heads,
        do_rotary=int(layer.positions > 0),
        rotary_interleaved=int(layer.interleaved),
        local_window_size=layer.local_window_size,
        smooth_softmax=int(layer.sink is Sink.SMOOTH_SOFTMAX),
        sliding_window_cache=int(layer.rolling_cache),
    )
