"""The vocabulary of the built-in models: a token is a byte of UTF-8 text, and two more mark begin and end.

It needs no tokenizer file, so text can go in and come out of `npusim demo` and `npusim run` offline.
"""

from collections.abc import Sequence

NUM_BYTES = 256
BEGIN_TOKEN = 257
END_TOKEN = 258
VOCAB_SIZE = 259


def encode(text: str) -> list[int]:
    """The begin token, then one token for each byte of the UTF-8 form of `text`."""
    return [BEGIN_TOKEN, *text.encode("utf-8")]


def decode(tokens: Sequence[int]) -> str:
    """The text of the byte tokens; marks are left out, bytes that are no UTF-8 become U+FFFD."""
    return bytes(token for token in tokens if 0 <= token < NUM_BYTES).decode("utf-8", errors="replace")
