"""The calls that a comparison makes: recorded from the simulator once, made again on everything else."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from npusim.compare.taps import Rows
from npusim.speculative import Drafter, Step, generate
from npusim.speculative.target import Target, TokenArray
from npusim.speculative.wrapped import WrappedTarget
from npusim.stage import Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """Tokens fed at consecutive positions from `position` on, and the simulator's logits [n, vocab].

    accepted of `proposed` draft tokens in the block were right; the next call takes the others back.
    """

    tokens: tuple[int, ...]
    position: int
    proposed: int
    accepted: int
    logits: Rows = field(repr=False)

    @property
    def stop(self) -> int:
        """One past the last position fed."""
        return self.position + len(self.tokens)

    @property
    def shown_positions(self) -> str:
        """Of its tokens, for people: "24", or "24-27"."""
        return str(self.position) if len(self.tokens) == 1 else f"{self.position}-{self.stop - 1}"

    @property
    def stage(self) -> Stage:
        """Which graph ran it."""
        is_prompt = self.position == 0 and len(self.tokens) > 1
        return Stage.PREFILL if is_prompt else Stage.GENERATE


def record_calls(
    target: Target,
    prompt: Sequence[int],
    *,
    num_steps: int,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 4,
) -> list[Call]:
    """Continue a prompt greedily by `num_steps` generate steps, fewer where the capacity ends before.

    Raises what `npusim.generate` raises.
    """
    recorder = _Recorder(target, num_steps)
    block = 1 + (num_draft_tokens if drafter is not None else 0)
    with suppress(_EnoughSteps):
        generate(
            recorder,
            prompt,
            max_new_tokens=1 + num_steps * block,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            on_step=recorder.note,
        )
    return recorder.calls


class _EnoughSteps(Exception):  # noqa: N818 - no error: ends a generation that is bounded by tokens
    """As many steps as asked for have been made."""


class _Recorder(WrappedTarget):
    """A target that keeps its calls."""

    def __init__(self, target: Target, num_steps: int) -> None:
        super().__init__(target)
        self._limit = 1 + num_steps
        self._last: tuple[TokenArray, int, Rows] | None = None
        self.calls: list[Call] = []

    def note(self, step: Step) -> None:
        """A step is done: keep its call."""
        assert self._last is not None, "a step follows a call"
        tokens, position, logits = self._last
        self.calls.append(
            Call(
                tokens=tuple(tokens.tolist()),
                position=position,
                proposed=step.proposed,
                accepted=step.accepted,
                logits=logits,
            )
        )
        if len(self.calls) == self._limit:
            raise _EnoughSteps

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, npt.NDArray[np.floating]]:
        outputs = super().infer(inputs, share_outputs=share_outputs)
        position = int(inputs["position_ids"][0, 0])
        self._last = (inputs["input_ids"][0], position, np.array(outputs["logits"][0]))
        return outputs
