"""ONNX Runtime's CPU GroupQueryAttention as the outside oracle: one op, or a whole model file step by step.

What ONNX Runtime 1.32 really asks for, each found by trying:

- A past buffer is either exactly P rows, then present grows to P + S, or at least T rows, then present has
  as many rows as past. Between the two (P < rows < T) it refuses.
- A node with sliding_window_cache=1 never grows: its buffer has a capacity C >= W from the first step on (an
  empty one is refused), and once T > C it evicts. Attention stays right, yet a rewind then meets rows that
  are gone. With C at least the longest T nothing is evicted, so a rewind is only a smaller count.
- A run is the first prompt exactly when total_sequence_length == S. Past is then ignored, and of position_ids
  only the first is used: row s takes position_ids[0] + s. In any other run each row has its own.
- total_sequence_length is only compared with buffer and S; where keys end says seqlens_k. Models made by the
  model builder take it from the shape of attention_mask and seqlens_k from its sum, so the mask has T ones.
- attention_bias must have exactly total_sequence_length columns.
- With rotary the head size is a multiple of 16, and so are the rotated channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import gqa_models
import numpy as np
import onnx
import onnxruntime
from gqa_data import Floats, History, op_rows
from gqa_models import GQA, Bias
from numpy.typing import ArrayLike, NDArray

# Added to the logit of a key that is not there. Finite in both types, also after a score is added to it.
ABSENT = -3.0e4


@dataclass(frozen=True, kw_only=True, eq=False)
class OpRun:
    """attention [1, n, H * D] of the new rows; present_key and present_value [1, KV, T, D]."""

    attention: Floats
    present_key: Floats
    present_value: Floats


def session(model: bytes | str | Path, *, threads: int = 1) -> onnxruntime.InferenceSession:
    """A CPU session, single-threaded by default, quiet about what is refused (the exception says it)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_op(gqa: GQA, history: History, stored: int, *, missing: Iterable[int] = ()) -> OpRun:
    """Runs `history` with the first `stored` tokens as past and the rest as one step.

    The rows at `missing` positions are hidden by a bias: ONNX Runtime has no cache with holes.
    """
    absent = sorted(missing)
    if absent:
        gqa, history = _without(gqa, history, absent)
    op = _Op(gqa, history)
    for start, stop in _chunks(gqa, stored):
        op.step(start, stop)
    attention = [op.step(*chunk) for chunk in _chunks(gqa, history.total, start=stored)]
    return OpRun(
        attention=np.concatenate(attention, axis=1), present_key=op.past[0], present_value=op.past[1]
    )


def _chunks(gqa: GQA, stop: int, *, start: int = 0) -> list[tuple[int, int]]:
    """[start, stop) in the fewest runs: the first prompt is a single token if position_ids are free."""
    if start == stop:
        return []
    if not gqa.position_ids or start > 0 or stop == 1:
        return [(start, stop)]
    if not gqa.causal:
        raise ValueError("causal=0 with position_ids: the first prompt cannot be split, nor run in one")
    return [(0, 1), (1, stop)]


def _without(gqa: GQA, history: History, absent: Sequence[int]) -> tuple[GQA, History]:
    total = history.total
    bias = np.zeros((1, 1, total, total), gqa.dtype) if history.bias is None else history.bias.copy()
    bias[..., absent] = ABSENT
    return replace(gqa, bias=gqa.bias or Bias.SHARED), replace(history, bias=bias)


@cache
def _op_session(gqa: GQA) -> onnxruntime.InferenceSession:
    return session(gqa_models.build(gqa))


