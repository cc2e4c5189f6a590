"""A target that runs a reference beside the simulator and keeps how far the logits of each call differ."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npusim.native import NativeModel
from npusim.speculative.target import Target, TokenArray
from npusim.speculative.wrapped import WrappedTarget


@dataclass(frozen=True, kw_only=True)
class StepParity:
    """One call: which positions it fed, and the greatest absolute logits difference to the reference."""

    position: int
    num_tokens: int
    max_abs_difference: float


class ParityTarget(WrappedTarget):
    """Wraps a request, feeds the reference the same tokens at the same positions, records the difference.

    It speaks the request interface itself, so anything that can drive a request can be watched through it.
    """

    def __init__(self, request: Target, reference: NativeModel) -> None:
        """Both must be at the start of a conversation."""
        super().__init__(request)
        self._reference = reference
        self.steps: list[StepParity] = []

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, NDArray[np.floating]]:
        """Run the request, then the reference on the same tokens, and record the difference.

        inputs: input_ids and position_ids, both int64 [1, n].
        """
        outputs = super().infer(inputs, share_outputs=share_outputs)
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

    def reset_state(self) -> None:
        """Both forget the conversation; after a trim the reference follows at the next call."""
        super().reset_state()
        self._reference.reset()
