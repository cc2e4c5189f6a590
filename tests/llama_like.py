"""Small llama-like ONNX models, in the form in which onnxruntime-genai's builder writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

POSITIONS = 512


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """What a model is made of; windows gives the layers, rotary_half is R (default: half the head)."""

    windows: tuple[int, ...] = (-1, -1)
    num_heads: int = 4
    kv_num_heads: int = 2
    head_size: int = 16
    rotary: bool = True
    rotary_half: int | None = None
    interleaved: bool = False
    packed: bool = True
    sinks: bool = False
    smooth_softmax: bool = False
    vocab_size: int = 61
    hidden: int = 48
    seed: int = 5

    @cached_property
    def serialized(self) -> bytes:
        """The ONNX file."""
        return _Builder(self).build().SerializeToString()


class _Builder:
    def __init__(self, spec: LlamaLike) -> None:
        self._spec = spec
        self._rng = np.random.default_rng(spec.seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def build(self) -> onnx.ModelProto:
        spec = self._spec
        self._shared_inputs()
        hidden = self._node("Gather", [self._weight("embedding", spec.vocab_size, spec.hidden), "input_ids"])
        for layer in range(len(spec.windows)):
            hidden = self._layer(layer, hidden)
        self._node(
            "MatMul",
            [self._norm("final", hidden), self._weight("head", spec.hidden, spec.vocab_size)],
            "logits",
        )
        graph = helper.make_graph(
            self._nodes, "tiny", self._ports("past_key_values", "p"), self._outputs(), self._initializers
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 9
        return model

    def _ports(self, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        tokens = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["b", "t"]),
        ]
        return tokens + self._caches(prefix, length)

    def _caches(self, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        spec = self._spec
        shape = ["b", spec.kv_num_heads, length, spec.head_size]
        return [
            helper.make_tensor_value_info(f"{prefix}.{layer}.{part}", TensorProto.FLOAT, shape)
            for layer in range(len(spec.windows))
            for part in ("key", "value")
        ]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", self._spec.vocab_size])
        return [logits, *self._caches("present", "t")]

    def _shared_inputs(self) -> None:
        spec = self._spec
        half = spec.rotary_half or spec.head_size // 2
        angles = np.outer(np.arange(POSITIONS), 1000.0 ** (-np.arange(half) / half))
        self._constant("cos_cache", np.cos(angles).astype(np.float32))
        self._constant("sin_cache", np.sin(angles).astype(np.float32))
        one = self._constant("one", np.array([1], np.int64))
        summed = self._node("ReduceSum", ["attention_mask", one], keepdims=0)
        self._node("Cast", [self._node("Sub", [summed, one])], "seqlens_k", to=TensorProto.INT32)
        length = self._node("Gather", [self._node("Shape", ["attention_mask"]), self._constant("axis", 1)])
        self._node("Cast", [length], "total_sequence_length", to=TensorProto.INT32)

    def _layer(self, layer: int, hidden: str) -> str:
        name = f"layer{layer}"
        attended = self._attention(layer, self._norm(f"{name}.before", hidden))
        spec = self._spec
        rows = spec.num_heads * spec.head_size
        projected = self._node("MatMul", [attended, self._weight(f"{name}.o", rows, spec.hidden)])
        hidden = self._node("Add", [hidden, projected])
        normed = self._norm(f"{name}.after", hidden)
        up = self._node("MatMul", [normed, self._weight(f"{name}.up", spec.hidden, 2 * spec.hidden)])
        active = self._node("Mul", [up, self._node("Sigmoid", [up])])
        down = self._node("MatMul", [active, self._weight(f"{name}.down", 2 * spec.hidden, spec.hidden)])
        return self._node("Add", [hidden, down])

    def _attention(self, layer: int, hidden: str) -> str:
        spec, name = self._spec, f"layer{layer}"
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        inputs = [*self._projections(name, hidden), *past, "seqlens_k", "total_sequence_length"]
        inputs += ["cos_cache", "sin_cache"] if spec.rotary else ["", ""]
        if spec.sinks:
            sink = self._rng.normal(size=spec.num_heads).astype(np.float32)
            inputs += ["", "", self._constant(f"{name}.sink", sink)]
        output = f"{name}.attention"
        node = helper.make_node(
            "GroupQueryAttention",
            inputs,
            [output, *(f"present.{layer}.{part}" for part in ("key", "value"))],
            name=output,
            domain="com.microsoft",
            num_heads=spec.num_heads,
            kv_num_heads=spec.kv_num_heads,
            do_rotary=int(spec.rotary),
            rotary_interleaved=int(spec.interleaved),
            smooth_softmax=int(spec.smooth_softmax),
            scale=0.9 * spec.head_size**-0.5,
            local_window_size=spec.windows[layer],
        )
        self._nodes.append(node)
        return output

    def _projections(self, name: str, hidden: str) -> list[str]:
        spec = self._spec
        heads = {"q": spec.num_heads, "k": spec.kv_num_heads, "v": spec.kv_num_heads}
        widths = {part: count * spec.head_size for part, count in heads.items()}
        if spec.packed:
            weight = self._weight(f"{name}.qkv", spec.hidden, sum(widths.values()))
            return [self._node("MatMul", [hidden, weight]), "", ""]
        return [
            self._node("MatMul", [hidden, self._weight(f"{name}.{part}", spec.hidden, width)])
            for part, width in widths.items()
        ]

    def _norm(self, name: str, source: str) -> str:
        weight = self._constant(f"{name}.norm", np.ones(self._spec.hidden, np.float32))
        return self._node("SimplifiedLayerNormalization", [source, weight], axis=-1, epsilon=1e-6)

    def _weight(self, name: str, rows: int, columns: int) -> str:
        values = self._rng.normal(size=(rows, columns)) * rows**-0.5
        return self._constant(name, values.astype(np.float32))

    def _constant(self, name: str, values: NDArray[np.generic] | int) -> str:
        self._initializers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def _node(
        self, kind: str, inputs: list[str], output: str | None = None, **attributes: int | float
    ) -> str:
        name = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name
