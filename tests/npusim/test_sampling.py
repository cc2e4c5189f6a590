"""Sampling: the distribution by the book, and speculative sampling that keeps it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest
from toy_target import ToyTarget, hashed, plain_greedy

from npusim.errors import ConfigError, ModelError
from npusim.speculative import DraftModel, Sampler, SamplingRule, Scripted, Verifier, generate

Script = Callable[[Sequence[int], int], list[int]]


def logits_for(*probabilities: float) -> npt.NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(), [0.1, 0.4, 0.2, 0.3]),
        (Sampler(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (Sampler(temperature=0.0), [0, 1, 0, 0]),
        (Sampler(top_k=1), [0, 1, 0, 0]),
        (Sampler(top_k=3), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampler(top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Sampler(top_p=0.39), [0, 1, 0, 0]),
        (Sampler(top_p=0.41), [0, 4 / 7, 0, 3 / 7]),
        (Sampler(top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampler(top_p=0.91), [0.1, 0.4, 0.2, 0.3]),
        # The nucleus is taken of what top_k leaves: 4/9 + 3/9 reach 0.77, while 0.4 + 0.3 would not.
        (Sampler(top_k=3, top_p=0.77), [0, 4 / 7, 0, 3 / 7]),
        # Temperature comes first: 16/30 + 9/30 reach 0.8.
        (Sampler(temperature=0.5, top_p=0.8), [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_distribution_by_hand(sampler: Sampler, expected: list[float]) -> None:
    assert sampler.distribution(logits_for(0.1, 0.4, 0.2, 0.3)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(top_k=1), [0, 1, 0, 0]),
        (Sampler(top_k=2), [0, 0.5, 0.5, 0]),
        (Sampler(top_p=0.3), [0, 1, 0, 0]),
        (Sampler(top_p=0.4), [0, 0.5, 0.5, 0]),
        (Sampler(temperature=0.0), [0, 1, 0, 0]),
    ],
)
def test_of_equal_probabilities_the_lower_id_ranks_first(sampler: Sampler, expected: list[float]) -> None:
    assert sampler.distribution(logits_for(0.1, 0.3, 0.3, 0.3)) == pytest.approx(expected, abs=1e-12)


def test_many_equal_probabilities_keep_their_order() -> None:
    row = (np.arange(300) % 3).astype(np.float32)
    assert np.flatnonzero(Sampler(top_k=7).distribution(row)).tolist() == list(range(2, 23, 3))
    assert np.flatnonzero(Sampler(top_k=103).distribution(row)).tolist()[:4] == [1, 2, 4, 5]


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (np.nextafter(0.5, 1), 3)])
def test_the_nucleus_ends_with_the_token_that_reaches_top_p(top_p: float, kept: int) -> None:
    weights = Sampler(top_p=top_p).distribution(np.zeros(4, dtype=np.float32))
    assert weights.tolist() == [1 / kept] * kept + [0.0] * (4 - kept)


@pytest.mark.parametrize("temperature", [1e-310, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("shift", [-3e38, -1e4, 0.0, 1e4, 3e38])
def test_extreme_logits_and_temperatures_stay_finite(temperature: float, shift: float) -> None:
    row = np.float32(shift) + np.array([0.0, -2.0, -1.0], dtype=np.float32)
    weights = Sampler(temperature=temperature).distribution(row)
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1.0)
    assert weights.argmax() == 0


def test_ruled_out_tokens_have_no_probability() -> None:
    row = np.array([-np.inf, 1.0, -np.inf], dtype=np.float32)
    for sampler in (Sampler(), Sampler(top_k=2), Sampler(top_p=0.999999)):
        assert sampler.distribution(row).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [[0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
def test_rows_without_a_distribution_are_refused(bad: list[float]) -> None:
    with pytest.raises(ModelError, match="the largest logit is"):
        Sampler().distribution(np.array(bad, dtype=np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": -3}, "seed is -3"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": None}, "seed is None"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": "0.5"}, "top_p is '0.5'"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": 10**400}, "temperature is 10+; it must be a number"),
        ({"temperature": 10**5000}, "temperature is <an integer of 16610 bits>; it must be"),
        ({"top_p": Fraction(3, 2)}, r"top_p is Fraction\(3, 2\)"),
    ],
)
def test_settings_that_cannot_hold_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler(**arguments)  # type: ignore[arg-type]


def test_settings_are_plain_numbers_whatever_was_given() -> None:
    given = Sampler(temperature=Fraction(1, 2), top_k=np.uint8(2), top_p=np.float32(0.75), seed=np.int8(3))
    assert given == Sampler(temperature=0.5, top_k=2, top_p=0.75, seed=3)
    logits = np.array([1.0, 0.0, 2.0], np.float32)
    weights = Sampler(temperature=Fraction(1, 2), top_p=Fraction(9, 10)).distribution(logits)
    np.testing.assert_array_equal(weights, Sampler(temperature=0.5, top_p=0.9).distribution(logits))


# -- speculative sampling against exact enumeration: 3 tokens, logits that depend on the whole prefix --------

PROMPT = (1, 0)
LENGTH = 3
ROUNDS = 1000
TOY = hashed(vocab_size=3, seed=4)


def exact(sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The probability of each continuation, by the chain rule over plain sampling."""
    result = {}
    for tokens in product(range(3), repeat=LENGTH):
        probability = 1.0
        for place, token in enumerate(tokens):
            probability *= sampler.distribution(TOY((*PROMPT, *tokens[:place])))[token]
        result[tokens] = probability
    return result


