"""Which form of attention a CPU runs fastest: rules over sizes, beside the measurements they come from.

OpenVINO 2026.4.1 CPU, 2 threads (AVX-512, 1 MiB of cache each, 32 MiB in common), float32, minima of
interleaved runs in ms. Ratios between 0.75 and 1.3 are noise and decide nothing.

First per layer of a chain so long that each layer finds its keys outside the caches, as it does in a model,
where the weights are read between two layers:

    H/KV x D     S     C | SPLIT  JOINED | keys and values
    8/2 x 64     1   384 | 0.045   0.024 | 0.4 MB
    8/2 x 64     1  1024 | 0.071   0.056 |   1 MB
    8/2 x 64     1  4096 | 0.167   0.170 |   4 MB
    64/8 x 64    1   256 | 0.080   0.061 |   1 MB
    64/8 x 64    1  1024 | 0.195   0.177 |   4 MB
    64/8 x 64    1  2048 | 0.360   0.370 |   8 MB
    32/8 x 128   1  1024 | 0.344   0.350 |   8 MB
    64/8 x 64    1  8192 |  1.34    3.12 |  32 MB
    64/8 x 64    4   512 | 0.214   0.175 |   2 MB
    32/8 x 64   32  1024 | 0.996   0.815 |   4 MB

    with a sink:
    8/2 x 64     1   384 | 0.049   0.036 | 0.4 MB
    64/8 x 64    1   512 | 0.163   0.141 |   2 MB

Then one layer alone, whose keys stay in the caches as far as they fit:

    H/KV x D     S     C | SPLIT  JOINED | scores
    16/4 x 128  16  8192 |  3.92    5.96 |   8 MB
    16/4 x 128  64  4096 |  7.28    6.83 |  16 MB
    32/8 x 64  128  1024 |  5.03    3.20 |  18 MB
    32/8 x 64  256  1024 |  14.0    7.32 |  40 MB
    32/8 x 64  512  1024 |  35.1    18.1 |  96 MB

The device form, which repeats keys and values for each query head and transposes them, takes 13 ms for
64/8 x 64 at S = 1, C = 2048, and 207 ms at C = 8192. ScaledDotProductAttention over the rows of KV heads was
tried for many scores and left: 17.4 ms in the last case, and no less memory.

JOINED copies every key and value once, in the order in which memory is read fastest, and is then one kernel
that stores no scores (without a sink); SPLIT copies every score twice, into one row and out of it.
"""

from dataclasses import dataclass
from enum import Enum

COPIED_KV_BYTES = 6 * 2**20
"""Keys and values of up to this many bytes are better copied: read once in a row, and then in the caches."""

_FLOAT_BYTES = 4  # the CPU plugin computes in float32 whatever the model's float type is


class AttentionForm(Enum):
    """How the attention of one layer is executed; all have the query heads of a KV head as rows."""

    SPLIT = "split"
    """One pair of MatMuls per key range (past, block) and one softmax over their joined scores."""

    JOINED = "joined"
    """Keys and values of the ranges copied into one, one pair of MatMuls: a single kernel without a sink."""


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The static sizes of one attention: H, KV, D, S and the length of each key range."""

    num_heads: int
    kv_num_heads: int
    head_size: int
    sequence_length: int
    key_lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Query rows of one KV head, G S."""
        return self.num_heads // self.kv_num_heads * self.sequence_length

    @property
    def num_keys(self) -> int:
        """K: the keys of all ranges."""
        return sum(self.key_lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all ranges (values have the keys' channels)."""
        return 2 * self.kv_num_heads * self.num_keys * self.head_size * _FLOAT_BYTES


def choose_form(sizes: AttentionSizes) -> AttentionForm:
    """The fastest form by the measurements above."""
    if len(sizes.key_lengths) == 1:
        return AttentionForm.JOINED
    scores_outweigh_keys = 2 * sizes.rows > sizes.head_size
    if sizes.kv_bytes <= COPIED_KV_BYTES or scores_outweigh_keys:
        return AttentionForm.JOINED
    return AttentionForm.SPLIT
