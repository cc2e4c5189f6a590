"""Three independent answers to the same question: the NumPy reference, the naive loop and ONNX Runtime.

The question: a history of T tokens, the first `stored` of them in the cache but for those at `missing`
positions, the rest one step; what are attention and present?
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import ort_runner
from gqa_data import Floats, History
from gqa_models import GQA
from oracles import NaiveLayer, NaiveLog
from ort_runner import OpRun

from npusim.reference import AttentionHistory, AttentionOptions, Rotary, rotate


def by_reference(gqa: GQA, history: History, stored: int, *, missing: Collection[int] = ()) -> OpRun:
    """npusim.reference; present holds the rows that are not missing."""
    told = AttentionHistory(reference_options(gqa))
    angles = history.position_ids
    if stored:
        told.append(
            history.key[:, :, :stored],
            history.value[:, :, :stored],
            position_ids=None if angles is None else angles[:stored],
        )
        told.drop(missing)
    attention = told.step(
        history.query[:, :, stored:],
        history.key[:, :, stored:],
        history.value[:, :, stored:],
        position_ids=None if angles is None else angles[stored:],
        attention_bias=None if history.bias is None else history.bias[:, :, stored:],
    )
    return OpRun(attention=attention, present_key=told.present_key, present_value=told.present_value)


def cached_keys(gqa: GQA, history: History) -> Floats:
    """The keys of a history as a cache holds them: after rotary, in the model's type, [1, KV, T, D]."""
    rotary = reference_options(gqa).rotary
    if rotary is None:
        return history.key
    angles = np.arange(history.total) if history.position_ids is None else history.position_ids
    return rotate(history.key, rotary, angles).astype(gqa.dtype)


def reference_options(gqa: GQA) -> AttentionOptions:
    """The layer's options; sinks and rotary tables as the model's type rounds them."""
    rotary = None
    if gqa.rotary is not None:
        cos, sin = (table.astype(gqa.dtype) for table in gqa.rotary.tables())
        rotary = Rotary(cos=cos, sin=sin, interleaved=gqa.rotary.interleaved)
    return AttentionOptions(
        local_window_size=gqa.local_window_size,
        causal=gqa.causal,
        scale=gqa.scale,
        head_sink=None if gqa.head_sink is None else np.array(gqa.head_sink, gqa.dtype),
        smooth_softmax=gqa.smooth_softmax,
        rotary=rotary,
    )


def by_naive(gqa: GQA, history: History, stored: int, *, missing: Collection[int] = ()) -> OpRun:
    """The loop of oracles.py; present holds the rows that are not missing."""
    log = NaiveLog(naive_layer(gqa))
    angles = range(history.total) if history.position_ids is None else history.position_ids.tolist()
    for position in range(history.total):
        log.add(position, history.key[0, :, position], history.value[0, :, position], angles[position])
    log.forget(missing)
    looked = []
    for position in range(stored, history.total):
        bias = None
        if history.bias is not None:
            row = history.bias[0, :, position]
            bias = np.broadcast_to(row, (gqa.num_heads, history.total))
        looked.append(log.look(position, history.query[0, :, position], angles[position], bias))
    return OpRun(
        attention=np.stack([row.reshape(-1) for row in looked])[None],
        present_key=_stacked([row[1] for row in log.rows]),
        present_value=_stacked([row[2] for row in log.rows]),
    )


def naive_layer(gqa: GQA) -> NaiveLayer:
    """The layer as oracles.py wants it: no defaults left to interpret."""
    sinks = None if gqa.head_sink is None else [float(gqa.dtype(sink)) for sink in gqa.head_sink]
    if sinks is None and gqa.smooth_softmax:
        sinks = [0.0] * gqa.num_heads
    tables = (None, None) if gqa.rotary is None else gqa.rotary.tables()
    cos, sin = (None if table is None else table.astype(gqa.dtype) for table in tables)
    return NaiveLayer(
        num_heads=gqa.num_heads,
        kv_num_heads=gqa.kv_num_heads,
        window=None if gqa.local_window_size == -1 else gqa.local_window_size,
        causal=gqa.causal,
        scale=gqa.scale if gqa.scale else 1 / gqa.head_size**0.5,
        sinks=sinks,
        cos=cos,
        sin=sin,
        interleaved=gqa.rotary is not None and gqa.rotary.interleaved,
    )


def by_ort(gqa: GQA, history: History, stored: int, *, missing: Collection[int] = ()) -> OpRun:
    """ONNX Runtime; present holds all rows, the missing too."""
    return ort_runner.run_op(gqa, history, stored, missing=missing)


def _stacked(rows: list[list[list[float]]]) -> Floats:
    """Rows of [KV][D] as [1, KV, R, D]."""
    return np.array(rows).swapaxes(0, 1)[None]
