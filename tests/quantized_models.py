"""Models with quantized caches: float language models given codes and scales, ONNX Runtime running them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
from gqa_models import Quantized
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from ort_runner import session


@dataclass(frozen=True, kw_only=True)
class CodeRange:
    """What a code may be, by its form."""

    least: int
    most: int


E4M3_LARGEST = 448.0
RANGES = {8: CodeRange(least=-128, most=127), 4: CodeRange(least=-8, most=7)}


def codes_of(stored: NDArray[np.generic], bits: int) -> NDArray[np.int32]:
    """The codes [.., D] of a cache as it is stored: int8, or bytes of two with the even channel low."""
    if bits == 8:
        return stored.astype(np.int32)
    low, high = stored.astype(np.int32) & 15, stored.astype(np.int32) >> 4
    return np.stack([low - 8, high - 8], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])


def quantized(
    path: Path, form: Quantized, *, head_size: int = 16, layers: Collection[int] | None = None
) -> onnx.ModelProto:
    """The model with codes in the caches of `layers` (None: all).

    The scales fit the rows of a short prompt, but for a factor of about 0.9, so that some codes are clamped.
    """
    model = onnx.load(path)
    floats = OrtSteps(model, head_size=head_size)
    floats.feed(range(40, 70), 0)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    for index, node in enumerate(nodes):
        if layers is None or index in layers:
            _quantize(model.graph, node, form, floats.past, np.random.default_rng([17, index]))
    return model


def _quantize(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    form: Quantized,
    rows: dict[str, NDArray[np.generic]],
    rng: np.random.Generator,
) -> None:
    node.input.extend([""] * (12 - len(node.input)))
    for letter, past in (("k", node.input[3]), ("v", node.input[4])):
        axes = None if form.kind == "PER_TENSOR" else (0, 2)
        largest = np.abs(rows[past]).max(axis=axes, keepdims=True)
        if form.kind == "PER_TENSOR":
            largest = largest.reshape(1)
        most = E4M3_LARGEST if form.float8 else RANGES[form.bits].most
        scale = largest / most * rng.uniform(0.8, 1.0, largest.shape)
        name = f"{past}.{letter}_scale"
        graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), name))
        node.input.append(name)
        node.attribute.append(helper.make_attribute(f"{letter}_quant_type", form.kind))
    node.attribute.append(helper.make_attribute("kv_cache_bit_width", form.bits))
    kind = TensorProto.INT8 if form.bits == 8 else TensorProto.UINT8
    if form.float8:
        kind = TensorProto.FLOAT8E4M3FN
    caches = {node.input[3], node.input[4], node.output[1], node.output[2]}
    for port in (*graph.input, *graph.output):
        if port.name in caches:
            port.type.tensor_type.elem_type = kind


def without_window_sized_caches(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose caches grow: the same numbers, and no eviction that a rewind could meet."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        for attribute in [each for each in node.attribute if each.name == "sliding_window_cache"]:
            node.attribute.remove(attribute)
    return copy


def read(model: onnx.ModelProto) -> ov.Model:
    """As OpenVINO's frontend reads it."""
    return ov.Core().read_model(model.SerializeToString())


class OrtSteps:
    """ONNX Runtime over growing caches: any chunks, exact rewinds."""

    def __init__(self, model: onnx.ModelProto, *, head_size: int = 16) -> None:
        self._session = session(without_window_sized_caches(model).SerializeToString())
        self._outputs = [port.name for port in self._session.get_outputs()]
        self.past: dict[str, NDArray[np.generic]] = {}
        for port in self._session.get_inputs():
            if port.name.startswith("past_key_values."):
                dtype = {"int8": np.int8, "uint8": np.uint8, "float": np.float32}[port.type[7:-1]]
                width = head_size // 2 if dtype is np.uint8 else head_size
                self.past[port.name] = np.zeros((1, port.shape[1], 0, width), dtype)

    def feed(self, tokens: Sequence[int] | NDArray[np.integer], start: int) -> NDArray[np.float32]:
        """Logits [1, n, vocab] of tokens at positions from `start` on; what lay beyond is forgotten."""
        self.past = {name: rows[:, :, :start] for name, rows in self.past.items()}
        total = start + len(tokens)
        feeds = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "attention_mask": np.ones((1, total), np.int64),
        }
        results = dict(
            zip(self._outputs, self._session.run(self._outputs, {**feeds, **self.past}), strict=True)
        )
        logits: NDArray[np.float32] = results.pop("logits")
        self.past = {name.replace("present.", "past_key_values."): rows for name, rows in results.items()}
        return logits


