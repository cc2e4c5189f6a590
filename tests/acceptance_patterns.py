"""Drafts that are wrong at chosen places, and a short way through every sequence of them."""

from collections.abc import Iterable, Sequence

LENGTH = 6  # of the patterns that are gone through
SEGMENT = 21  # steps of one generation


def every_pattern() -> str:
    """A cyclic sequence over R, W, X in which each word of LENGTH letters stands once (de Bruijn).

    The Lyndon words whose length divides LENGTH, in lexicographic order, one after the other.
    """
    words = []
    word = [-1]
    while word:
        word[-1] += 1
        if LENGTH % len(word) == 0:
            words.append("".join("RWX"[letter] for letter in word))
        word = (word * LENGTH)[:LENGTH]
        while word and word[-1] == 2:
            word.pop()
    return "".join(words)


def segments() -> list[str]:
    """The sequence cut into patterns of SEGMENT steps, overlapping so that no word is lost."""
    cycle = every_pattern()
    stride = SEGMENT - LENGTH + 1
    line = cycle + cycle[: SEGMENT + LENGTH]
    return [line[start : start + SEGMENT] for start in range(0, len(cycle), stride)]


class PatternIsOverError(Exception):
    """Ends a generation in the middle, without a last block cut short."""


class PatternDrafter:
    """One letter per step: R all right, W all wrong, X wrong at one place, which moves from step to step.

    truth: the prompt and its greedy continuation. Raises PatternIsOverError after the last letter.
    """

    def __init__(self, pattern: Iterable[str], truth: Sequence[int], vocab_size: int) -> None:
        self._pattern = iter(pattern)
        self._truth = truth
        self._vocab_size = vocab_size
        self.accepted: list[int] = []  # what the target must accept of each draft

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        letter = next(self._pattern, None)
        if letter is None:
            raise PatternIsOverError
        moving = (len(self.accepted) + len(tokens)) % num_tokens
        wrong = {"R": set[int](), "W": set(range(num_tokens)), "X": {moving}}[letter]
        self.accepted.append(min(wrong, default=num_tokens))
        draft = self._truth[len(tokens) : len(tokens) + num_tokens]
        return [(token + (place in wrong)) % self._vocab_size for place, token in enumerate(draft)]
