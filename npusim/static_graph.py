"""A compiled static graph with every port bound once to an array the host owns."""

import time

import numpy as np
import numpy.typing as npt
import openvino as ov

from npusim.cache_element import CACHE_ELEMENTS
from npusim.cache_plan import LayerCache
from npusim.kv_manager import BlockRows, CacheGroup, allocate
from npusim.model_spec import ModelSpec
from npusim.tensor_slice import Array, make_tensor_slice

TokenArray = npt.NDArray[np.int64]
LogitsArray = npt.NDArray[np.float32]

COMPILE_PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
"""float32 as float32: a CPU with bfloat16 units would run the graph in those."""


_UNKNOWN = -1
"""A number of entries of the mask of which it is not known that they are what they should be."""


def attention_tap(layer: int) -> str:
    """The output name of a layer's attention in a graph with taps."""
    return f"attention.{layer}"


def new_rows_name(group: int) -> str:
    """The output name of the new KV rows of a group of caches."""
    return f"new_rows.{group}"


class StaticGraph:
    """One request of a branch: a block of S rows over `past_length` positions of past (0: none).

    `load` writes a right-aligned block into the bound inputs, `run` infers, `rows` and `logits` are views of
    the bound outputs, `attention` are those of the taps. Per step nothing is allocated, bound or copied but
    the block's own tokens.
    """

    def __init__(
        self,
        compiled: ov.CompiledModel,
        spec: ModelSpec,
        groups: tuple[tuple[LayerCache, ...], ...],
        caches: tuple[CacheGroup, ...],
        past_length: int,
    ) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._bound: list[ov.Tensor] = []
        self._past_length = past_length
        self.num_rows = int(compiled.input("input_ids").get_shape()[1])
        self._input_ids = self._bind_row("input_ids")
        self._attention_mask = self._bind_row("attention_mask")
        self._position_ids = self._bind_row("position_ids") if spec.has_position_ids else None
        self._logits = self._bind_logits()
        self._rows = tuple(self._bind_rows(index) for index in range(len(groups)))
        if past_length:
            for group, members in zip(caches, groups, strict=True):
                self._bind_past(group, members)
        self.attention = self._bind_taps(len(spec.layers))
        self._masked = 0
        self._padding = _UNKNOWN
        self.graph_seconds = 0.0

    def load(self, tokens: TokenArray, start: int) -> None:
        """Fill the inputs for `tokens` [n] at positions start .. start + n - 1, n <= S.

        Padding repeats the first token at its position, so its rows are as finite as the block's: weights of
        zero would not keep a NaN of theirs out of attention.
        """
        length = len(tokens)
        pad = self.num_rows - length
        if pad:
            self._input_ids[:pad] = tokens[0]
        if length == 1:
            self._input_ids[pad] = tokens.item()  # numpy takes longer to cast an array, of one token too
        else:
            self._input_ids[pad:] = tokens
        self._mask_past(start if self._past_length else 0)
        self._mask_padding(pad)
        if self._position_ids is not None:
            self._position_ids[:pad] = start
            self._position_ids[pad:] = np.arange(start, start + length)

    def run(self) -> None:
        """Infer with what is loaded; an exception of the runtime comes through."""
        began = time.perf_counter()
        self._request.infer(share_outputs=True)
        self.graph_seconds = time.perf_counter() - began

    def rows(self, length: int) -> BlockRows:
        """The new KV rows of the last run, of which the last `length` are real."""
        # Past the Python function that a named tuple is made by: the caches are cold after a run.
        return tuple.__new__(BlockRows, (self._rows, self.num_rows - length, length))

    def logits(self, length: int) -> LogitsArray:
        """Logits of the last `length` rows, a view [1, length, vocab] that the next run overwrites."""
        first = self.num_rows - length
        if first == 0:
            return self._logits
        return make_tensor_slice(self._logits, 1, first, self.num_rows)  # type: ignore[return-value]

    @property
    def has_past(self) -> bool:
        """Whether the graph reads the cache."""
        return self._past_length > 0

    def _mask_past(self, stored: int) -> None:
        """Ones for the first `stored` past positions; only what changed is written.

        What stands there is taken for unknown meanwhile, as it is after an interrupt.
        """
        masked, self._masked = self._masked, _UNKNOWN
        if masked == _UNKNOWN:
            self._attention_mask[: self._past_length] = masked = 0
        if stored == masked + 1:
            self._attention_mask[masked] = 1  # as in most steps; numpy takes longer over a slice
        elif stored > masked:
            self._attention_mask[masked:stored] = 1
        else:
            self._attention_mask[stored:masked] = 0
        self._masked = stored

    def _mask_padding(self, pad: int) -> None:
        """Zeros for the first `pad` rows of the block, ones for the others; only a change is written."""
        if pad != self._padding:
            self._padding = _UNKNOWN
            block = self._attention_mask[self._past_length :]
            block[:pad] = 0
            block[pad:] = 1
            self._padding = pad

    def _bind_row(self, name: str) -> TokenArray:
        """A view [n] of a new array [1, n]."""
        row: TokenArray = self._bind(self._compiled.input(name), None)[0]
        return row

    def _bind_logits(self) -> LogitsArray:
        port = self._compiled.output("logits")
        return self._bind(port, None)  # type: ignore[return-value]

    def _bind_rows(self, index: int) -> Array:
        """The new rows of a group, [2 L, KV, S, D], as a view of its output [1, KV, 2 L S, D]."""
        port = self._compiled.output(new_rows_name(index))
        shape = tuple(port.get_shape())
        rows = self._bind(port, allocate(shape, CACHE_ELEMENTS[port.get_element_type()].dtype))
        _, heads, _, channels = shape
        return rows.reshape(heads, -1, self.num_rows, channels).swapaxes(0, 1)

    def _bind_taps(self, num_layers: int) -> tuple[Array, ...]:
        """Attention outputs [1, H, S, D] by layer, where the graph was compiled with taps on them."""
        names = {name for port in self._compiled.outputs for name in port.get_names()}
        wanted = [attention_tap(layer) for layer in range(num_layers)]
        return tuple(self._bind(self._compiled.output(name), None) for name in wanted if name in names)

    def _bind_past(self, group: CacheGroup, members: tuple[LayerCache, ...]) -> None:
        for cache in members:
            layer = cache.layer
            self._bind(self._compiled.input(layer.past_key), group.key(layer.index))
            self._bind(self._compiled.input(layer.past_value), group.value(layer.index))

    def _bind(self, port: ov.Output, array: Array | None) -> Array:
        if array is None:
            array = np.zeros(list(port.get_shape()), port.get_element_type().to_dtype())
        # With the type spelled out, as numpy has no name for some (float8): those arrays hold bytes.
        tensor = ov.Tensor(array, ov.Shape(array.shape), port.get_element_type())
        self._request.set_tensor(port, tensor)
        self._bound.append(tensor)
        return array
