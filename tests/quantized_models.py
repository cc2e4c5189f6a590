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

    Its hidden size is 8 and as many query heads as KV heads, so that the caches are what is large.
    """
    hidden, vocab, wide = 8, 16, kv_num_heads * head_size
    kind = TensorProto.INT8 if form.bits == 8 else TensorProto.UINT8
    channels = head_size if form.bits == 8 else head_size // 2
    rng = np.random.default_rng(23)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    caches = [
        helper.make_tensor_value_info(
            f"past_key_values.{layer}.{part}", kind, [1, kv_num_heads, f"past_{layer}", channels]
        )
        for layer in range(len(windows))
        for part in ("key", "value")
    ]

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32) * 0.3, name))
        return name

    def add(op: str, inputs: list[str], output: str, **attributes: int | str) -> str:
        nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    weights.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    weights.append(numpy_helper.from_array(np.array([1], np.int32), "one32"))
    weights.append(numpy_helper.from_array(np.array(0.05, np.float32).reshape(1), "cache_scale"))
    total = add("ReduceSum", ["attention_mask", "one"], "total", keepdims=0)
    total = add("Cast", [total], "total32", to=TensorProto.INT32)
    seqlens_k = add("Sub", [total, "one32"], "seqlens_k")
    length = add("Gather", [add("Shape", ["attention_mask"], "mask_shape"), "one"], "length")
    length = add("Squeeze", [add("Cast", [length], "length32", to=TensorProto.INT32)], "length_scalar")
    rows = add("Gather", [weight("embedding", vocab, hidden), "input_ids"], "rows")
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "sequence_length", vocab])]
    for layer, window in enumerate(windows):
        projected = [
            add("MatMul", [rows, weight(f"{layer}.{part}", hidden, wide)], f"{layer}.{part}.rows")
            for part in ("query", "key", "value")
        ]
        presents = [f"present.{layer}.key", f"present.{layer}.value"]
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        attention = f"{layer}.attention"
        inputs = [*projected, *past, seqlens_k, length, *[""] * 5, "cache_scale", "cache_scale"]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                [attention, *presents],
                domain="com.microsoft",
                num_heads=kv_num_heads,
                kv_num_heads=kv_num_heads,
                local_window_size=window,
                k_quant_type="PER_TENSOR",
                v_quant_type="PER_TENSOR",
                kv_cache_bit_width=form.bits,
            )
        )
        outputs += [helper.make_tensor_value_info(name, kind, None) for name in presents]
        merged = add("MatMul", [attention, weight(f"{layer}.out", wide, hidden)], f"{layer}.merged")
        rows = add("Add", [rows, merged], f"{layer}.rows")
    add("MatMul", [rows, weight("head", hidden, vocab)], "logits")
    tokens = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1, name])
        for name in ("input_ids", "attention_mask")
    ]
    graph = helper.make_graph(nodes, "layered", [*tokens, *caches], outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)
