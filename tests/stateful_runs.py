"""Ways to run a stateful model: on the CPU plugin as it is, and in the static frame that NPUW makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino._offline_transformations import stateful_to_stateless_transformation

from npusim import OpenVINOTarget
from transforms.stateful import StatefulGQA

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
STALE = 1.0e3


def lowered(source: Path | bytes) -> ov.Model:
    """The stateful form of an ONNX file."""
    model = ov.Core().read_model(source)
    StatefulGQA().run_on_model(model)
    return model


def cpu_target(model: ov.Model, *, capacity: int = 200) -> OpenVINOTarget:
    """On the CPU plugin, all of it in float32."""
    return OpenVINOTarget(ov.compile_model(model, "CPU", F32).create_infer_request(), capacity=capacity)


class StaticFrame:
    """A cache of `capacity` slots and a block of `rows`, as NPUW lays them out; unused slots hold garbage.

    Past rows lie at the slots of their positions, the block right-aligned behind the last slot.
    attention_mask is 1 for stored and new tokens; position_ids of padding rows are 0.
    """

    def __init__(self, model: ov.Model, *, capacity: int, rows: int) -> None:
        model = model.clone()
        stateful_to_stateless_transformation(model)
        shapes: dict[str, list[int]] = {
            "input_ids": [1, rows],
            "position_ids": [1, rows],
            "attention_mask": [1, capacity + rows],
        }
        for port in model.inputs:
            name = port.get_any_name()
            if name.startswith("past_key_values"):
                shape = port.get_partial_shape()
                shapes[name] = [1, shape[1].get_length(), capacity, shape[3].get_length()]
        model.reshape(shapes)
        self._request = ov.compile_model(model, "CPU", F32).create_infer_request()
        self._capacity, self._rows = capacity, rows
        self._past = {
            name: np.full(shape, STALE, np.float32)
            for name, shape in shapes.items()
            if name.startswith("past")
        }
        self.stored = 0

    def feed(self, tokens: Sequence[int], *, keep: int | None = None) -> NDArray[np.float32]:
        """Logits [1, n, vocab] of n tokens; the first `keep` of them stay stored (all if left out)."""
        count, padding = len(tokens), self._rows - len(tokens)
        stop = self.stored + count
        mask = np.zeros((1, self._capacity + self._rows), np.int64)
        mask[:, : self.stored] = 1
        mask[:, self._capacity + padding :] = 1
        outputs = self._request.infer(
            {
                "input_ids": np.array([[0] * padding + list(tokens)]),
                "position_ids": np.array([[0] * padding + list(range(self.stored, stop))]),
                "attention_mask": mask,
                **self._past,
            }
        )
        for name, rows in self._past.items():
            present = outputs[name.replace("past_key_values", "present")]
            rows[:, :, self.stored : stop] = present[:, :, self._capacity + padding :]
        self.stored += count if keep is None else keep
        logits: NDArray[np.float32] = outputs["logits"][:, padding:]
        return logits
