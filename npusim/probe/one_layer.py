"""A language model of a single attention layer, as onnxruntime-genai's builder would write it."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from npusim.onnx_attention import GQA_TYPE, Sink
from npusim.probe.layer_kind import LayerKind

VOCAB_SIZE = 64
HIDDEN = 64
POSITIONS = 256
ROTARY_BASE = 1000.0
SINK_LOGIT = 3.0
"""Large enough that a sink changes every row, and no 0: that would be smooth_softmax."""


def one_layer_model(kind: LayerKind) -> onnx.ModelProto:
    """Embedding, one attention layer, logits; inputs and outputs as the builder names them."""
    return _Builder(kind).build()


def without_window(kind: LayerKind) -> LayerKind:
    """The kind that is left when the window is ignored."""
    return replace(kind, local_window_size=-1, rolling_cache=False)


def without_sink(kind: LayerKind) -> LayerKind:
    """The kind that is left when the sink is ignored."""
    return replace(kind, sink=Sink.NONE)


class _Builder:
    """Collects the parts of one graph; weights depend on the sizes alone, not on window and sink."""

    def __init__(self, kind: LayerKind) -> None:
        self._kind = kind
        self._rng = np.random.default_rng(0)
        is_half = kind.cache_type == "float16"
        self._dtype = np.float16 if is_half else np.float32
        self._element = TensorProto.FLOAT16 if is_half else TensorProto.FLOAT
        self._initializers: list[onnx.TensorProto] = []
        self._nodes: list[onnx.NodeProto] = []

    def build(self) -> onnx.ModelProto:
        kind = self._kind
        self._lengths()
        embedding = self._weight("embedding", VOCAB_SIZE, HIDDEN)
        self._node("Gather", [embedding, "input_ids"], "hidden")
        widths = {"query": kind.num_heads, "key": kind.kv_num_heads, "value": kind.kv_num_heads}
        for name, heads in widths.items():
            weight = self._weight(f"{name}.weight", HIDDEN, heads * kind.head_size)
            self._node("MatMul", ["hidden", weight], name)
        self._attention()
        back = self._weight("output.weight", kind.num_heads * kind.head_size, HIDDEN)
        self._node("MatMul", ["attention", back], "projected")
        self._node("MatMul", ["projected", self._weight("head", HIDDEN, VOCAB_SIZE)], "logits")
        graph = helper.make_graph(
            self._nodes, "one_layer", self._inputs(), self._outputs(), self._initializers
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def _lengths(self) -> None:
        """seqlens_k, the sum of attention_mask less 1, and total_sequence_length, its length."""
        one = self._constant("one", np.array([1], np.int64))
        self._node("ReduceSum", ["attention_mask", one], "sum", keepdims=0)
        self._node("Sub", ["sum", one], "last")
        self._node("Cast", ["last"], "seqlens_k", to=TensorProto.INT32)
        self._node("Shape", ["attention_mask"], "mask_shape")
        self._node("Gather", ["mask_shape", self._constant("axis", np.array(1, np.int64))], "length")
        self._node("Cast", ["length"], "total_sequence_length", to=TensorProto.INT32)

    def _attention(self) -> None:
        kind = self._kind
        inputs = ["query", "key", "value", "past_key_values.0.key", "past_key_values.0.value"]
        inputs += ["seqlens_k", "total_sequence_length", *self._rotary_tables()]
        if kind.sink is Sink.HEAD_SINK:
            logits = np.full(kind.num_heads, SINK_LOGIT, self._dtype)
            inputs += ["", "", self._constant("sink", logits)]
        attributes = {
            "num_heads": kind.num_heads,
            "kv_num_heads": kind.kv_num_heads,
            "local_window_size": kind.local_window_size,
            "do_rotary": int(kind.rotated_channels is not None),
            "rotary_interleaved": int(kind.interleaved),
            "smooth_softmax": int(kind.sink is Sink.SMOOTH_SOFTMAX),
            "sliding_window_cache": int(kind.rolling_cache),
        }
        given = {name: value for name, value in attributes.items() if value or name == "do_rotary"}
        outputs = ["attention", "present.0.key", "present.0.value"]
        node = helper.make_node(GQA_TYPE, inputs, outputs, name="attention", domain="com.microsoft")
        node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())
        self._nodes.append(node)

    def _rotary_tables(self) -> list[str]:
        if self._kind.rotated_channels is None:
            return ["", ""]
        half = self._kind.rotated_channels // 2
        angles = np.outer(np.arange(POSITIONS), ROTARY_BASE ** (-np.arange(half) / half))
        return [
            self._constant("cos_cache", np.cos(angles).astype(self._dtype)),
            self._constant("sin_cache", np.sin(angles).astype(self._dtype)),
        ]

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
            *self._caches("past_key_values", "past"),
        ]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        shape: list[str | int | None] = ["batch", "sequence", VOCAB_SIZE]
        logits = helper.make_tensor_value_info("logits", self._element, shape)
        return [logits, *self._caches("present", "total")]

    def _caches(self, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        shape: list[str | int | None] = ["batch", self._kind.kv_num_heads, length, self._kind.head_size]
        return [
            helper.make_tensor_value_info(f"{prefix}.0.{part}", self._element, shape)
            for part in ("key", "value")
        ]

    def _weight(self, name: str, rows: int, columns: int) -> str:
        values = self._rng.normal(size=(rows, columns)) * rows**-0.5
        return self._constant(name, values.astype(self._dtype))

    def _constant(self, name: str, values: npt.NDArray[np.generic]) -> str:
        self._initializers.append(numpy_helper.from_array(values, name))
        return name

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: int) -> None:
        node = helper.make_node(kind, inputs, [output], name=output)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self._nodes.append(node)
