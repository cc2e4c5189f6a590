"""The same ONNX file run by ONNX Runtime's CPU provider: the outside witness of `npusim compare`.

onnxruntime is an extra and imported when it is used. How its GroupQueryAttention wants to be fed (found by
trying, 1.32): with past buffers of at least as many rows as there will ever be tokens it hands back presents
of the same shape, never evicts, and reads only the rows that attention_mask counts. So buffers are allocated
once and a rewind is a smaller count, for layers with sliding_window_cache=1 too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from npusim.errors import CapacityError, InputError, ModelError, NpuSimError, TrimError
from npusim.onnx_attention import GQA_TYPE

EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")
NUMBER_TYPES: dict[str, np.dtype[np.generic]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
}


def unavailable_reason() -> str | None:
    """Why ONNX Runtime cannot be used here; None where it can."""
    if find_spec("onnxruntime") is None:
        return "the package onnxruntime is not installed (pip install onnxruntime, the extra ort)"
    return None


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """One cache tensor: the input that takes it, the output that hands it back, and its buffer."""

    past: str
    present: str
    shape: tuple[int, int, int, int]  # [1, kv_num_heads, rows, channels]
    dtype: np.dtype[np.generic]


class OnnxRuntimeModel:
    """An ONNX language model fed token by token or block by block; batch is 1.

    `feed` continues the sequence, `trim` shortens it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        folder: Path,
        max_length: int,
        channels: Mapping[str, int],
    ) -> None:
        """Load a model whose external data, if it has any, lies in `folder`.

        max_length: the most tokens that will ever be stored. channels: by past input, the size of its last
        dimension where the file leaves it symbolic.

        Raises ModelError for a missing package, and for a model that cannot be loaded or fed.
        """
        self._session = open_session(model.SerializeToString(), folder=folder)
        self._failures = failure_types()
        ports = {port.name: port for port in self._session.get_inputs()}
        types = {name: _number_type(name, port.type) for name, port in ports.items()}
        rows = max(max_length, _longest_window(model.graph))
        self._caches = [
            _Cache(
                past=past,
                present=present,
                shape=_buffer_shape(past, ports[past].shape, rows, channels.get(past)),
                dtype=types[past],
            )
            for past, present in _cache_names(model.graph)
        ]
        self._token_types = _token_types(types, {cache.past for cache in self._caches})
        self._outputs = ["logits", *(cache.present for cache in self._caches)]
        self._max_length = max_length
        self._past = _empty_buffers(self._caches)
        self._stored = 0

    @property
    def num_stored_tokens(self) -> int:
        """Tokens fed and not trimmed since the beginning."""
        return self._stored

    def feed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits float32 [1, n, vocab] of n further tokens.

        Raises InputError for an empty block, CapacityError beyond max_length, NpuSimError for what ONNX
        Runtime itself refuses.
        """
        if not tokens:
            raise InputError("feed: got no token; give at least one")
        start, stop = self._stored, self._stored + len(tokens)
        if stop > self._max_length:
            raise CapacityError(f"{stop} tokens to store; the buffers were made for {self._max_length}")
        values = {
            "input_ids": np.asarray(tokens),
            "attention_mask": np.ones(stop),
            "position_ids": np.arange(start, stop),
        }
        feeds = {name: values[name].astype(kind)[None] for name, kind in self._token_types.items()}
        try:
            logits, *presents = self._session.run(self._outputs, {**feeds, **self._past})
        except self._failures as error:
            raise NpuSimError(f"ONNX Runtime failed at position {start}: {error}") from error
        self._past = {cache.past: rows for cache, rows in zip(self._caches, presents, strict=True)}
        self._stored = stop
        return np.asarray(logits, dtype=np.float32)

    def trim(self, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens; return how many were dropped. Raises TrimError beyond."""
        removed = self._stored - num_tokens
        if num_tokens < 0 or removed < 0:
            raise TrimError(
                f"trim to {num_tokens} tokens: {self._stored} are stored; give 0 to {self._stored}"
            )
        self._stored = num_tokens
        return removed


def failure_types() -> tuple[type[Exception], ...]:
    """ONNX Runtime's own exceptions; they have no common root but Exception."""
    binding = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    kinds = (value for value in vars(binding).values() if isinstance(value, type))
    return tuple(kind for kind in kinds if issubclass(kind, Exception))


def open_session(model: str | bytes, *, folder: Path | None = None, num_threads: int | None = None) -> Any:
    """An onnxruntime.InferenceSession on the CPU.

    model: a path, or a serialized model whose external data, if it has any, lies in `folder`. num_threads:
    None leaves the choice to ONNX Runtime. Raises ModelError for a missing package, and for a model that
    cannot be loaded.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise ModelError(f"ONNX Runtime cannot be used: {reason}")
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is in the exception
    if folder is not None:
        options.add_session_config_entry(EXTERNAL_DATA_FOLDER, str(folder.resolve()))
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
    try:
        return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except failure_types() as error:
        raise ModelError(f"ONNX Runtime cannot load the model: {error}") from error


def _cache_names(graph: onnx.GraphProto) -> list[tuple[str, str]]:
    """(past, present) of every cache tensor."""
    inputs, outputs = {port.name for port in graph.input}, {port.name for port in graph.output}
    pairs = []
    for node in graph.node:
        if node.op_type != GQA_TYPE:
            continue
        for past, present in zip(node.input[3:5], node.output[1:3], strict=True):
            if past not in inputs or present not in outputs:
                raise ModelError(
                    f"{node.name or node.output[0]}: {past or 'past'} and {present or 'present'} must be an "
                    "input and an output of the model; export the model with its KV cache"
                )
            pairs.append((past, present))
    return pairs


def _number_type(name: str, kind: str) -> np.dtype[np.generic]:
    if kind not in NUMBER_TYPES:
        raise ModelError(f"input {name} is {kind}, which numpy has no type for; leave out ort")
    return NUMBER_TYPES[kind]


def _token_types(
    types: Mapping[str, np.dtype[np.generic]], caches: set[str]
) -> dict[str, np.dtype[np.generic]]:
    """Number types of the inputs made from the tokens; any other input is refused."""
    own = {name: kind for name, kind in types.items() if name not in caches}
    unknown = sorted(set(own) - set(TOKEN_INPUTS))
    if unknown:
        raise ModelError(f"input {unknown[0]} is unknown; known are {', '.join(TOKEN_INPUTS)} and the caches")
    return own


def _longest_window(graph: onnx.GraphProto) -> int:
    """What a buffer must hold at the least, however short the run; 0 without a window."""
    return max(
        (
            attribute.i
            for node in graph.node
            for attribute in node.attribute
            if node.op_type == GQA_TYPE and attribute.name == "local_window_size"
        ),
        default=0,
    )


def _buffer_shape(
    name: str, shape: Sequence[int | str], rows: int, channels: int | None
) -> tuple[int, int, int, int]:
    heads, width = shape[1], shape[3] if isinstance(shape[3], int) else channels
    if not isinstance(heads, int) or width is None:
        raise ModelError(f"{name}: shape {list(shape)} leaves heads or head size unknown")
    return (1, heads, rows, width)


def _empty_buffers(caches: Sequence[_Cache]) -> dict[str, npt.NDArray[np.generic]]:
    return {cache.past: np.zeros(cache.shape, cache.dtype) for cache in caches}
