"""One conversation: the request that callers drive like an `openvino.InferRequest`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npusim.cache_element import CACHE_ELEMENTS
from npusim.cache_plan import allocate_variants, group_caches
from npusim.config_choices import PrefillHint
from npusim.errors import CapacityError
from npusim.infer_request import InferRequest
from npusim.kv_manager import CacheGroup, KVManager
from npusim.sanitizer import KVSanitizer
from npusim.static_graph import LogitsArray, StaticGraph, TokenArray
from npusim.step_inputs import StepInputs, check_step

if TYPE_CHECKING:
    from npusim.compiled_llm import CompiledLLM


class LLMInferRequest(InferRequest):
    """Runs prefill and generate steps over a KV cache of its own; made by `CompiledLLM`.

    A generate step has 1..max_generation_tokens tokens. ModelError, where a KV row that is to be stored is
    infinite or NaN, and an exception of the runtime leave the state of the last completed step (for a
    prefill, of the last chunk).
    """

    def __init__(self, compiled: CompiledLLM) -> None:
        super().__init__()
        config = compiled.config
        self._spec = compiled.spec
        self._capacity, self._max_block = config.capacity, config.max_generation_token_len
        self._max_prompt_len = config.max_prompt_len
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

    @property
    def num_stored_tokens(self) -> int:
        """P: tokens of the conversation that the next step attends to."""
        return self.kv.num_stored_tokens

    @property
    def capacity(self) -> int:
        """C: the most tokens that can be stored."""
        return self._capacity

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt."""
        assert self._max_prompt_len is not None, "a compiled config is fitted"
        return self._max_prompt_len

    @property
    def max_generation_tokens(self) -> int:
        """Rows of the generate graph: the most tokens of one generate step."""
        return self._max_block

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._spec.vocab_size

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV buffers, as allocated."""
        return self.kv.nbytes

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

    @property
    def _cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.kv.groups

    def _run(self, step: StepInputs, stored: int) -> LogitsArray:
        check_step(step, num_stored_tokens=stored, num_embeddings=self._spec.num_embeddings)
        tokens, start, _ = step
        if step.is_prompt:
            self._check_prompt_fits(len(tokens))
            return self._run_prefill(tokens)
        length = len(tokens)
        if length > self._max_block or start + length > self._capacity:
            raise self._too_large(length, start)
        if start < stored:
            self.kv.check_trim(start)
        # Of the smallest graph with room for a block of the largest size, whatever this one's: else blocks of
        # changing length, as drafting makes them, would send the rows to and fro at the border of two graphs.
        capacity = self.kv.smallest_capacity(min(start + self._max_block, self._capacity))
        return self._run_block(self._generates[capacity], tokens, start, capacity)

    def _check_prompt_fits(self, length: int) -> None:
        if length > self.max_prompt_len:
            raise CapacityError(
                f"a prompt of {length} tokens; NPUW_LLM_MAX_PROMPT_LEN is {self.max_prompt_len}, "
                "compile with more or shorten the prompt"
            )

    def _too_large(self, length: int, start: int) -> CapacityError:
        if length > self._max_block:
            return CapacityError(
                f"a block of {length} tokens at position {start}; NPUW_LLM_MAX_GENERATION_TOKEN_LEN is "
                f"{self._max_block}, compile with more or split the block; a new conversation "
                "begins at position 0: give position_ids, or call reset_state first"
            )
        return CapacityError(
            f"cache full: {length} tokens at position {start} need {start + length} slots, the capacity "
            f"is {self._capacity}; compile with more NPUW_LLM_MIN_RESPONSE_LEN, or trim or reset"
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
