"""Time alternatives side by side: in turn, many times, so that what disturbs one disturbs all."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

NOISE = (0.75, 1.3)
"""A ratio of times between these is no difference: two runs of the same thing differ by as much."""


class Candidate(Protocol):
    """Something that is timed call by call."""

    def prepare(self, calls: int) -> None:
        """Get ready for so many calls; not timed."""

    def __call__(self) -> None:
        """One call."""


class Verdict(Enum):
    """What a ratio of times says."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """rounds of all candidates; in each, `burst` calls of every one after `warmup` that are not counted.

    rest: seconds of quiet before a turn. The threads of a runtime spin for some milliseconds after its last
    call, and would take the cores from the next one.
    """

    rounds: int = 15
    burst: int = 5
    warmup: int = 1
    rest: float = 0.03

    @property
    def calls_per_round(self) -> int:
        """Calls of one candidate in one round."""
        return self.warmup + self.burst


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Seconds of the calls of one candidate, a list per round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def median(self) -> float:
        """Of all calls."""
        return float(np.median(self.rounds))

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of all calls."""
        low, high = np.percentile(self.rounds, (10, 90))
        return float(low), float(high)

    @property
    def best(self) -> float:
        """The smallest."""
        return min(min(calls) for calls in self.rounds)

    @property
    def round_medians(self) -> tuple[float, ...]:
        """One figure per round."""
        return tuple(float(np.median(calls)) for calls in self.rounds)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A quotient of two times: the median over the rounds, and their 10th and 90th percentile.

    Per round, as the two then ran within the same moment. of_best: of the smallest times of each, which a
    busy machine disturbs least.
    """

    median: float
    spread: tuple[float, float]
    of_best: float

    @property
    def verdict(self) -> Verdict:
        """Whether the denominator is faster than the numerator."""
        if NOISE[0] <= self.median <= NOISE[1]:
            return Verdict.NO_DIFFERENCE
        return Verdict.FASTER if self.median > 1 else Verdict.SLOWER


def interleave(
    candidates: Mapping[str, Candidate],
    plan: Plan,
    *,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Run every candidate in every round, in random order; `on_round` is called after each round."""
    order, shuffler = list(candidates), random.Random(seed)
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in order}
    for _ in range(plan.rounds):
        shuffler.shuffle(order)
        for name in order:
            measured[name].append(_burst(candidates[name], plan))
        on_round()
    return {name: Samples(rounds=tuple(measured[name])) for name in candidates}


def ratio_of(slower: Samples, faster: Samples) -> Ratio:
    """How many times longer `slower` took, round by round."""
    quotients = np.divide(slower.round_medians, faster.round_medians)
    low, high = np.percentile(quotients, (10, 90))
    return Ratio(
        median=float(np.median(quotients)),
        spread=(float(low), float(high)),
        of_best=slower.best / faster.best,
    )


def _burst(candidate: Candidate, plan: Plan) -> tuple[float, ...]:
    candidate.prepare(plan.calls_per_round)
    time.sleep(plan.rest)
    for _ in range(plan.warmup):
        candidate()
    return tuple(_seconds(candidate) for _ in range(plan.burst))


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
