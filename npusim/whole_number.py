"""What counts as an integer where a caller gives one, and how a message shows it."""

from operator import index

_SHOWN_BITS = 2048


def whole_number(value: object) -> int | None:
    """`value` as an int; None for what is no integer: 2.0 and True are none."""
    try:
        return None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def shown(value: object) -> str:
    """A value for a message. Python refuses to write out an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"<an integer of {value.bit_length()} bits>"
    return repr(value)
