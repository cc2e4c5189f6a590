"""One quantized GroupQueryAttention, lowered, fed step by step over a past that this file keeps itself.

The past is a list of stored rows by position. Before each step they are put into slots by a plain rule, and
every other slot gets the loudest codes there are.
"""

from __future__ import annotations

from dataclasses import replace

import gqa_models
import numpy as np
import onnx
import openvino as ov
from gqa_models import GQA
from numpy.typing import NDArray
from onnx import numpy_helper
from ort_runner import session

from transforms import Branch, DecomposeGQA, KeyLayout, RemoveEmptyPast

Floats = NDArray[np.floating]
Stored = NDArray[np.generic]
Feeds = dict[str, NDArray[np.generic]]

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


def stored_shape(gqa: GQA, rows: int) -> tuple[int, int, int, int]:
    """Of a cache tensor with so many rows."""
    assert gqa.quantized is not None
    width = gqa.head_size // 2 if gqa.quantized.bits == 4 else gqa.head_size
    return (1, gqa.kv_num_heads, rows, width)


def stored_dtype(gqa: GQA) -> type[np.generic]:
    """What numpy holds a cache in; float8 as bytes."""
    assert gqa.quantized is not None
    return np.int8 if gqa.quantized.bits == 8 and not gqa.quantized.float8 else np.uint8


def random_scales(gqa: GQA, rng: np.random.Generator, largest: float) -> dict[str, NDArray[np.float32]]:
    """k_scale and v_scale for numbers up to `largest`, all different."""
    assert gqa.quantized is not None
    most = 448 if gqa.quantized.float8 else {8: 127, 4: 7}[gqa.quantized.bits]
    per_tensor = gqa.quantized.kind == "PER_TENSOR"
    shape = (1,) if per_tensor else (1, gqa.kv_num_heads, 1, gqa.head_size)
    return {
        name: (largest / most * rng.uniform(0.6, 1.4, shape)).astype(np.float32)
        for name in ("k_scale", "v_scale")
    }


def random_block(gqa: GQA, length: int, rng: np.random.Generator) -> Feeds:
    """query, key and value rows [1, n, heads * D]."""
    sizes = {"query": gqa.num_heads, "key": gqa.kv_num_heads, "value": gqa.kv_num_heads}
    return {
        name: (1.3 * rng.normal(size=(1, length, heads * gqa.head_size))).astype(gqa.dtype)
        for name, heads in sizes.items()
    }


def lengths(total: int) -> Feeds:
    """seqlens_k and total_sequence_length after a step."""
    return {
        "seqlens_k": np.array([total - 1], np.int32),
        "total_sequence_length": np.array(total, np.int32),
    }


def build(gqa: GQA, constants: Feeds | None = None, *, num_tokens: bool = False) -> bytes:
    """The node's model; inputs named in `constants` become initializers."""
    count = gqa_models.TokenCount() if num_tokens else None
    model = onnx.load_from_string(gqa_models.build(gqa, num_tokens=count))
    for name, value in (constants or {}).items():
        port = next(port for port in model.graph.input if port.name == name)
        model.graph.input.remove(port)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    data: bytes = model.SerializeToString()
    return data


def read(model: bytes) -> ov.Model:
    """As OpenVINO's frontend reads it."""
    return ov.Core().read_model(model)


def run(compiled: ov.CompiledModel, feeds: Feeds) -> Feeds:
    """Results by output name; caches are bound as what the port says, whatever numpy calls them."""
    request = compiled.create_infer_request()
    held = [np.array(feeds[port.get_any_name()], order="C") for port in compiled.inputs]
    for port, array in zip(compiled.inputs, held, strict=True):
        request.set_tensor(port, ov.Tensor(array, ov.Shape(array.shape), port.get_element_type()))
    request.infer()
    return {port.get_any_name(): request.get_tensor(port).data.copy() for port in compiled.outputs}


