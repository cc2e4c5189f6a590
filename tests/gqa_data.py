"""Numbers for GroupQueryAttention: one whole history, of which a test stores a part and steps the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gqa_models import GQA, Bias
from numpy.typing import NDArray

Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """T tokens as one layer gets them, in the model's type: query [1, H, T, D], key and value [1, KV, T, D].

    bias is [1, H or 1, T, T], position_ids are T rotary positions; None where the layer has no such input.
    """

    query: Floats
    key: Floats
    value: Floats
    position_ids: NDArray[np.int64] | None = None
    bias: Floats | None = None

    @property
    def total(self) -> int:
        """T."""
        return int(self.query.shape[2])

    def cut(self, total: int) -> History:
        """The first `total` tokens."""
        return History(
            query=self.query[:, :, :total],
            key=self.key[:, :, :total],
            value=self.value[:, :, :total],
            position_ids=None if self.position_ids is None else self.position_ids[:total],
            bias=None if self.bias is None else self.bias[:, :, :total, :total],
        )


def random_history(gqa: GQA, total: int, *, seed: int) -> History:
    """Normal numbers for every input that `gqa` has; position_ids are a shuffle, far from 0, 1, 2.

    Equal seeds give equal position_ids, whatever the layer, as layers of a model share them.
    """
    rng = np.random.default_rng(seed)

    def normal(heads: int) -> Floats:
        drawn: Floats = (1.3 * rng.normal(size=(1, heads, total, gqa.head_size))).astype(gqa.dtype)
        return drawn

    query, key, value = normal(gqa.num_heads), normal(gqa.kv_num_heads), normal(gqa.kv_num_heads)
    position_ids = bias = None
    if gqa.position_ids and gqa.rotary is not None:
        shuffle = np.random.default_rng([seed, 1]).permutation(gqa.rotary.positions)
        position_ids = shuffle[:total].astype(np.int64)
    if gqa.bias is not None:
        heads = gqa.num_heads if gqa.bias is Bias.PER_HEAD else 1
        bias = rng.normal(size=(1, heads, total, total)).astype(gqa.dtype)
    return History(query=query, key=key, value=value, position_ids=position_ids, bias=bias)


def one_hot_history(gqa: GQA, total: int, *, seed: int) -> History:
    """A random history whose value at position j is unit vector j: attention is then the probabilities."""
    if total > gqa.head_size:
        raise ValueError(f"{total} positions need a head size of as many, got {gqa.head_size}")
    history = random_history(gqa, total, seed=seed)
    unit = np.eye(total, gqa.head_size, dtype=gqa.dtype)
    value = np.broadcast_to(unit, (1, gqa.kv_num_heads, total, gqa.head_size)).copy()
    return History(
        query=history.query,
        key=history.key,
        value=value,
        position_ids=history.position_ids,
        bias=history.bias,
    )


def op_rows(heads: Floats) -> Floats:
    """[1, heads, S, D] as the op's input [1, S, heads * D]."""
    _, count, rows, size = heads.shape
    return heads.swapaxes(1, 2).reshape(1, rows, count * size)
