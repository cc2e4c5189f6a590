"""How the target accepts a draft and what it emits: greedy, or sampling that keeps its distribution.

Speculative sampling follows Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding" (2023) and Chen et al. (2023), for a proposal that is certain (all its probability on one token d):
accept d with probability p(d), otherwise emit a token from p with d taken out, renormalised. What is emitted
is then distributed as p: P(d) = p(d), and for every other t, (1 - p(d)) * p(t) / (1 - p(d)) = p(t).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from npusim.errors import ConfigError, ModelError
from npusim.speculative.target import LogitRows
from npusim.whole_number import shown, whole_number

Weights = npt.NDArray[np.float64]  # [vocab_size], a probability distribution


class Verifier(Protocol):
    """Judges one draft after the other during one generation; holds the random state, if any."""

    def verify(self, logits: LogitRows, draft: Sequence[int]) -> list[int]:
        """The tokens to emit: the accepted head of `draft` and one of the target's own.

        logits: [len(draft) + 1, vocab_size]; row i is the target's word on what stands at draft[i], the last
        row on what follows the whole draft.
        """


@runtime_checkable
class SamplingRule(Protocol):
    """A way to choose tokens. It is plain data: each generation starts a verifier of its own."""

    def verifier(self) -> Verifier:
        """A fresh verifier; two of the same rule judge alike."""


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """The likeliest token each time (of equals the lowest id): a draft is accepted as far as it agrees."""

    def verifier(self) -> Verifier:
        return _GreedyVerifier()


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Sampling from softmax(logits / temperature), cut to the `top_k` likeliest, then to the nucleus `top_p`.

    temperature: 0 is greedy. top_k: 0 is no cut. top_p: the fewest likeliest tokens whose probabilities
    (renormalised after top_k) reach top_p stay; 1 is no cut. Among equal probabilities the lower id ranks
    first, so that exactly top_k tokens stay. seed: for numpy's default_rng, afresh in each generation.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = _finite(self.temperature), _finite(self.top_p)
        top_k, seed = whole_number(self.top_k), whole_number(self.seed)
        if temperature is None or temperature < 0:
            raise ConfigError(
                f"temperature is {shown(self.temperature)}; it must be a number, 0 (greedy) or more"
            )
        if top_k is None or top_k < 0:
            raise ConfigError(
                f"top_k is {shown(self.top_k)}; it must be 0 (no cut) or a number of tokens to keep"
            )
        if top_p is None or not 0 < top_p <= 1:
            raise ConfigError(f"top_p is {shown(self.top_p)}; it must be above 0 and at most 1 (no cut)")
        if seed is None or seed < 0:
            raise ConfigError(f"seed is {shown(self.seed)}; it must be a whole number of 0 or more")
        plain = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        for name, value in plain.items():
            object.__setattr__(self, name, value)  # a Fraction, say, is nothing that numpy computes with

    def verifier(self) -> Verifier:
        return _GreedyVerifier() if self.temperature == 0 else _SamplingVerifier(self)

    def distribution(self, logits: npt.NDArray[np.floating]) -> Weights:
        """The probabilities that a token is drawn from, in float64; logits: [vocab_size], -inf allowed."""
        row = logits.astype(np.float64)
        peak = row.max()
        if not isfinite(peak):  # NaN, +inf, or nothing but -inf
            raise ModelError(f"the largest logit is {peak}; no distribution follows from such a row")
        if self.temperature == 0:
            return _only(int(row.argmax()), row.size)
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, and so weight 0, is the right limit
            weights = np.exp((row - peak) / self.temperature)
        if self.top_k == 0 and self.top_p == 1:
            return _normalised(weights)
        order = np.argsort(-weights, kind="stable")
        kept = order[: self.top_k] if self.top_k else order
        return _normalised(self._nucleus(weights, kept))

    def _nucleus(self, weights: Weights, kept: npt.NDArray[np.intp]) -> Weights:
        """`weights` with 0 outside the nucleus of `kept` (token ids, likeliest first)."""
        ranked = _normalised(weights[kept])
        if self.top_p < 1:
            before = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])  # probability of all that rank higher
            kept = kept[before < self.top_p]  # the likeliest token has 0 before it: one always stays
        result = np.zeros_like(weights)
        result[kept] = weights[kept]
        return result


class _GreedyVerifier:
    def verify(self, logits: LogitRows, draft: Sequence[int]) -> list[int]:
        best = logits.argmax(axis=-1)  # [len(draft) + 1]
        emitted: list[int] = []
        for row, token in enumerate(best.tolist()):
            if np.isnan(logits[row, token]):  # argmax points at a NaN wherever there is one
                raise ModelError(f"logits of block row {row} are not numbers: NaN at token {token}")
            emitted.append(token)
            if row == len(draft) or token != draft[row]:
                break
        return emitted


class _SamplingVerifier:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._random = np.random.default_rng(sampler.seed)

    def verify(self, logits: LogitRows, draft: Sequence[int]) -> list[int]:
        emitted: list[int] = []
        for row, token in zip(logits, draft, strict=False):  # the last row has no draft
            weights = self._sampler.distribution(row)
            if self._random.random() >= weights[token]:
                weights[token] = 0.0  # not all is gone: a token of probability 1 is never refused
                return [*emitted, self._draw(weights)]
            emitted.append(token)
        return [*emitted, self._draw(self._sampler.distribution(logits[len(draft)]))]

    def _draw(self, weights: Weights) -> int:
        """A token in proportion to `weights`, which need not add up to 1; never one of weight 0."""
        cumulative = np.cumsum(weights)
        # The first token whose cumulative weight exceeds the point. There is one: random() is at most
        # 1 - 2**-53, and no total times that rounds up to the total.
        point = self._random.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, point, side="right"))


def _finite(value: object) -> float | None:
    """A real number of any type as a float; None for what is none, infinite, NaN or beyond a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) else None


def _normalised(weights: Weights) -> Weights:
    result: Weights = weights / weights.sum()
    return result


def _only(token: int, vocab_size: int) -> Weights:
    weights = np.zeros(vocab_size)
    weights[token] = 1.0
    return weights
