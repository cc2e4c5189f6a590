"""A target around another one, for what watches or times a conversation."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from npusim.speculative.target import KnowsRewinds, Target, TokenArray


class WrappedTarget:
    """Hands everything on to the target inside; whoever watches overrides the calls that matter to it."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner

    @property
    def capacity(self) -> int:
        """As the inner target's."""
        return self._inner.capacity

    @property
    def max_generation_tokens(self) -> int:
        """As the inner target's."""
        return self._inner.max_generation_tokens

    @property
    def max_prompt_len(self) -> int:
        """As the inner target's."""
        return self._inner.max_prompt_len

    @property
    def vocab_size(self) -> int:
        """As the inner target's."""
        return self._inner.vocab_size

    @property
    def num_stored_tokens(self) -> int:
        """As the inner target's."""
        return self._inner.num_stored_tokens

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, npt.NDArray[np.floating]]:
        """As the inner target's."""
        return self._inner.infer(inputs, share_outputs=share_outputs)

    def can_trim(self, num_tokens: int) -> bool:
        """As the inner target's."""
        return self._inner.can_trim(num_tokens)

    def takes_back_blocks(self, *, block_size: int, num_tokens: int) -> bool:
        """As the inner target's; True where that cannot say."""
        inner = self._inner
        if not isinstance(inner, KnowsRewinds):
            return True
        return inner.takes_back_blocks(block_size=block_size, num_tokens=num_tokens)

    def trim(self, num_tokens: int) -> int:
        """As the inner target's."""
        return self._inner.trim(num_tokens)

    def reset_state(self) -> None:
        """As the inner target's."""
        self._inner.reset_state()
