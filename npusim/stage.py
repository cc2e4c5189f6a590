"""The two stages of a conversation."""

from enum import Enum


class Stage(Enum):
    """Which of the two graphs a call runs."""

    PREFILL = "prefill"
    GENERATE = "generate"