def layered(windows: Sequence[int], *, kv_num_heads: int, head_size: int, form: Quantized) -> onnx.ModelProto:
    """A language model of nothing but embedding, attention and logits: one GroupQueryAttention per window.

    Its hidden size is 8 and it has as many query heads as KV heads, so that the caches are what is large.
    """
    graph = _LayeredGraph(kv_num_heads, head_size, form)
    for window in windows:
        graph.add_layer(window)
    return graph.model()


class _LayeredGraph:
    _HIDDEN, _VOCAB = 8, 16

    def __init__(self, kv_num_heads: int, head_size: int, form: Quantized) -> None:
        self._kv_num_heads, self._head_size, self._form = kv_num_heads, head_size, form
        self._cache_kind = TensorProto.INT8 if form.bits == 8 else TensorProto.UINT8
        self._rng = np.random.default_rng(23)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, [1, name])
            for name in ("input_ids", "attention_mask")
        ]
        self._outputs: list[onnx.ValueInfoProto] = []
        self._num_layers = 0
        one, one32 = self._constant("one", np.array([1])), self._constant("one32", np.array([1], np.int32))
        self._scale = self._constant("cache_scale", np.array([0.05], np.float32))
        total = self._add("ReduceSum", ["attention_mask", one], keepdims=0)
        self._seqlens_k = self._add("Sub", [self._add("Cast", [total], to=TensorProto.INT32), one32])
        length = self._add("Gather", [self._add("Shape", ["attention_mask"]), one])
        self._length = self._add("Squeeze", [self._add("Cast", [length], to=TensorProto.INT32)])
        self._rows = self._add("Gather", [self._weight(self._VOCAB, self._HIDDEN), "input_ids"])

    def add_layer(self, window: int) -> None:
        wide, layer = self._kv_num_heads * self._head_size, self._num_layers
        projected = [self._add("MatMul", [self._rows, self._weight(self._HIDDEN, wide)]) for _ in range(3)]
        past, present = (
            [f"{name}.{layer}.{part}" for part in ("key", "value")] for name in ("past_key_values", "present")
        )
        self._num_layers += 1
        channels = self._head_size * self._form.bits // 8
        shape = [1, self._kv_num_heads, f"past_{layer}", channels]
        self._inputs += [helper.make_tensor_value_info(name, self._cache_kind, shape) for name in past]
        self._outputs += [helper.make_tensor_value_info(name, self._cache_kind, None) for name in present]
        inputs = [*projected, *past, self._seqlens_k, self._length, *[""] * 5, self._scale, self._scale]
        node = helper.make_node(
            "GroupQueryAttention", inputs, [f"attention.{layer}", *present], domain="com.microsoft"
        )
        attributes = {
            "num_heads": self._kv_num_heads,
            "kv_num_heads": self._kv_num_heads,
            "local_window_size": window,
            "k_quant_type": self._form.kind,
            "v_quant_type": self._form.kind,
            "kv_cache_bit_width": self._form.bits,
        }
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self._nodes.append(node)
        merged = self._add("MatMul", [f"attention.{layer}", self._weight(wide, self._HIDDEN)])
        self._rows = self._add("Add", [self._rows, merged])

    def model(self) -> onnx.ModelProto:
        logits = self._add("MatMul", [self._rows, self._weight(self._HIDDEN, self._VOCAB)])
        self._nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        shape = [1, "input_ids", self._VOCAB]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape), *self._outputs]
        graph = helper.make_graph(self._nodes, "layered", self._inputs, outputs, self._weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def _add(self, op: str, inputs: list[str], **attributes: int) -> str:
        output = f"{op}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def _constant(self, name: str, value: NDArray[np.generic]) -> str:
        self._weights.append(numpy_helper.from_array(value, name))
        return name

    def _weight(self, *shape: int) -> str:
        value = 0.3 * self._rng.normal(size=shape)
        return self._constant(f"weight.{len(self._weights)}", value.astype(np.float32))
