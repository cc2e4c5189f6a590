"""Which static graph is built, and where its past keys lie."""

from enum import Enum


class Branch(Enum):
    """The two static graphs of a language model."""

    PREFILL = "prefill"
    """Past and block form one right-aligned run of slots that ends with the newest token."""

    GENERATE = "generate"
    """The past lies in slots [0, C), the block of new tokens in the fixed slots [C, C + S)."""


class KeyLayout(Enum):
    """Where the past rows of a GENERATE branch lie inside their C slots."""

    LINEAR = "linear"
    """Position p in slot p."""

    ROLLING = "rolling"
    """The newest L(P) positions in order from slot 0; L is ONNX Runtime's windowed-cache rule."""

    RING = "ring"
    """Position p in slot p mod C."""

    GATHERED = "gathered"
    """Linear slots, of which the graph gathers the W - 1 newest before it attends."""