class OrtOp:
    """The node in ONNX Runtime, over a growing past, or over one of C rows with sliding_window_cache."""

    def __init__(self, gqa: GQA, scales: Feeds) -> None:
        rows = gqa.capacity if gqa.sliding_window_cache and gqa.capacity else 0
        self._session = session(build(replace(gqa, sequence_length=None, capacity=None)))
        self._scales = scales
        self.total = 0
        self.key = np.zeros(stored_shape(gqa, rows), stored_dtype(gqa))
        self.value = self.key

    def step(self, block: Feeds) -> Floats:
        """Attention of a block [1, n, H * D]."""
        self.total += block["query"].shape[1]
        past = {"past_key": self.key, "past_value": self.value}
        attention: Floats
        attention, self.key, self.value = self._session.run(
            None, {**block, **past, **lengths(self.total), **self._scales}
        )
        return attention


class LoweredOp:
    """The node lowered for one branch: a block of up to S rows over C slots."""

    def __init__(
        self,
        gqa: GQA,
        scales: Feeds,
        branch: Branch,
        layout: KeyLayout = KeyLayout.LINEAR,
        *,
        scales_are_constant: bool = True,
    ) -> None:
        self._gqa, self._branch, self._layout = gqa, branch, layout
        self._scales = scales
        # The right-aligned frame needs no count: it sees only positions from 0 on.
        partial = branch is Branch.GENERATE
        self.model = read(build(gqa, scales if scales_are_constant else None, num_tokens=partial))
        DecomposeGQA(
            branch,
            key_layout=layout,
            block_tokens=(lambda model: model.input("num_tokens")) if partial else None,
        ).run_on_model(self.model)
        RemoveEmptyPast().run_on_model(self.model)
        self._compiled = ov.Core().compile_model(self.model, "CPU", PROPERTIES)
        self.key_rows: list[Stored] = []
        self.value_rows: list[Stored] = []

    def step(self, block: Feeds) -> Floats:
        """Attention of the n real rows [1, n, H * D]; the new rows join the past."""
        length, stored, capacity = block["query"].shape[1], len(self.key_rows), self._gqa.capacity or 0
        pad = (self._gqa.sequence_length or 0) - length
        feeds: Feeds = {
            name: np.pad(rows, ((0, 0), (pad, 0), (0, 0)), constant_values=300)
            for name, rows in block.items()
        }
        past = {"past_key": self._past(self.key_rows), "past_value": self._past(self.value_rows)}
        feeds |= past | lengths(stored + length) | self._scales
        results = run(self._compiled, {**feeds, "num_tokens": np.array(length, np.int32)})
        for name, rows in (("key", self.key_rows), ("value", self.value_rows)):
            present = results[f"present_{name}"]
            # Whatever bytes the past has, they come back as they went in.
            np.testing.assert_array_equal(present[:, :, :capacity], past[f"past_{name}"])
            new = present[:, :, capacity + pad :]
            rows.extend(new[:, :, row].copy() for row in range(length))
        return results["attention"][:, pad:]

    def _past(self, rows: list[Stored]) -> Stored:
        gqa, capacity = self._gqa, self._gqa.capacity or 0
        buffer = np.empty(stored_shape(gqa, capacity), stored_dtype(gqa))
        buffer[...] = 0x7E if gqa.quantized and gqa.quantized.float8 else np.iinfo(buffer.dtype).max
        for slot, position in self._slots(len(rows), capacity).items():
            buffer[:, :, slot] = rows[position]
        return buffer

    def _slots(self, stored: int, capacity: int) -> dict[int, int]:
        """Position in each slot that holds one."""
        if self._branch is Branch.PREFILL:
            return {capacity - stored + position: position for position in range(stored)}
        match self._layout:
            case KeyLayout.LINEAR | KeyLayout.GATHERED:
                return {position: position for position in range(stored)}
            case KeyLayout.RING:
                return {position % capacity: position for position in range(stored)}
            case KeyLayout.ROLLING:
                rows: list[int] = []
                for position in range(stored):
                    if len(rows) == capacity:
                        rows = rows[capacity - self._gqa.local_window_size + 1 :]
                    rows.append(position)
                return dict(enumerate(rows))


def stack(rows: list[Stored]) -> Stored:
    """Stored rows by position as a cache tensor [1, KV, rows, width]."""
    return np.stack(rows, axis=2)


def types_of(model: ov.Model) -> list[str]:
    """The ops of a model in execution order."""
    return [node.get_type_name() for node in model.get_ordered_ops()]
