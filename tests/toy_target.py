"""A language model small enough to be certain of: its logits are a hash of the tokens that it holds.

It speaks the request interface and enforces it. A token more, less or different in its cache changes every
later logit, so whoever feeds it wrongly gets other tokens.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from npusim.errors import CapacityError, InputError, TrimError
from npusim.stage import Stage
from npusim.trace import StepRecord, WindowRecord, logits_sha256, visible_span

LogitsOf = Callable[[tuple[int, ...]], npt.NDArray[np.float32]]


@lru_cache(maxsize=200_000)
def hashed_logits(prefix: tuple[int, ...], vocab_size: int, seed: int) -> npt.NDArray[np.float32]:
    digest = hashlib.blake2b(repr((seed, prefix)).encode(), digest_size=4 * vocab_size).digest()
    return (np.frombuffer(digest, dtype=np.uint32) / 2**30 - 2.0).astype(np.float32)


def hashed(*, vocab_size: int, seed: int = 0, context: int = 0) -> LogitsOf:
    """Logits by a hash of the last `context` tokens, 0 for all of them; a short context makes text repeat."""
    return lambda prefix: hashed_logits(prefix[-context:], vocab_size, seed)


@dataclass(frozen=True)
class Call:
    stage: Stage
    position: int
    tokens: tuple[int, ...]
    trimmed: int


class ToyTarget:
    """The request interface over `logits_of`.

    rewind_rows: how far below the highest position ever written a trim may go, None for any distance.
    refuse_calls: numbers (from 0) of the infer calls that raise RuntimeError, as an inference that failed.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 11,
        capacity: int = 64,
        max_generation_tokens: int = 8,
        max_prompt_len: int = 16,
        logits_of: LogitsOf | None = None,
        rewind_rows: int | None = None,
        refuse_calls: frozenset[int] = frozenset(),
    ) -> None:
        self.vocab_size = vocab_size
        self.capacity = capacity
        self.max_generation_tokens = max_generation_tokens
        self.max_prompt_len = max_prompt_len
        self.step_listener: Callable[[StepRecord], None] | None = None
        self.calls: list[Call] = []
        self.stored: list[int] = []
        self._logits_of = logits_of or hashed(vocab_size=vocab_size)
        self._rewind_rows = rewind_rows
        self._refuse_calls = refuse_calls
        self._num_infers = 0
        self._high_water = 0
        self._recorded_length = 0

    @property
    def num_stored_tokens(self) -> int:
        return len(self.stored)

    def can_trim(self, num_tokens: int) -> bool:
        if not 0 <= num_tokens <= len(self.stored):
            return False
        unbounded = num_tokens in (0, len(self.stored)) or self._rewind_rows is None
        return unbounded or num_tokens >= self._high_water - self._rewind_rows

    def trim(self, num_tokens: int) -> int:
        if not self.can_trim(num_tokens):
            raise TrimError(f"toy: cannot trim {len(self.stored)} stored tokens to {num_tokens}")
        dropped = len(self.stored) - num_tokens
        del self.stored[num_tokens:]
        return dropped

    def reset_state(self) -> None:
        self.stored.clear()
        self._high_water = 0

    def infer(
        self, inputs: Mapping[str, npt.NDArray[np.int64]], *, share_outputs: bool = False
    ) -> Mapping[str, npt.NDArray[np.float32]]:
        del share_outputs  # the logits are always fresh
        tokens, positions = inputs["input_ids"][0].tolist(), inputs["position_ids"][0].tolist()
        try:
            stage = self._check(tokens, positions)
        except (InputError, CapacityError, TrimError) as error:
            self._record(
                Stage.GENERATE,
                tokens,
                positions,
                trimmed=0,
                logits=None,
                error=type(error).__name__,
            )
            raise
        self._num_infers += 1
        if self._num_infers - 1 in self._refuse_calls:
            raise RuntimeError("toy: this inference fails")
        if stage is Stage.PREFILL:
            self.reset_state()
        dropped = self.trim(positions[0])
        logits = []
        for token in tokens:
            self.stored.append(token)
            logits.append(self._logits_of(tuple(self.stored)))
        self._high_water = max(self._high_water, len(self.stored))
        self.calls.append(Call(stage, positions[0], tuple(tokens), dropped))
        result = np.stack(logits)[None]  # [1, n, vocab_size]
        trimmed = self._recorded_length - positions[0] if positions[0] else 0
        self._record(stage, tokens, positions, trimmed=trimmed, logits=result, error="")
        self._recorded_length = len(self.stored)
        return {"logits": result}

    def _check(self, tokens: Sequence[int], positions: Sequence[int]) -> Stage:
        count, start = len(tokens), positions[0]
        if positions != list(range(start, start + count)) or start < 0:
            raise InputError(f"toy: positions {positions} for {count} tokens")
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise InputError(f"toy: tokens {tokens} outside the vocabulary of {self.vocab_size}")
        prefill = count > 1 and start == 0
        most = self.max_prompt_len if prefill else self.max_generation_tokens
        if count > most or start + count > self.capacity:
            raise CapacityError(f"toy: {count} tokens at {start}, at most {most}, capacity {self.capacity}")
        if start > len(self.stored):
            raise InputError(f"toy: a gap, position {start} with {len(self.stored)} stored")
        if not prefill and not self.can_trim(start):
            raise TrimError(f"toy: cannot go back to {start}")
        return Stage.PREFILL if prefill else Stage.GENERATE

    def _record(
        self,
        stage: Stage,
        tokens: Sequence[int],
        positions: Sequence[int],
        *,
        trimmed: int,
        logits: npt.NDArray[np.float32] | None,
        error: str,
    ) -> None:
        if self.step_listener is None:
            return
        window = WindowRecord(
            local_window_size=-1,
            slots_written=((positions[0], positions[-1] + 1),),
            visible=visible_span(positions, -1),
        )
        self.step_listener(
            StepRecord(
                stage=stage,
                tokens=tuple(tokens),
                positions=tuple(positions),
                error=error,
                trimmed=trimmed,
                windows=() if logits is None else (window,),
                host_seconds=0.25,
                graph_seconds=0.5,
                logits_sha256="" if logits is None else logits_sha256(logits),
            )
        )


def plain_greedy(
    logits_of: LogitsOf, prompt: Sequence[int], num_tokens: int, eos: int | None = None
) -> list[int]:
    """Greedy decoding by the definition: no cache, no blocks, the whole prefix each time."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens and (len(tokens) == len(prompt) or tokens[-1] != eos):
        tokens.append(int(np.argmax(logits_of(tuple(tokens)))))
    return tokens[len(prompt) :]