def likeliest(tokens: Sequence[int], num_tokens: int) -> list[int]:
    return plain_greedy(TOY, tokens, num_tokens)


def unlikeliest(tokens: Sequence[int], num_tokens: int) -> list[int]:
    draft: list[int] = []
    while len(draft) < num_tokens:
        draft.append(int(TOY((*tokens, *draft)).argmin()))
    return draft


def fixed(_: Sequence[int], num_tokens: int) -> list[int]:
    return [2, 0, 1][:num_tokens]


def exceeds(sampler: Sampler, script: Script | None, rule_of: Callable[[int], SamplingRule]) -> float:
    """Pearson's chi-square over all continuations as a multiple of its upper 0.1 % point.

    Continuations of fewer than 5 expected are taken together. The point by Wilson and Hilferty's formula
    (within 0.5 % of the printed tables from 2 degrees of freedom on).
    """
    target = ToyTarget(vocab_size=3, capacity=8, max_prompt_len=2, logits_of=TOY)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(ROUNDS):
        result = generate(
            target,
            PROMPT,
            max_new_tokens=LENGTH,
            drafter=Scripted(script) if script else None,
            num_draft_tokens=2,
            sampler=rule_of(seed),
        )
        counts[tuple(result.tokens)] += 1
    expected = {tokens: ROUNDS * p for tokens, p in exact(sampler).items() if p > 0}
    assert set(counts) <= set(expected), "a continuation that the target cannot give"
    rare = {tokens for tokens, number in expected.items() if number < 5}
    cells = [(counts[tokens], number) for tokens, number in expected.items() if tokens not in rare]
    cells.append((sum(counts[tokens] for tokens in rare), sum(expected[tokens] for tokens in rare)))
    statistic = sum((seen - number) ** 2 / number for seen, number in cells if number)
    freedom = len(cells) - (1 if rare else 2)
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 3.0902 * sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("script", [likeliest, unlikeliest, fixed, None])
@pytest.mark.parametrize(
    "sampler",
    [Sampler(), Sampler(temperature=0.6), Sampler(temperature=1.7, top_p=0.8), Sampler(top_k=2)],
    ids=str,
)
def test_speculative_sampling_has_the_distribution_of_the_target(
    sampler: Sampler, script: Script | None
) -> None:
    assert exceeds(sampler, script, lambda seed: replace(sampler, seed=seed)) < 1