class _Op:
    """One node with a growing past, or a past of T rows where it keeps a window-sized one."""

    def __init__(self, gqa: GQA, history: History) -> None:
        self._gqa = replace(gqa, sequence_length=None, capacity=None, bias_length=None)
        self._history = history
        rows = max(history.total, gqa.local_window_size) if gqa.sliding_window_cache else 0
        empty = np.zeros((1, gqa.kv_num_heads, rows, gqa.head_size), gqa.dtype)
        self.past = (empty, empty)

    def step(self, start: int, stop: int) -> Floats:
        history, rows = self._history, slice(start, stop)
        feeds: dict[str, ArrayLike] = {
            "query": op_rows(history.query[:, :, rows]),
            "key": op_rows(history.key[:, :, rows]),
            "value": op_rows(history.value[:, :, rows]),
            "past_key": self.past[0],
            "past_value": self.past[1],
            "seqlens_k": np.array([stop - 1], np.int32),
            "total_sequence_length": np.array(stop, np.int32),
        }
        if history.position_ids is not None:
            feeds["position_ids"] = history.position_ids[None, rows]
        if history.bias is not None:
            feeds["attention_bias"] = history.bias[:, :, rows, :stop]
        if self._gqa.rotary is not None and self._gqa.rotary.as_inputs:
            cos, sin = self._gqa.rotary.tables()
            feeds["cos_cache"], feeds["sin_cache"] = cos.astype(self._gqa.dtype), sin.astype(self._gqa.dtype)
        attention: Floats
        attention, key, value = _op_session(self._gqa).run(None, feeds)
        self.past = (key, value)
        return attention


class OrtModel:
    """A language model file, unmodified, fed token by token or in chunks of any size.

    All caches are buffers of `max_length` rows, full and windowed layers alike, so nothing is ever evicted
    and a rewind is exact. With `sliding_rows` the layers that keep a window-sized cache get as many rows.
    """

    def __init__(
        self, path: str | Path, *, max_length: int = 256, sliding_rows: int | None = None, threads: int = 1
    ) -> None:
        self._session = session(path, threads=threads)
        self._max_length = max_length
        self._sliding_rows = max_length if sliding_rows is None else sliding_rows
        self._outputs = [output.name for output in self._session.get_outputs()]
        head_size = _head_size(Path(path))
        self._empty = {
            port.name: np.zeros((1, port.shape[1], self._rows_of(port.shape[2]), head_size), np.float32)
            for port in self._session.get_inputs()
            if port.name.startswith("past_key_values.")
        }
        self.reset()

    def _rows_of(self, dimension: str) -> int:
        # The model builder names this dimension by what the layer keeps.
        return self._sliding_rows if dimension == "past_sliding_length" else self._max_length

    @property
    def num_stored_tokens(self) -> int:
        """Tokens fed since the last reset, less those rewound."""
        return self._stored

    @property
    def past(self) -> dict[str, NDArray[np.float32]]:
        """The buffers by input name, [1, KV, rows, D]."""
        return dict(self._past)

    def reset(self) -> None:
        """Forgets everything."""
        self._past = self._empty
        self._stored = self._high_water = 0

    def rewind(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens."""
        if not 0 <= num_tokens <= self._stored:
            raise ValueError(f"cannot rewind to {num_tokens}: {self._stored} tokens are stored")
        if self._high_water > self._sliding_rows:
            raise ValueError(f"cannot rewind: {self._sliding_rows} rows have evicted some tokens")
        self._stored = num_tokens

    def feed(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Appends n tokens; their logits [1, n, vocab]."""
        ids = np.asarray(tokens, np.int64).reshape(1, -1)
        total = self._stored + ids.shape[1]
        if not self._stored < total <= self._max_length:
            raise ValueError(f"{ids.shape[1]} tokens after {self._stored}: max_length is {self._max_length}")
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, total), np.int64), **self._past}
        results = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        logits: NDArray[np.float32] = results.pop("logits")
        self._past = {name.replace("present.", "past_key_values."): rows for name, rows in results.items()}
        self._stored = total
        self._high_water = max(self._high_water, total)
        return logits


def _head_size(path: Path) -> int:
    """D, which the cache inputs leave open: rows of the matrix that follows attention, per query head."""
    graph = onnx.load(path).graph
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    node = next(node for node in graph.node if node.op_type == "GroupQueryAttention")
    heads = int(next(attribute.i for attribute in node.attribute if attribute.name == "num_heads"))
    follower = next(other for other in graph.node if node.output[0] in other.input)
    return int(shapes[follower.input[1]][0]) // heads
