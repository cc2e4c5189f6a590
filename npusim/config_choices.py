"""The choices of a configuration that are not numbers."""

from enum import Enum


class PrefillHint(Enum):
    """How a prompt is computed."""

    STATIC = "STATIC"
    """In one graph of MAX_PROMPT_LEN rows, right-aligned, without a past."""
    DYNAMIC = "DYNAMIC"
    """Chunk by chunk over the cache."""


class GenerateHint(Enum):
    """What NPUW optimises its generate graph for; the simulator's graph is the same for both."""

    FAST_COMPILE = "FAST_COMPILE"
    BEST_PERF = "BEST_PERF"


class KVPrecision(Enum):
    """Element type of the KV cache."""

    MODEL = "MODEL"
    """That of the model's past_key_values inputs; the only choice where these are codes with scales."""
    F32 = "F32"
    F16 = "F16"


class KVLayout(Enum):
    """Where the rows of windowed layers lie; layers without a window are always linear."""

    LINEAR = "LINEAR"
    ROLLING = "ROLLING"
    RING = "RING"
    GATHERED = "GATHERED"


class Execution(Enum):
    """Which form of the attention the simulator runs; the numbers are the same."""

    FAST = "FAST"
    """The form that a CPU runs fastest, chosen per layer."""
    DEVICE = "DEVICE"
    """One SDPA per layer over repeated KV heads, as an NPU compiler is given it."""


class Profile(Enum):
    """Whose rules turn the lengths asked for into those compiled for."""

    NPUSIM = "NPUSIM"
    """Lengths as given; the capacity is prompt + response - 1 whatever the block."""
    NPUW = "NPUW"
    """NPUW's: lengths rounded up to 64, blocks to 8, the capacity prompt + response - block."""
