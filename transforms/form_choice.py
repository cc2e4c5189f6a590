"""Which form of attention a CPU runs fastest: rules over sizes, beside the measurements they come from.

OpenVINO 2026.4.1 CPU, 2 threads (AVX-512), float32, one layer, minima of interleaved runs in ms. Ratios
between 0.75 and 1.3 are noise and decide nothing.

    H/KV x D     S     C | device  SPLIT  JOINED  FUSED | scores
    64/8 x 64    1   512 |   2.25   0.16    0.22   0.36 | 0.1 MB
    64/8 x 64    1  2048 |   13.0   0.57    0.84   1.49 | 0.5 MB
    64/8 x 64    1  8192 |    207   1.98    6.01   11.8 |   2 MB
    64/8 x 64    4  2048 |   20.0   1.18    1.24      - |   2 MB
    32/8 x 64    8  1024 |   2.69   0.68    0.65   0.98 |   1 MB
    32/8 x 64   32  1024 |   3.62   1.98    1.61   1.92 |   4 MB
    8/2 x 64    64   512 |   0.65   0.59    0.40   0.51 |   1 MB
    16/4 x 128  16  8192 |    516   22.2    23.9    133 |   8 MB
    16/4 x 128  64  4096 |    257   55.7    66.7    107 |  17 MB
    32/8 x 64  128  1024 |   7.59   8.30    5.94   6.26 |  19 MB
    32/8 x 64  256  1024 |   31.7   53.5    26.9   28.1 |  42 MB
    32/8 x 64  512  1024 |    104    209     136   79.6 | 101 MB
    64/8 x 64  512     0 |   43.8      -    57.2   43.9 |  67 MB

SPLIT copies every score twice (into one row, and out of it), JOINED every key and value once; the device
form repeats keys and values for each query head, transposes and copies them. In a chain of layers with few
keys the calls count, not the bytes: 12 layers at C = 144, S = 1 take 0.90 SPLIT, 0.65 JOINED; 8 layers take
0.82 and 0.72 at C = 256, 1.44 and 1.44 at C = 512.
"""

from dataclasses import dataclass
from enum import Enum

COPIED_KV_BYTES = 6 * 2**20
"""Keys and values of up to this many bytes are better copied: read once in a row, and then in the caches."""

FUSED_SCORE_BYTES = 32 * 2**20
"""Scores of more than this leave the caches: then the kernel that never stores them is ahead."""

_FLOAT_BYTES = 4  # the CPU plugin computes in float32 whatever the model's float type is


class AttentionForm(Enum):
    """How the attention of one layer is executed; all have the query heads of a KV head as rows."""

    SPLIT = "split"
    """One pair of MatMuls per key range (past, block) and one softmax over their joined scores."""

    JOINED = "joined"
    """Keys and values of the ranges copied into one, one pair of MatMuls."""

    FUSED = "fused"
    """Keys and values copied into one, ScaledDotProductAttention on it, whose scores are never stored."""


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The static sizes of one attention: H, KV, D, S and the length of each key range."""

    num_heads: int
    kv_num_heads: int
    head_size: int
    sequence_length: int
    key_lengths: tuple[int, ...]
    has_sink: bool

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

    @property
    def score_bytes(self) -> int:
        """Bytes of all scores, [H, S, K]."""
        return self.num_heads * self.sequence_length * self.num_keys * _FLOAT_BYTES


def choose_form(sizes: AttentionSizes) -> AttentionForm:
    """The fastest form by the measurements above."""
    if sizes.score_bytes > FUSED_SCORE_BYTES:
        return AttentionForm.FUSED
    if len(sizes.key_lengths) == 1:
        return AttentionForm.JOINED
    scores_outweigh_keys = 2 * sizes.rows > sizes.head_size
    if sizes.kv_bytes <= COPIED_KV_BYTES or scores_outweigh_keys:
        return AttentionForm.JOINED
    return AttentionForm.SPLIT
