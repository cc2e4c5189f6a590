"""Values of configuration keys: from text or numbers to Python, and back to text."""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from numbers import Number
from typing import TypeVar

from npusim.errors import ConfigError
from npusim.whole_number import shown

ConfigValue = str | int | float | bool

E = TypeVar("E", bound=Enum)

LARGEST = 2**31 - 1
"""The graphs count positions in 32 bits."""

_DIGITS = re.compile(r"\s*[+-]?[0-9]{1,4000}\s*")


def checked_mapping(config: object) -> Mapping[str, ConfigValue]:
    """A caller's config; None is an empty one. ConfigError for anything but a mapping with keys of text."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config is a {type(config).__name__}; give a mapping from key to value")
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(f"config key {key!r} is a {type(key).__name__}; keys are text")
    return config


def check_at_least(least: int, key: str, value: int | None) -> None:
    """ConfigError for a value below `least` or beyond LARGEST; None is a value still open."""
    if value is None:
        return
    if value < least:
        raise ConfigError(f"{key}={shown(value)}; at least {least} is needed")
    if value > LARGEST:
        raise ConfigError(
            f"{key}={shown(value)}; at most {LARGEST} is possible, positions are counted in 32 bits"
        )


def parse_int(key: str, value: ConfigValue) -> int:
    """A whole number; 2.0 and "2" are one, True is none."""
    number = _whole_number(value)
    if number is None:
        raise ConfigError(f"{key}={value!r}; a whole number is needed")
    return number


def _whole_number(value: object) -> int | None:
    """The integer that a text or a number of any kind stands for; None where it stands for none."""
    if isinstance(value, str):
        return int(value) if _DIGITS.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, Number):
        return None
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):  # complex, NaN, infinite
        return None
    return int(number) if number == value else None


def parse_bool(key: str, value: ConfigValue) -> bool:
    """YES or NO, in any of the ways that OpenVINO spells them."""
    spelled = {"YES": True, "TRUE": True, "1": True, "NO": False, "FALSE": False, "0": False}
    result = spelled.get(str(value).upper())
    if result is None:
        raise ConfigError(f"{key}={value!r}; YES or NO is needed")
    return result


def parse_enum(kind: type[E]) -> Callable[[str, ConfigValue], E]:
    """A parser of the values of an enum, in any case."""

    def parse(key: str, value: ConfigValue) -> E:
        try:
            return kind(str(value).upper())
        except ValueError:
            allowed = ", ".join(str(member.value) for member in kind)
            raise ConfigError(f"{key}={value!r}; allowed: {allowed}") from None

    return parse


def spell(value: object) -> str:
    """A value as configurations write it."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    return str(value.value if isinstance(value, Enum) else value)
