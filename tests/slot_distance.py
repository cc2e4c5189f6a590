"""A stateful lowering with the fault that npusim is about: the window measured in slots, not in positions.

It is right in OpenVINO's dynamic cache, where a slot is a position, and wrong in NPUW's static one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import openvino as ov
import openvino.opset13 as ops
from openvino import Output

import transforms.stateful
from transforms import StatefulGQA
from transforms.opset import i64
from transforms.stateful_mask import StatefulStep, additive_mask


def lower_by_slot_distance(path: Path) -> ov.Model:
    """The file in the stateful form, the window of every layer in slot distance."""
    model = ov.Core().read_model(path)
    with mock.patch.object(transforms.stateful, "additive_mask", _mask_by_slot):
        StatefulGQA().run_on_model(model)
    return model


def _mask_by_slot(step: StatefulStep, local_window_size: int, element_type: ov.Type) -> Output:
    # A row may see the slots up to its own, by causality: their number less one is its slot.
    seen = ops.reduce_sum(ops.convert(step.causal, "i64"), i64([3]), True)  # [1, 1, S, 1]
    slot = ops.range(i64(0), ops.squeeze(step.num_slots, i64([0])), i64(1), "i64")
    in_slots = replace(
        step,
        query_position=ops.subtract(seen, i64(1)).output(0),
        key_position=ops.unsqueeze(slot, i64([0, 1, 2])).output(0),
    )
    return additive_mask(in_slots, local_window_size, element_type)
