"""What the speculative harness asks of a model: the request interface, and one way to feed it."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from npusim.errors import InputError, ModelError

TokenArray = npt.NDArray[np.int64]
LogitRows = npt.NDArray[np.floating]  # [n, vocab_size], one row per token fed


@runtime_checkable
class Target(Protocol):
    """A language model with a KV cache of its own: `npusim.LLMInferRequest`, or an adapter with its manners.

    Positions are absolute. A call of several tokens from position 0 is a prefill and starts a conversation
    anew; every other call is a generate step of 1..max_generation_tokens tokens. A first position below
    `num_stored_tokens` trims the cache to it, one above is refused.
    """

    @property
    def capacity(self) -> int:
        """Most tokens that can be stored."""

    @property
    def max_generation_tokens(self) -> int:
        """Most tokens of one generate step."""

    @property
    def max_prompt_len(self) -> int:
        """Most tokens of a prefill."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 <= id < vocab_size."""

    @property
    def num_stored_tokens(self) -> int:
        """Tokens in the cache now, those of a rejected draft included until the next call trims them."""

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, npt.NDArray[np.floating]]:
        """Run `input_ids` and `position_ids` [1, n]; `logits` [1, >= n, vocab_size], the last n rows count.

        With `share_outputs` the logits may be overwritten by the next call.
        """

    def can_trim(self, num_tokens: int) -> bool:
        """Whether `trim(num_tokens)` can be exact."""

    def trim(self, num_tokens: int) -> int:
        """Keep the first `num_tokens` stored tokens; the number dropped."""

    def reset_state(self) -> None:
        """Forget the conversation."""


@runtime_checkable
class KnowsRewinds(Protocol):
    """A target that can say beforehand whether it will be able to drop any rejected draft."""

    def takes_back_blocks(self, *, block_size: int, num_tokens: int) -> bool:
        """Whether all but the first token of a newest block can be dropped, at every length up to num_tokens.

        block_size: tokens of the largest block.
        """


def feed(target: Target, tokens: Sequence[int], position: int) -> LogitRows:
    """Run `tokens` at absolute positions from `position` on; their logits [n, vocab_size], not copied.

    Positions are always given, so the target drops whatever it holds from `position` on.
    Raises ModelError when the target hands back fewer rows than it was given tokens (one is enough for a
    prefill, of which only the last row is of use).
    """
    count = len(tokens)
    if position == 0 and count == 1:
        # This is no prefill to the target but a generate step that trims to 0, and a cache that remembers how
        # far it was once filled would refuse rewinds on that ground for the whole new conversation.
        target.reset_state()
    input_ids = np.array([tokens], dtype=np.int64)  # [1, n]
    position_ids = np.arange(position, position + count, dtype=np.int64)[None]  # [1, n]
    outputs = target.infer({"input_ids": input_ids, "position_ids": position_ids}, share_outputs=True)
    rows: LogitRows = outputs["logits"][0]  # [>= n, vocab_size]
    needed = 1 if position == 0 else count
    if rows.shape[0] < needed:
        raise ModelError(
            f"the target returned {rows.shape[0]} rows of logits for a block of {count} tokens at position "
            f"{position}, and {needed} are needed; verifying a draft takes the logits of every token"
        )
    newest: LogitRows = rows[-count:]
    return newest


def whole_number(value: object) -> int | None:
    """`value` as an int; None for what is no integer: 2.0 and True are none."""
    try:
        return None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def checked_tokens(values: Sequence[int] | npt.NDArray[np.integer], vocab_size: int, what: str) -> list[int]:
    """`values` as Python ints; InputError, naming `what`, unless all are token ids below `vocab_size`."""
    try:
        given = list(values)
        tokens = [index(value) for value in given]
    except TypeError as error:
        raise InputError(f"{what} must be a flat sequence of integers: {error}") from error
    for place, token in enumerate(tokens):
        if isinstance(given[place], bool):
            raise InputError(f"token {place} of {what} is {given[place]}; a token id is an integer")
        if not 0 <= token < vocab_size:
            raise InputError(
                f"token {place} of {what} is {token}, outside the vocabulary of the target: "
                f"0 to {vocab_size - 1}"
            )
    return tokens
