"""Lowered single-op models on OpenVINO's CPU, with everything poisoned that may not be read.

A step is given as a history per layer, of which `stored` tokens lie in the past buffer and the next n are the
block, right-aligned in its S rows. Slots without a row, padded rows and unused bias columns hold a large
number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import gqa_models
import numpy as np
import openvino as ov
from gqa_data import Floats, History, op_rows
from gqa_models import GQA, TokenCount
from judges import cached_keys

from transforms import Branch, DecomposeGQA, KeyLayout, StaticShapes, find_gqa, node_label

POISON = 1.0e3

Slots = Callable[[GQA, int], dict[int, int]]
"""From a layer and P to the position in each slot that holds one, slot -> position."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What one layer handed back: attention [1, S, H * D], presents [1, KV, C + S, D], and its past."""

    attention: Floats
    present_key: Floats
    present_value: Floats
    past_key: Floats
    past_value: Floats


def linear_slots(gqa: GQA, stored: int) -> dict[int, int]:
    """Position p in slot p; what does not fit was never stored."""
    return {position: position for position in range(min(stored, capacity_of(gqa)))}


def right_aligned_slots(gqa: GQA, stored: int) -> dict[int, int]:
    """The past of a right-aligned run: the newest position in the last slot."""
    return {capacity_of(gqa) - stored + position: position for position in range(stored)}


def ring_slots(gqa: GQA, stored: int) -> dict[int, int]:
    """Position p in slot p mod C, newer over older."""
    return {position % capacity_of(gqa): position for position in range(stored)}


def rolling_slots(gqa: GQA, stored: int) -> dict[int, int]:
    """In order from slot 0; a full buffer first loses its C - W + 1 oldest rows."""
    rows: list[int] = []
    for position in range(stored):
        if len(rows) == capacity_of(gqa):
            rows = rows[capacity_of(gqa) - gqa.local_window_size + 1 :]
        rows.append(position)
    return dict(enumerate(rows))


SLOTS: dict[KeyLayout, Slots] = {
    KeyLayout.LINEAR: linear_slots,
    KeyLayout.GATHERED: linear_slots,
    KeyLayout.RING: ring_slots,
    KeyLayout.ROLLING: rolling_slots,
}


def capacity_of(gqa: GQA) -> int:
    """C, which a lowered layer always has."""
    if gqa.capacity is None:
        raise ValueError(f"{gqa} has no capacity")
    return gqa.capacity


class LoweredLayers:
    """A compiled model of independent layers, lowered for one branch; `model` is the lowered graph.

    With `reshaped` the caches are read with open dimensions, as those of a whole model, and made static
    afterwards.
    """

    def __init__(
        self,
        layers: Sequence[GQA],
        branch: Branch,
        *,
        num_tokens: TokenCount | None = None,
        key_layout: KeyLayout = KeyLayout.LINEAR,
        precision: str = "f32",
        reshaped: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self._slots = right_aligned_slots if branch is Branch.PREFILL else SLOTS[key_layout]
        self.model = _reshaped(layers, num_tokens) if reshaped else read_layers(layers, num_tokens)
        block_tokens = None if num_tokens is None else (lambda model: model.input("num_tokens"))
        self.lowering = DecomposeGQA(branch, key_layout=key_layout, block_tokens=block_tokens)
        self.lowering.run_on_model(self.model)
        config = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": precision}
        self._request = core().compile_model(self.model, "CPU", config).create_infer_request()
        self._outputs = [port.get_names() for port in self.model.outputs]
        self._names = {name for port in self.model.inputs for name in port.get_names()}

    def run(
        self, histories: Sequence[History], stored: int, num_tokens: int, *, poison: float = POISON
    ) -> list[Step]:
        """One step of `num_tokens` real rows after `stored` tokens."""
        total = stored + num_tokens
        feeds: dict[str, Floats] = {
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        if "num_tokens" in self._names:
            kind = self.model.input("num_tokens").get_element_type().to_dtype()
            feeds["num_tokens"] = np.array(num_tokens, kind)
        for gqa, history, prefix in zip(self.layers, histories, self._prefixes(), strict=True):
            feeds |= self._layer_feeds(gqa, history, prefix, stored, num_tokens, poison)
        results = self._request.infer(feeds)
        by_name = {name: results[i] for i, names in enumerate(self._outputs) for name in names}
        return [
            Step(
                attention=by_name[prefix + "attention"],
                present_key=by_name[prefix + "present_key"],
                present_value=by_name[prefix + "present_value"],
                past_key=feeds[prefix + "past_key"],
                past_value=feeds[prefix + "past_value"],
            )
            for prefix in self._prefixes()
        ]

    def _prefixes(self) -> list[str]:
        if len(self.layers) == 1:
            return [""]
        return [f"layers.{index}." for index in range(len(self.layers))]

    def _layer_feeds(
        self, gqa: GQA, history: History, prefix: str, stored: int, num_tokens: int, poison: float
    ) -> dict[str, Floats]:
        new = slice(stored, stored + num_tokens)
        rows = gqa.sequence_length
        feeds = {
            prefix + name: _padded(op_rows(array[:, :, new]), 1, rows, poison)
            for name, array in (("query", history.query), ("key", history.key), ("value", history.value))
        }
        feeds[prefix + "past_key"] = self._past(gqa, cached_keys(gqa, history), stored, poison)
        feeds[prefix + "past_value"] = self._past(gqa, history.value, stored, poison)
        if history.position_ids is not None:
            feeds["position_ids"] = _padded(history.position_ids[None, new], 1, rows, -7)
        if history.bias is not None:
            bias = _padded(history.bias[:, :, new, : new.stop], 2, rows, poison)
            unused = ((0, 0), (0, 0), (0, 0), (0, (gqa.bias_length or 0) - new.stop))
            feeds[prefix + "attention_bias"] = np.pad(bias, unused, constant_values=poison)
        if gqa.rotary is not None and gqa.rotary.as_inputs:
            for name, table in zip(("cos_cache", "sin_cache"), gqa.rotary.tables(), strict=True):
                feeds[prefix + name] = table.astype(gqa.dtype)
        return feeds

    def _past(self, gqa: GQA, rows: Floats, stored: int, poison: float) -> Floats:
        buffer = np.full((1, gqa.kv_num_heads, capacity_of(gqa), gqa.head_size), poison, gqa.dtype)
        for slot, position in self._slots(gqa, stored).items():
            buffer[:, :, slot] = rows[:, :, position]
        return buffer


@cache
def core() -> ov.Core:
    """One core for all tests."""
    return ov.Core()


def read_layers(layers: Sequence[GQA], num_tokens: TokenCount | None = None) -> ov.Model:
    """The layers as OpenVINO's frontend reads them, GroupQueryAttention kept."""
    return core().read_model(gqa_models.build_layers(layers, num_tokens=num_tokens))


def _reshaped(layers: Sequence[GQA], num_tokens: TokenCount | None) -> ov.Model:
    model = read_layers([replace(layer, capacity=None) for layer in layers], num_tokens)
    names = [node_label(node) for node in find_gqa(model)]
    capacities = {
        name: capacity_of(layers[0 if len(layers) == 1 else int(name.split(".")[1])]) for name in names
    }
    StaticShapes(sequence_length=layers[0].sequence_length or 1, past_length=capacities).run_on_model(model)
    return model


def _padded(real: Floats, axis: int, length: int | None, poison: float) -> Floats:
    """Poisoned rows in front, up to `length`."""
    widths = [(0, 0)] * real.ndim
    widths[axis] = ((length or 0) - real.shape[axis], 0)
    return np.pad(real, widths, constant_values=poison)
