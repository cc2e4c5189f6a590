"""The same ONNX file run natively by OpenVINO's CPU plugin: dynamic shapes, a cache that grows, no slots.

This is what the simulator is held against in `npusim demo`. It shares nothing with the static path: the
GroupQueryAttention op is left to OpenVINO, and the past is handed back whole after every call.

Two things have to be seen to (both measured with OpenVINO 2026.4, see tests/npusim/test_native.py):

* A node with sliding_window_cache=1 hands back a present of the length that its past had, the rolling
  buffer. A past that begins with no rows stays empty, and the answer is wrong from the second call on,
  without an error. The attribute is therefore cleared; local_window_size stays and does the masking.
* The plugin's fused subgraphs compute static-shape rotary attention wrong where the block is as long as
  there are query heads. Dynamic shapes were never seen to be hit; SNIPPETS_MODE=DISABLE makes sure.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Node

from npusim.errors import InputError, ModelError, TrimError
from npusim.model_file import read_model
from transforms import node_label

GQA_TYPE = "GroupQueryAttention"
FIRST_PAST, FIRST_PRESENT = 3, 1
"""Of the op: past_key and past_value are inputs 3 and 4, present_key and present_value outputs 1 and 2."""

PACKED_4_BIT = 4

TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")
REFERENCE_PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "SNIPPETS_MODE": "DISABLE",
}


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """One growing cache tensor: which input takes it, which output hands it back, how it begins."""

    input_name: str
    output_index: int
    element_type: ov.Type
    empty_shape: tuple[int, ...]  # [1, kv_num_heads, 0, head_size or half of it]


class NativeModel:
    """An ONNX language model on the CPU plugin, fed token by token or block by block.

    `feed` continues the sequence, `trim` shortens it, `reset` starts over. Batch is 1.
    """

    def __init__(self, source: str | os.PathLike[str] | ov.Model) -> None:
        """Compile a file, or a model read from one. Raises ModelError for what cannot be run."""
        model = read_model(source if isinstance(source, ov.Model) else os.fspath(source))
        nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == GQA_TYPE]
        if not nodes:
            name = model.get_friendly_name() if isinstance(source, ov.Model) else source
            raise ModelError(f"{name}: no {GQA_TYPE} op; export the model with onnxruntime-genai's builder")
        _take_past_as_it_is(nodes)
        self._caches = [cache for node in nodes for cache in _caches_of(model, node)]
        self._input_types = _token_inputs(model, self._caches)
        self._logits_index = _output_index_by_name(model, "logits")
        compiled = ov.Core().compile_model(model, "CPU", REFERENCE_PROPERTIES)
        self._request = compiled.create_infer_request()
        self._past: list[ov.Tensor] = []
        self._num_stored_tokens = 0
        self.reset()

    @property
    def num_stored_tokens(self) -> int:
        """Tokens fed and not trimmed since the last reset."""
        return self._num_stored_tokens

    def reset(self) -> None:
        """Forget the sequence."""
        self._past = [ov.Tensor(cache.element_type, list(cache.empty_shape)) for cache in self._caches]
        self._num_stored_tokens = 0

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 [1, n, vocab] of n further tokens. Raises InputError for an empty block."""
        if not tokens:
            raise InputError("feed: got no token; give at least one")
        start, stop = self._num_stored_tokens, self._num_stored_tokens + len(tokens)
        values = {
            "input_ids": np.asarray(tokens),
            "attention_mask": np.ones(stop),
            "position_ids": np.arange(start, stop),
        }
        feeds: dict[str, ov.Tensor] = {
            name: ov.Tensor(values[name].astype(dtype)[None]) for name, dtype in self._input_types.items()
        }
        feeds.update({cache.input_name: past for cache, past in zip(self._caches, self._past, strict=True)})
        self._request.infer(feeds)
        self._past = [_copy(self._request.get_output_tensor(cache.output_index)) for cache in self._caches]
        self._num_stored_tokens = stop
        logits = self._request.get_output_tensor(self._logits_index).data
        return np.array(logits, dtype=np.float32)

    def trim(self, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens; return how many were dropped. Raises TrimError beyond."""
        removed = self._num_stored_tokens - num_tokens
        if num_tokens < 0 or removed < 0:
            raise TrimError(
                f"trim to {num_tokens} tokens: {self._num_stored_tokens} are stored; "
                f"give 0 to {self._num_stored_tokens}"
            )
        if num_tokens == 0:
            self.reset()
        elif removed:
            self._past = [_copy(_first_rows(past, num_tokens)) for past in self._past]
            self._num_stored_tokens = num_tokens
        return removed


def _take_past_as_it_is(nodes: Sequence[Node]) -> None:
    """Let every op read its past as all of the past, not as a rolling buffer."""
    for node in nodes:
        node.set_attribute("sliding_window_cache", False)


def _caches_of(model: ov.Model, node: Node) -> list[_Cache]:
    """The key and value cache of one op; raises ModelError where they are not model inputs and outputs.

    The head size, which a cache may leave open, is the query's; two codes of 4 bits share an element.
    """
    caches = []
    codes_in_element = 2 if node.get_attributes()["kv_cache_bit_width"] == PACKED_4_BIT else 1
    for offset in range(2):
        source = node.input_value(FIRST_PAST + offset)
        if source.get_node().get_type_name() != "Parameter":
            raise ModelError(
                f"{node_label(node)}: past input {FIRST_PAST + offset} is no model input; "
                "export the model with past_key_values"
            )
        shape = source.get_partial_shape()
        head_size = node.input_value(0).get_partial_shape()[3]
        if shape[1].is_dynamic or head_size.is_dynamic:
            raise ModelError(f"{source.get_any_name()}: shape {shape} leaves heads or head size unknown")
        caches.append(
            _Cache(
                input_name=source.get_any_name(),
                output_index=_output_index(model, node, FIRST_PRESENT + offset),
                element_type=source.get_element_type(),
                empty_shape=(1, shape[1].get_length(), 0, head_size.get_length() // codes_in_element),
            )
        )
    return caches


def _output_index(model: ov.Model, node: Node, port: int) -> int:
    for index, output in enumerate(model.outputs):
        source = output.get_node().input_value(0)
        if source.get_node().get_name() == node.get_name() and source.get_index() == port:
            return index
    raise ModelError(f"{node_label(node)}: output {port} (new cache) is no model output")


def _output_index_by_name(model: ov.Model, name: str) -> int:
    for index, output in enumerate(model.outputs):
        if name in output.get_names():
            return index
    found = ", ".join(output.get_any_name() for output in model.outputs[:4])
    raise ModelError(f"no output named {name}; the first outputs are {found}")


def _token_inputs(model: ov.Model, caches: Sequence[_Cache]) -> dict[str, np.dtype]:
    """Names and number types of the inputs made from the tokens; any other input is refused."""
    of_caches = {cache.input_name for cache in caches}
    types: dict[str, np.dtype] = {}
    for parameter in model.inputs:
        if parameter.get_names() & of_caches:
            continue
        name = parameter.get_any_name()
        if name not in TOKEN_INPUTS:
            raise ModelError(f"input {name} is unknown; known are {', '.join(TOKEN_INPUTS)} and the caches")
        types[name] = parameter.get_element_type().to_dtype()
    return types


def _first_rows(tensor: ov.Tensor, rows: int) -> ov.Tensor:
    """A view of rows [0, rows) of a cache [1, heads, length, width]."""
    batch, heads, _, width = tensor.get_shape()
    return ov.Tensor(tensor, [0, 0, 0, 0], [batch, heads, rows, width])


def _copy(tensor: ov.Tensor) -> ov.Tensor:
    target = ov.Tensor(tensor.get_element_type(), tensor.get_shape())
    if tensor.get_size():  # copying nothing crashes OpenVINO 2026.4
        tensor.copy_to(target)
    return target
