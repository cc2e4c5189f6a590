"""Where drafts come from: a smaller model, the text itself, or a script.

All have one method, `propose(tokens, num_tokens)`: given the whole sequence so far, guess how it goes on.
A guess may be short or empty, never longer than asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice
from operator import ne
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from npusim.errors import ConfigError, InputError
from npusim.speculative.target import LogitRows, Target, feed
from npusim.whole_number import shown, whole_number


@runtime_checkable
class Drafter(Protocol):
    """Guesses the continuation of a sequence."""

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that may follow `tokens` (prompt and all that was emitted)."""


class DraftModel:
    """Drafts by the greedy choice of another model, which keeps a KV cache of its own.

    The model's cache is brought in step on every call: what it shares with the sequence stays, the rest is
    trimmed, what is missing is fed. So a draft is that of a freshly prefilled model, whatever came before.
    Near the end of its capacity the model drafts fewer tokens, at the end none.

    The request belongs to the drafter: one that was used elsewhere in between is noticed by its count of
    stored tokens and prefilled anew, but not if the count happens to be the same. InputError for what is no
    request.
    """

    def __init__(self, request: Target) -> None:
        if not isinstance(request, Target):
            raise InputError(
                f"a draft model is a request, got a {type(request).__name__}; compile the model and give "
                "what create_infer_request returns"
            )
        self._request = request
        self._consumed: list[int] = []

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows are 0 <= id < vocab_size."""
        return self._request.vocab_size

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        if not tokens:
            raise InputError("a draft needs at least one token to continue, got none")
        # k drafts take k - 1 more stored rows than the sequence itself: the last one is never fed back.
        wanted = min(num_tokens, self._request.capacity - len(tokens) + 1)
        if wanted < 1:
            return []
        row = self._catch_up(tokens)
        draft = [int(row.argmax())]
        while len(draft) < wanted:
            row = self._feed(draft[-1:], len(self._consumed))[-1]
            draft.append(int(row.argmax()))
        return draft

    def _catch_up(self, tokens: Sequence[int]) -> npt.NDArray[np.floating]:
        """Bring the cache to exactly `tokens`; the logits of the last one, [vocab_size]."""
        request = self._request
        start = self._shared_prefix(tokens)
        if start < request.num_stored_tokens and not request.can_trim(start):
            start = 0  # rows that the rewind needs are gone; a prefill needs none
        while True:
            size = request.max_prompt_len if start == 0 else request.max_generation_tokens
            rows = self._feed(tokens[start : start + size], start)
            start = len(self._consumed)
            if start == len(tokens):
                last: npt.NDArray[np.floating] = rows[-1]
                return last

    def _shared_prefix(self, tokens: Sequence[int]) -> int:
        """Leading tokens that need not be fed. The last token always is: its logits are the first draft."""
        if self._request.num_stored_tokens != len(self._consumed):
            return 0
        limit = min(len(self._consumed), len(tokens) - 1)
        return min(limit, next(compress(count(), map(ne, self._consumed, tokens)), limit))

    def _feed(self, tokens: Sequence[int], position: int) -> LogitRows:
        rows = feed(self._request, tokens, position)
        self._consumed[position:] = tokens
        return rows


@dataclass(frozen=True)
class PromptLookup:
    """Drafts by copying: what followed the last few tokens when they occurred before.

    The longest tail of up to `max_ngram` tokens that occurs earlier decides. Of its occurrences the newest
    that is followed by enough tokens is copied, else the oldest, which is followed by most.
    """

    max_ngram: int = 3

    def __post_init__(self) -> None:
        size = whole_number(self.max_ngram)
        if size is None or size < 1:
            raise ConfigError(
                f"max_ngram is {shown(self.max_ngram)}; a lookup needs a tail of 1 or more tokens"
            )
        object.__setattr__(self, "max_ngram", size)

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        sequence = np.asarray(tokens)
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            ends = _earlier_ends(sequence, size)
            if ends.size:
                enough = ends[ends + num_tokens <= len(tokens)]
                start = int(enough[-1] if enough.size else ends[0])
                return list(tokens[start : start + max(num_tokens, 0)])
        return []


def _earlier_ends(sequence: npt.NDArray[np.integer], size: int) -> npt.NDArray[np.intp]:
    """Where earlier occurrences of the last `size` items of `sequence` end (index one past), ascending."""
    starts = len(sequence) - size
    matches = np.ones(starts, dtype=bool)
    for offset in range(size):
        matches &= sequence[offset : offset + starts] == sequence[starts + offset]
    return np.flatnonzero(matches) + size


@dataclass(frozen=True)
class Scripted:
    """Drafts by a function of the sequence and the number wanted: for tests, and for drafters of your own."""

    script: Callable[[Sequence[int], int], Sequence[int]]

    def __post_init__(self) -> None:
        if not callable(self.script):
            raise InputError(f"script is {self.script!r}; a function of the tokens and a number is needed")

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        return list(islice(self.script(tokens, num_tokens), num_tokens + 1))  # enough to see one too many
