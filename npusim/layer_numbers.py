"""What number a layer goes by: that in the names of its cache, which gaps may be in."""

import re
from collections.abc import Sequence


def numbers_in(name: str) -> list[int]:
    """The numbers in a name, e.g. 7 of present.7.key."""
    return [int(digits) for digits in re.findall(r"\d+", name)]


def layer_numbers(presents: Sequence[str]) -> tuple[int, ...]:
    """By layer the only number in the name of its present; their places where these tell no layers apart."""
    found = [numbers_in(name) for name in presents]
    numbers = tuple(each[0] for each in found if len(each) == 1)
    return numbers if len(set(numbers)) == len(presents) else tuple(range(len(presents)))
