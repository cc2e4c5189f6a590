"""The lengths that NPUW really compiles for, from those it is asked for: integers only.

Measured on openvino 2026.4.1 and checked against the installed version by `tools/npuw_grid.py`.
"""

from dataclasses import dataclass

from npusim.errors import ConfigError

LENGTH_STEP = 64
"""MAX_PROMPT_LEN and MIN_RESPONSE_LEN are rounded up to a multiple of this."""

BLOCK_STEP = 8
"""MAX_GENERATION_TOKEN_LEN above 1 is rounded up to a multiple of this."""

DEFAULT_CHUNK_SIZE = 1024


def round_up(length: int, step: int) -> int:
    """The least multiple of `step` that is at least `length`."""
    return -(-length // step) * step


@dataclass(frozen=True, kw_only=True)
class NPUWLengths:
    """What NPUW compiles for.

    max_prompt_len: longest prompt taken. capacity: tokens that can be stored. max_generation_tokens: rows of
    the generate graph, and of logits. chunk_size: rows of the prefill graph.
    """

    max_prompt_len: int
    capacity: int
    max_generation_tokens: int
    chunk_size: int

    @property
    def chunked(self) -> bool:
        """Whether the longest prompt is computed in more than one piece."""
        return self.chunk_size < self.max_prompt_len

    def prefill_rows(self, num_tokens: int) -> int:
        """How many of the newest rows of logits a prompt of `num_tokens` yields."""
        last_piece = (num_tokens - 1) % self.chunk_size + 1
        return min(last_piece, self.max_generation_tokens)


def npuw_lengths(
    *,
    max_prompt_len: int,
    min_response_len: int,
    max_generation_token_len: int = 1,
    prefill_chunk_size: int = DEFAULT_CHUNK_SIZE,
    whole_prefill: bool = False,
) -> NPUWLengths:
    """The lengths that come of a configuration.

    The graph of a block takes capacity + block slots, and these are prompt + response: so a larger block
    means a smaller capacity. A chunk below the prompt must be a power of two (ConfigError), and the prompt
    is rounded up to it; a chunk of 0 is none.
    """
    prompt = round_up(_positive("NPUW_LLM_MAX_PROMPT_LEN", max_prompt_len), LENGTH_STEP)
    response = round_up(_positive("NPUW_LLM_MIN_RESPONSE_LEN", min_response_len), LENGTH_STEP)
    block = _positive("NPUW_LLM_MAX_GENERATION_TOKEN_LEN", max_generation_token_len)
    if block > 1:
        block = round_up(block, BLOCK_STEP)
    chunk = prompt
    if not whole_prefill and 0 < prefill_chunk_size < prompt:
        if prefill_chunk_size & (prefill_chunk_size - 1):
            raise ConfigError(
                f"NPUW_LLM_PREFILL_CHUNK_SIZE={prefill_chunk_size}; NPUW takes powers of two, or a chunk of "
                f"at least the prompt ({prompt} after rounding)"
            )
        chunk = prefill_chunk_size
        prompt = round_up(prompt, chunk)
    capacity = prompt + response - block
    if capacity < 1:
        raise ConfigError(
            f"NPUW_LLM_MAX_GENERATION_TOKEN_LEN={max_generation_token_len} leaves no room in the "
            f"{prompt + response} slots of prompt and response; lower it"
        )
    return NPUWLengths(
        max_prompt_len=prompt, capacity=capacity, max_generation_tokens=block, chunk_size=chunk
    )


def _positive(key: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{key}={value}; at least 1 is needed")
    return value