@dataclass(frozen=True)
class KeepsTheRejected:
    """The fault to be seen: a rejected token stays among those that replace it."""

    seed: int

    def verifier(self) -> Verifier:
        return self

    def verify(self, logits: npt.NDArray[np.floating], draft: Sequence[int]) -> list[int]:
        random = np.random.default_rng([self.seed, *draft, len(draft)])
        emitted: list[int] = []
        for row, token in zip(logits, [*draft, None], strict=True):
            weights = Sampler().distribution(row)
            emitted.append(int(random.choice(3, p=weights)))
            if token is None or random.random() >= weights[token]:
                break
            emitted[-1] = token
        return emitted


@pytest.mark.parametrize("script", [likeliest, fixed])
def test_the_same_check_sees_a_rule_that_is_wrong(script: Script) -> None:
    assert exceeds(Sampler(), script, KeepsTheRejected) > 2


def test_a_fixed_seed_gives_a_fixed_output() -> None:
    def run(seed: int) -> list[int]:
        drafter = DraftModel(ToyTarget(logits_of=hashed(vocab_size=11, context=2)))
        sampler = Sampler(temperature=0.8, top_k=6, top_p=0.9, seed=seed)
        return generate(ToyTarget(), [5, 2], max_new_tokens=12, drafter=drafter, sampler=sampler).tokens

    assert run(3) == run(3) == [0, 9, 2, 3, 5, 1, 4, 7, 7, 9, 0, 5]
    assert run(3) != run(4)


@pytest.mark.parametrize("sampler", [Sampler(temperature=0.0, seed=9), Sampler(top_k=1, temperature=3.0)])
def test_one_candidate_is_greedy(sampler: Sampler) -> None:
    logits_of = hashed(vocab_size=11)
    drafter = Scripted(lambda tokens, n: [*plain_greedy(logits_of, tokens, 2), 0, 0][:n])
    result = generate(ToyTarget(), [5, 2], max_new_tokens=20, drafter=drafter, sampler=sampler)
    assert result.tokens == plain_greedy(logits_of, [5, 2], 20)


class Draws:
    """Stands in for numpy's generator: the numbers it gives are those wanted."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0)


LARGEST = 1 - 2**-53  # what Generator.random() gives at most


@pytest.mark.parametrize(
    ("probabilities", "draft", "numbers", "expected"),
    [
        ((0.0, 0.5, 0.5), [0], (0.0, 0.0), 1),  # the least number neither accepts nor draws the impossible
        ((0.5, 0.5, 0.0), [2], (0.0, LARGEST), 1),  # nor does the largest
        ((0.3, 0.4, 0.3), [0], (0.3001, LARGEST), 2),
        ((0.25, 0.75, 0.0), [], (LARGEST,), 1),
        ((0.25, 0.75, 0.0), [], (0.2499,), 0),
        ((0.25, 0.75, 0.0), [], (0.2501,), 1),
    ],
)
def test_the_ends_of_the_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
    probabilities: tuple[float, ...],
    draft: list[int],
    numbers: tuple[float, ...],
    expected: int,
) -> None:
    monkeypatch.setattr(np.random, "default_rng", lambda _: Draws(*numbers))
    rows = np.stack([logits_for(*probabilities)] * (len(draft) + 1))
    assert Sampler().verifier().verify(rows, draft) == [expected]


def test_a_draft_of_certain_tokens_is_always_accepted_and_an_impossible_one_never() -> None:
    rows = np.full((3, 4), -np.inf, dtype=np.float32)
    rows[0, 2] = rows[1, 1] = rows[2, 3] = 0.0
    for seed in range(50):
        verifier = Sampler(seed=seed).verifier()
        assert verifier.verify(rows, [2, 1]) == [2, 1, 3]
        assert verifier.verify(rows, [2, 0]) == [2, 1]
        assert verifier.verify(rows, [3, 1]) == [2]
