"""What every request has in common: the interface of `openvino.InferRequest`, and a record of each call."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import openvino as ov

from npusim.errors import InputError, NpuSimError
from npusim.kv_manager import CacheGroup
from npusim.static_graph import LogitsArray
from npusim.step_inputs import (
    INPUT_NAMES,
    Port,
    StepInputs,
    TensorLike,
    as_tensor,
    named_inputs,
    read_step,
    tensor_name,
)
from npusim.step_recorder import CallTimes, record_call
from npusim.trace import StepRecord


class InferRequest(ABC):
    """One conversation, call by call; a subclass runs the calls.

    A call of more than one token at position 0 is a prefill and starts the conversation; any other is a
    generate step. A first position below num_stored_tokens trims to it.

    step_listener, where set, is handed a StepRecord after each call, however it ended, apart from calls whose
    inputs cannot be read or contradict each other, and from interrupts.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, TensorLike] = {}
        self._logits: LogitsArray | None = None
        self._graph_seconds = 0.0
        self._stored_after_call = 0
        self._calling = threading.Lock()
        self.step_listener: Callable[[StepRecord], None] | None = None

    @property
    @abstractmethod
    def num_stored_tokens(self) -> int:
        """P: tokens of the conversation that the next step attends to."""

    @property
    def graph_seconds(self) -> float:
        """Seconds that the last call spent inside the compiled graph."""
        return self._graph_seconds

    def set_tensor(self, name: str | Port, tensor: TensorLike) -> None:
        """Give an input for the calls to come: input_ids, attention_mask or position_ids, by name or port.

        A tensor is read when `infer` runs, so one that shares memory may be refilled in place.
        """
        self._tensors[tensor_name(name, INPUT_NAMES)] = tensor

    def get_tensor(self, name: str | Port) -> ov.Tensor:
        """The logits of the last call, float32 [1, n, vocab], or an input as it was set.

        The logits share memory with the graph: the next call overwrites them. An input shares memory with
        the tensor or (contiguous) array that was set.
        """
        known = tensor_name(name, ("logits", *INPUT_NAMES))
        if known == "logits":
            if self._logits is None:
                raise InputError("logits are not there yet; call infer first")
            return ov.Tensor(self._logits, shared_memory=True)
        if known not in self._tensors:
            there = ", ".join(sorted(self._tensors)) or "none"
            raise InputError(f"tensor {known!r} was not set; call set_tensor first (set so far: {there})")
        return as_tensor(known, self._tensors[known])

    def infer(
        self, inputs: Mapping[str | Port, TensorLike] | None = None, *, share_outputs: bool = False
    ) -> dict[str, LogitsArray]:
        """Run one call and return {"logits": float32 [1, n, vocab]}, one row per token given.

        Of a prompt there may be fewer, where the class says so. `inputs` hold for this call alone and go
        before what `set_tensor` set. With share_outputs the logits are a view that the next call overwrites.

        Raises InputError, CapacityError or TrimError before anything changes, NpuSimError while another call
        of this request is under way (in another thread, or around the step_listener that makes this one);
        what a call that fails in its midst leaves, the class says.
        """
        given: Mapping[str, TensorLike] = self._tensors
        if inputs is not None:
            named = named_inputs(inputs)
            given = {**given, **named} if given else named
        if self._calling.locked():
            raise NpuSimError("the request is busy with another call; a request makes one call at a time")
        with self._calling:  # not acquired by hand: an interrupt right after that would leave it acquired
            stored = self.num_stored_tokens
            step = read_step(given, num_stored_tokens=stored)
            self._graph_seconds = 0.0
            self._logits = self._run_recorded(step, stored)
            return {"logits": self._logits if share_outputs else self._logits.copy()}

    @abstractmethod
    def reset_state(self) -> None:
        """Forget the conversation. Tensors stay, as in OpenVINO."""

    @abstractmethod
    def _run(self, step: StepInputs, stored: int) -> LogitsArray:
        """Check and run a call, adding what it spends in the graph to _graph_seconds; logits as a view.

        stored: tokens that are stored before it.
        """

    @property
    @abstractmethod
    def _cache_groups(self) -> tuple[CacheGroup, ...]:
        """Where the last call put its rows; empty where the runtime does not say."""

    def _run_recorded(self, step: StepInputs, stored: int) -> LogitsArray:
        """Run a step and hand its record to the listener, if there is one, however the step ends.

        stored: tokens that are stored before it.
        """
        began, stored_before = time.perf_counter(), self._stored_after_call
        logits: LogitsArray | None = None
        try:
            logits = self._run(step, stored)
            return logits
        finally:
            stored_now = self.num_stored_tokens
            if logits is not None or stored_now != stored:
                # Before the listener, which may raise. A refused call leaves the count to the next one, which
                # then still says what a trim before the two took.
                self._stored_after_call = stored_now
            if self.step_listener is not None:
                seconds = time.perf_counter() - began
                outcome = sys.exception() if logits is None else logits
                self._tell(self.step_listener, step, stored_before, seconds, outcome)

    def _tell(
        self,
        listener: Callable[[StepRecord], None],
        step: StepInputs,
        stored_before: int,
        seconds: float,
        outcome: LogitsArray | BaseException | None,
    ) -> None:
        """Hand the record of a call to the listener, apart from one that was interrupted."""
        if isinstance(outcome, np.ndarray | Exception):
            times = CallTimes(host=seconds - self._graph_seconds, graph=self._graph_seconds)
            groups = self._cache_groups
            listener(record_call(step, groups, stored_before=stored_before, times=times, outcome=outcome))
