"""Values of configuration keys: from text or numbers to Python, and back to text."""

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from npusim.errors import ConfigError

ConfigValue = str | int | float | bool

E = TypeVar("E", bound=Enum)


def check_at_least(least: int, key: str, value: int | None) -> None:
    """ConfigError for a value below `least`; None is a value still open."""
    if value is not None and value < least:
        raise ConfigError(f"{key}={value}; at least {least} is needed")


def parse_int(key: str, value: ConfigValue) -> int:
    """A whole number; 2.0 and "2" are one, True is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{key}={value!r}; a whole number is needed") from None
    if isinstance(value, bool) or (isinstance(value, float) and value != number):
        raise ConfigError(f"{key}={value!r}; a whole number is needed")
    return number


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
