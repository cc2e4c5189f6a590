"""One conversation on each runtime, timed step by step: the context is filled once, then tokens follow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

import npusim
from npusim import npuw, onnxruntime_backend
from npusim.bench.ort import OrtSession
from npusim.cache_element import CACHE_ELEMENTS
from npusim.config_values import ConfigValue
from npusim.errors import ConfigError
from npusim.kv_manager import BlockRows
from npusim.model_file import read_model
from npusim.model_spec import read_spec

TOKEN = 7
"""Fed at every step: what a model says costs the same whatever it is fed."""

_FILL_ROWS = 1024


class Runtime(Enum):
    """What can run a conversation."""

    FAST = "npusim"
    """npusim as it runs by default."""
    DEVICE = "device"
    """npusim with NPUSIM_EXECUTION=DEVICE."""
    ORT = "ort"
    """ONNX Runtime, past and present in one buffer."""
    NPUW = "npuw"
    """The real NPUW on the CPU device."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """`context` tokens are stored, then steps of one token follow, at most `num_steps` before it starts over.

    settings: of npusim, besides the lengths.
    """

    path: Path
    context: int
    num_steps: int
    settings: tuple[tuple[str, ConfigValue], ...] = ()

    @property
    def lengths(self) -> dict[str, ConfigValue]:
        """The configuration of a runtime with static shapes."""
        return {"NPUW_LLM_MAX_PROMPT_LEN": self.context, "NPUW_LLM_MIN_RESPONSE_LEN": self.num_steps + 1}

    def with_settings(self, **settings: ConfigValue) -> Conversation:
        """The same with other settings of npusim."""
        return replace(self, settings=tuple(settings.items()))


class Steps(Protocol):
    """A candidate (`npusim.bench.timing.Candidate`) that generates a token a call."""

    def prepare(self, calls: int) -> None:
        """Start over where so many further steps do not fit."""

    def __call__(self) -> None:
        """One step."""

    def logits(self) -> NDArray[np.float32]:
        """[vocab] of the last step."""


def unavailable_reason(runtime: Runtime) -> str | None:
    """Why a runtime cannot be used here; None where it can."""
    match runtime:
        case Runtime.FAST | Runtime.DEVICE:
            return None
        case Runtime.ORT:
            return onnxruntime_backend.unavailable_reason()
        case Runtime.NPUW:
            return npuw.unavailable_reason()
        case _:
            assert_never(runtime)


def check_available(runtimes: Iterable[Runtime]) -> None:
    """ConfigError naming the first that cannot be used here."""
    for runtime in runtimes:
        reason = unavailable_reason(runtime)
        if reason is not None:
            raise ConfigError(f"{runtime.value}: {reason}")


def start(runtime: Runtime, conversation: Conversation) -> Steps:
    """Compile and fill the context. Raises ConfigError where the runtime is not there."""
    check_available([runtime])
    match runtime:
        case Runtime.FAST:
            return NpusimSteps(conversation)
        case Runtime.DEVICE:
            settings = {**dict(conversation.settings), "NPUSIM_EXECUTION": "DEVICE"}
            return NpusimSteps(conversation.with_settings(**settings))
        case Runtime.ORT:
            return OrtSteps(conversation)
        case Runtime.NPUW:
            return NPUWSteps(conversation)
        case _:
            assert_never(runtime)


def last_row(logits: NDArray[np.generic]) -> NDArray[np.float32]:
    """[1, n, vocab] -> a copy of the last [vocab]."""
    return np.array(logits[0, -1], np.float32)


class NpusimSteps:
    """A request of npusim. host_shares: of every step, the part that was not the compiled graph."""

    def __init__(self, conversation: Conversation, *, prefill: bool = True) -> None:
        """prefill False: random rows instead of a computed context; a step costs the same."""
        self._context, self._num_steps = conversation.context, conversation.num_steps
        config = {**conversation.lengths, **dict(conversation.settings)}
        self.compiled = npusim.compile_model(conversation.path, config)
        self.request = self.compiled.create_infer_request()
        self._token = np.full((1, 1), TOKEN)
        self.host_shares: list[float] = []
        if prefill:
            self.request.infer({"input_ids": np.full((1, self._context), TOKEN)})
        else:
            self._fill()

    def prepare(self, calls: int) -> None:
        """Take the tokens back where so many more do not fit."""
        if self.request.num_stored_tokens + calls > self.request.capacity:
            self._restart()

    def __call__(self) -> None:
        began = time.perf_counter()
        self.request.infer({"input_ids": self._token}, share_outputs=True)
        self.host_shares.append(1 - self.request.graph_seconds / (time.perf_counter() - began))

    def logits(self) -> NDArray[np.float32]:
        """[vocab] of the last step."""
        return last_row(self.request.get_tensor("logits").data)

    def _restart(self) -> None:
        if self.request.can_trim(self._context):
            self.request.trim(self._context)
        else:
            self._fill()

    def _fill(self) -> None:
        """Store `context` random rows, written as a block of so many tokens would be."""
        rng = np.random.default_rng(2)
        kv = self.request.kv
        for first in range(0, self._context, _FILL_ROWS):
            length = min(_FILL_ROWS, self._context - first)
            arrays = tuple(
                rng.standard_normal(
                    (*group.past.shape[:2], length, group.past.shape[3]), dtype=np.float32
                ).astype(group.past.dtype)
                for group in kv.groups
            )
            kv.settle(first)
            kv.commit(first, BlockRows(arrays=arrays, first=0, length=length))


class OrtSteps:
    """ONNX Runtime with one buffer per cache tensor; attention_mask grows by one each step."""

    def __init__(self, conversation: Conversation) -> None:
        self._context = self._stored = conversation.context
        self._capacity = conversation.context + conversation.num_steps
        self._session = OrtSession(conversation.path)
        spec = read_spec(read_model(conversation.path))
        self._has_positions = spec.has_position_ids
        self._vocab_size = spec.vocab_size
        for layer in spec.layers:
            # ONNX Runtime takes no buffer below the window, however short the conversation.
            rows = max(self._capacity, layer.local_window_size)
            shape = (1, layer.kv_num_heads, rows, layer.cache_channels)
            buffer = np.zeros(shape, CACHE_ELEMENTS[layer.cache_type].dtype)
            self._session.bind(layer.past_key, buffer, shared_output=layer.present_key)
            self._session.bind(layer.past_value, buffer, shared_output=layer.present_value)
        self._feed(0, self._context)

    def prepare(self, calls: int) -> None:
        """Count from the context again where so many more do not fit."""
        if self._stored + calls > self._capacity:
            self._stored = self._context
        self._session.bind("input_ids", np.full((1, 1), TOKEN))
        self._session.bind_output("logits", (1, 1, self._vocab_size))

    def __call__(self) -> None:
        self._bind_lengths(self._stored, 1)
        self._session.run()
        self._stored += 1

    def logits(self) -> NDArray[np.float32]:
        """[vocab] of the last step."""
        return last_row(self._session.output("logits"))

    def _feed(self, first: int, length: int) -> None:
        self._session.bind("input_ids", np.full((1, length), TOKEN))
        self._session.bind_output("logits", (1, length, self._vocab_size))
        self._bind_lengths(first, length)
        self._session.run()

    def _bind_lengths(self, first: int, length: int) -> None:
        self._session.bind("attention_mask", np.ones((1, first + length), np.int64))
        if self._has_positions:
            self._session.bind("position_ids", np.arange(first, first + length)[None])


class NPUWSteps:
    """The real NPUW; a conversation starts over with its prompt, as NPUW cannot take many steps back."""

    def __init__(self, conversation: Conversation) -> None:
        compiled = npuw.compile_model(conversation.path, conversation.lengths)
        self._request = compiled.create_infer_request()
        self._prompt = np.full((1, conversation.context), TOKEN)
        self._token = np.full((1, 1), TOKEN)
        self._logits = self._request.infer({"input_ids": self._prompt})["logits"]

    def prepare(self, calls: int) -> None:
        """Feed the prompt anew where so many more steps do not fit."""
        if self._request.num_stored_tokens + calls > self._request.capacity:
            self._request.infer(
                {"input_ids": self._prompt, "position_ids": np.arange(self._prompt.size)[None]}
            )

    def __call__(self) -> None:
        self._logits = self._request.infer({"input_ids": self._token}, share_outputs=True)["logits"]

    def logits(self) -> NDArray[np.float32]:
        """[vocab] of the last step."""
        return last_row(self._logits)
