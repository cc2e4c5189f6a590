"""One conversation: the request that callers drive like an `openvino.InferRequest`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, assert_never

import numpy as np
import openvino as ov

from npusim.cache_element import CACHE_ELEMENTS
from npusim.cache_plan import allocate_variants, group_caches
from npusim.config_choices import PrefillHint
from npusim.errors import CapacityError, InputError
from npusim.kv_manager import KVManager
from npusim.sanitizer import KVSanitizer
from npusim.stage import Stage
from npusim.static_graph import LogitsArray, StaticGraph, TokenArray
from npusim.step_inputs import (
    INPUT_NAMES,
    Port,
    StepInputs,
    TensorLike,
    as_tensor,
    check_step,
    named_inputs,
    read_step,
    tensor_name,
)
from npusim.step_recorder import CallTimes, record_call
from npusim.trace import StepRecord

if TYPE_CHECKING:
    from npusim.compiled_llm import CompiledLLM


class LLMInferRequest:
    """Runs prefill and generate steps over a KV cache of its own; made by `CompiledLLM`.

    A call of more than one token at position 0 is a prefill and starts a conversation; any other is a
    generate step of 1..max_generation_tokens tokens. A first position below num_stored_tokens trims to it.

    step_listener, where set, is handed a StepRecord after each call, however it ended, apart from calls whose
    inputs cannot be read or contradict each other, and from interrupts.
    """

    def __init__(self, compiled: CompiledLLM) -> None:
        config = compiled.config
        self._spec = compiled.spec
        self._config = config
        members = group_caches(compiled.caches)
        variants = allocate_variants(compiled.variants)
        self.kv = KVManager(variants, commit=config.commit)
        elements = tuple(CACHE_ELEMENTS[group[0].cache_type] for group in members)
        self._sanitizer = KVSanitizer(self.kv, elements) if config.sanitize else None
        whole = config.prefill_hint is PrefillHint.STATIC
        self._prefill = StaticGraph(
            compiled.compiled_prefill,
            self._spec,
            members,
            variants[config.capacity],
            0 if whole else config.capacity,
        )
        self._generates = {
            capacity: StaticGraph(graph, self._spec, members, variants[capacity], capacity)
            for capacity, graph in compiled.compiled_generates.items()
        }
        self._tensors: dict[str, TensorLike] = {}
        self._logits: LogitsArray | None = None
        self._graph_seconds = 0.0
        self._stored_after_call = 0
        self.step_listener: Callable[[StepRecord], None] | None = None

    @property
    def num_stored_tokens(self) -> int:
        """P: tokens of the conversation that the next step attends to."""
        return self.kv.num_stored_tokens

    @property
    def capacity(self) -> int:
        """C: the most tokens that can be stored."""
        return self._config.capacity

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt."""
        length = self._config.max_prompt_len
        assert length is not None, "a compiled config is fitted"
        return length

    @property
    def max_generation_tokens(self) -> int:
        """Rows of the generate graph: the most tokens of one generate step."""
        return self._config.max_generation_token_len

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._spec.vocab_size

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV buffers, as allocated."""
        return self.kv.nbytes

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
            there = ", ".join([*sorted(self._tensors), "logits"])
            raise InputError(
                f"tensor {known!r} was not set; set it first, or read one that is there: {there}"
            )
        return as_tensor(known, self._tensors[known])

    def infer(
        self, inputs: Mapping[str | Port, TensorLike] | None = None, *, share_outputs: bool = False
    ) -> dict[str, LogitsArray]:
        """Run one call and return {"logits": float32 [1, n, vocab]}, one row per token given.

        `inputs` hold for this call alone and go before what `set_tensor` set. With share_outputs the logits
        are a view that the next call overwrites.

        Raises InputError, CapacityError or TrimError before anything changes. ModelError, where a KV row that
        is to be stored is infinite or NaN, and an exception of the runtime leave the state of the last
        completed step (for a prefill, of the last chunk).
        """
        given = self._tensors if inputs is None else {**self._tensors, **named_inputs(inputs)}
        step = read_step(given, num_stored_tokens=self.kv.num_stored_tokens)
        self._graph_seconds = 0.0
        self._logits = self._run(step) if self.step_listener is None else self._run_recorded(step)
        self._stored_after_call = self.kv.num_stored_tokens
        return {"logits": self._logits if share_outputs else self._logits.copy()}

    def can_trim(self, num_tokens: int) -> bool:
        """Whether `trim(num_tokens)` would be exact; never raises."""
        return self.kv.can_trim(num_tokens)

    def takes_back_blocks(self, *, block_size: int, num_tokens: int) -> bool:
        """Whether every rewind inside the newest block of up to block_size tokens is exact.

        At every length up to num_tokens, and at least the block's first token is kept.
        """
        return self.kv.takes_back_blocks(block_size=block_size, num_tokens=num_tokens)

    def trim(self, num_tokens: int) -> int:
        """Keep the first num_tokens tokens of the conversation; return how many were removed.

        Raises TrimError, with nothing changed, where a layer no longer holds the rows of the new end.
        """
        return self.kv.trim(num_tokens)

    def reset_state(self) -> None:
        """Forget the conversation: no tokens, zeroed buffers. Tensors stay, as in OpenVINO."""
        self.kv.reset()
        self._stored_after_call = 0

    def _run(self, step: StepInputs) -> LogitsArray:
        check_step(
            step, num_stored_tokens=self.kv.num_stored_tokens, num_embeddings=self._spec.num_embeddings
        )
        self._check_fits(step)
        match step.stage:
            case Stage.PREFILL:
                return self._run_prefill(step.tokens)
            case Stage.GENERATE:
                capacity = self._capacity_of_step(step.start)
                return self._run_block(self._generates[capacity], step.tokens, step.start, capacity)
            case _:
                assert_never(step.stage)

    def _run_recorded(self, step: StepInputs) -> LogitsArray:
        """Run a step and hand its record to the listener, however the step ends."""
        began = time.perf_counter()
        logits: LogitsArray | None = None
        try:
            logits = self._run(step)
            return logits
        finally:
            outcome = sys.exception() if logits is None else logits
            if self.step_listener is not None and isinstance(outcome, np.ndarray | Exception):
                self.step_listener(self._record(step, outcome, time.perf_counter() - began))

    def _record(self, step: StepInputs, outcome: LogitsArray | Exception, seconds: float) -> StepRecord:
        return record_call(
            step,
            self.kv.groups,
            stored_before=self._stored_after_call,
            times=CallTimes(host=seconds - self._graph_seconds, graph=self._graph_seconds),
            outcome=outcome,
        )

    def _check_fits(self, step: StepInputs) -> None:
        length = len(step.tokens)
        match step.stage:
            case Stage.PREFILL:
                if length > self.max_prompt_len:
                    raise CapacityError(
                        f"a prompt of {length} tokens; NPUW_LLM_MAX_PROMPT_LEN is {self.max_prompt_len}, "
                        "compile with more or shorten the prompt"
                    )
            case Stage.GENERATE:
                self._check_block_fits(length, step.start)
            case _:
                assert_never(step.stage)
        self.kv.check_trim(step.start)

    def _check_block_fits(self, length: int, start: int) -> None:
        if length > self.max_generation_tokens:
            raise CapacityError(
                f"a block of {length} tokens at position {start}; NPUW_LLM_MAX_GENERATION_TOKEN_LEN is "
                f"{self.max_generation_tokens}, compile with more or split the block; a new conversation "
                "begins at position 0: give position_ids, or call reset_state first"
            )
        if start + length > self.capacity:
            raise CapacityError(
                f"cache full: {length} tokens at position {start} need {start + length} slots, the capacity "
                f"is {self.capacity}; compile with more NPUW_LLM_MIN_RESPONSE_LEN, or trim or reset"
            )

    def _run_prefill(self, tokens: TokenArray) -> LogitsArray:
        """The prompt in chunks of the prefill graph's rows (one chunk where it is the whole prompt)."""
        rows = self._prefill.num_rows
        if len(tokens) <= rows:
            return self._run_block(self._prefill, tokens, 0, self.capacity)
        logits = np.empty((1, len(tokens), self.vocab_size), np.float32)
        for start in range(0, len(tokens), rows):
            chunk = tokens[start : start + rows]
            rows_of_chunk = self._run_block(self._prefill, chunk, start, self.capacity)
            logits[:, start : start + len(chunk)] = rows_of_chunk
        return logits

    def _capacity_of_step(self, start: int) -> int:
        """Of the smallest generate graph that has room for a block of the largest size at `start`.

        Of the largest size, whatever this one's: else blocks of changing length, as drafting makes them,
        would send the rows to and fro at the border between two graphs.
        """
        return self.kv.smallest_capacity(min(start + self.max_generation_tokens, self.capacity))

    def _run_block(self, graph: StaticGraph, tokens: TokenArray, start: int, capacity: int) -> LogitsArray:
        """Plan, run, commit: one block at `start`, its rows stored, its logits as a view.

        capacity: what the graph is compiled for, of those that `KVManager.arrange` knows.
        """
        graph.load(tokens, start)
        self.kv.arrange(capacity)
        self.kv.settle(start)
        if self._sanitizer is not None and graph.has_past:
            self._sanitizer.run(graph, start, len(tokens))
        else:
            graph.run()
        self._graph_seconds += graph.graph_seconds
        self.kv.commit(start, graph.rows(len(tokens)))
        return graph.logits(len(tokens))
