"""A target that runs a reference beside the simulator and keeps how far the logits of each call differ."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npusim.native import NativeModel
from npusim.speculative.target import Target, TokenArray


@dataclass(frozen=True, kw_only=True)
class StepParity:
    """One call: which positions it fed, and the greatest absolute logits difference to the reference."""

    position: int
    num_tokens: int
    max_abs_difference: float


class ParityTarget:
    """Wraps a request, feeds the reference the same tokens at the same positions, records the difference.

    It speaks the request interface itself, so anything that can drive a request can be watched through it.
    """

    def __init__(self, request: Target, reference: NativeModel) -> None:
        """Both must be at the start of a conversation."""
        self._request = request
        self._reference = reference
        self.steps: list[StepParity] = []

    @property
    def capacity(self) -> int:
        """As the request's."""
        return self._request.capacity

    @property
    def max_generation_tokens(self) -> int:
        """As the request's."""
        return self._request.max_generation_tokens

    @property
    def max_prompt_len(self) -> int:
        """As the request's."""
        return self._request.max_prompt_len

    @property
    def vocab_size(self) -> int:
        """As the request's."""
        return self._request.vocab_size

    @property
    def num_stored_tokens(self) -> int:
        """As the request's."""
        return self._request.num_stored_tokens

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, NDArray[np.floating]]:
        """Run the request, then the reference on the same tokens, and record the difference.

        inputs: input_ids and position_ids, both int64 [1, n].
        """
        outputs = self._request.infer(inputs, share_outputs=share_outputs)
        tokens = [int(token) for token in inputs["input_ids"][0]]
        position = int(inputs["position_ids"][0, 0])
        self._reference.trim(position)
        expected = self._reference.feed(tokens)  # [1, n, vocab]
        actual = outputs["logits"]  # [1, n or fewer, vocab]: a target may keep the newest rows only
        difference = np.abs(actual - expected[:, -actual.shape[1] :])
        # NaN must not pass for a small number.
        worst = float(difference.max()) if np.isfinite(difference).all() else float("inf")
        self.steps.append(StepParity(position=position, num_tokens=len(tokens), max_abs_difference=worst))
        return outputs

    def can_trim(self, num_tokens: int) -> bool:
        """As the request's."""
        return self._request.can_trim(num_tokens)

    def trim(self, num_tokens: int) -> int:
        """As the request's; the reference follows at the next call."""
        return self._request.trim(num_tokens)

    def reset_state(self) -> None:
        """Both forget the conversation."""
        self._request.reset_state()
        self._reference.reset()
