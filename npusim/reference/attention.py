"""Grouped-query attention on absolute positions, in float64: the definition in running form.

Letters: H query heads, KV key/value heads, G = H / KV, S rows of a step, T = absolute length after it,
R rows that are resident (R = T unless some were dropped), D head size, Dv head size of the values.

A query at position q sees the resident key at position k when k <= q and, with a window W, q - k < W: the
window counts the query itself. Keys are rotated by their own position before they are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npusim.errors import InputError, TrimError
from npusim.reference.numbers import check_count, is_integer, real_array
from npusim.reference.options import Array, AttentionOptions, Positions, checked_array, rotate


class AttentionHistory:
    """Keys and values of one sequence, each row with its position, and attention over them.

    `step` is the op: append the new rows, then attend from them. `append`, `attend`, `trim` and `drop` are
    its parts and what a host may do between steps. A refused call leaves the history as it was.
    """

    def __init__(self, options: AttentionOptions) -> None:
        self._options = options
        self._key: Array | None = None  # [1, KV, R, D], after rotary
        self._value: Array | None = None  # [1, KV, R, Dv]
        self._positions: Positions = np.zeros(0, np.int64)  # [R], ascending
        self._length = 0

    @property
    def length(self) -> int:
        """Absolute length: the position that the next appended row takes."""
        return self._length

    @property
    def positions(self) -> Positions:
        """Positions of the resident rows, ascending, [R]."""
        return self._positions.copy()

    @property
    def present_key(self) -> Array:
        """Resident keys after rotary, [1, KV, R, D]."""
        return _shaped(self._key).copy()

    @property
    def present_value(self) -> Array:
        """Resident values, [1, KV, R, Dv]."""
        return _shaped(self._value).copy()

    def append(self, key: ArrayLike, value: ArrayLike, *, position_ids: ArrayLike | None = None) -> None:
        """Adds S rows, [1, KV, S, D] and [1, KV, S, Dv], at positions length .. length + S - 1.

        position_ids (S integers) replaces those positions as rotary angle only, never as place in the order.
        """
        k, v = checked_array("key", key), checked_array("value", value)
        if k.shape[:3] != v.shape[:3]:
            raise InputError(f"key {k.shape} and value {v.shape} must agree in batch, heads and rows")
        positions = self._length + np.arange(k.shape[2])
        k = self._rotated(k, positions, position_ids)
        self._key, self._value = _joined("key", self._key, k), _joined("value", self._value, v)
        self._positions = np.concatenate([self._positions, positions])
        self._length += len(positions)

    def attend(
        self,
        query: ArrayLike,
        *,
        position_ids: ArrayLike | None = None,
        attention_bias: ArrayLike | None = None,
    ) -> Array:
        """Attention of the newest S positions, query [1, H, S, D] -> [1, S, H * Dv].

        attention_bias, [1, H or 1, S, at least T], is added at the column of a key's absolute position.
        """
        q = checked_array("query", query)
        self._check_query(q)
        num_heads, rows = q.shape[1:3]
        bias = _checked_bias(attention_bias, num_heads, rows, self._length)
        positions = self._length - rows + np.arange(rows)
        q = self._rotated(q, positions, position_ids) * (self._options.scale or q.shape[3] ** -0.5)
        value = _shaped(self._value)
        output = np.empty((1, rows, num_heads * value.shape[3]))
        for row, position in enumerate(positions):
            # Only rows that are seen enter the arithmetic, so an unseen NaN stays unseen.
            seen = np.flatnonzero(self._visible(position))
            scores = self._scores(q[0, :, row], seen) + bias[0, :, row][:, self._positions[seen]]
            weights = self._softmax(scores, position)  # [H, seen]
            v = np.repeat(value[0][:, seen], num_heads // value.shape[1], axis=0)  # [H, seen, Dv]
            output[0, row] = np.einsum("hk,hkd->hd", weights, v).reshape(-1)
        return output

    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *,
        position_ids: ArrayLike | None = None,
        attention_bias: ArrayLike | None = None,
    ) -> Array:
        """One run of the op on S new rows: append, attend -> [1, S, H * Dv]. Refused whole or done whole."""
        q, k = checked_array("query", query), checked_array("key", key)
        if q.shape[2] != k.shape[2]:
            raise InputError(f"query {q.shape} and key {k.shape} must have the same rows")
        before = (self._key, self._value, self._positions, self._length)
        output: Array | None = None
        try:
            self.append(k, value, position_ids=position_ids)
            output = self.attend(q, position_ids=position_ids, attention_bias=attention_bias)
            return output
        finally:
            if output is None:
                self._key, self._value, self._positions, self._length = before

    def trim(self, num_tokens: int) -> int:
        """Forgets every row from position `num_tokens` on; returns by how much the length fell."""
        if not is_integer(num_tokens) or not 0 <= num_tokens <= self._length:
            raise TrimError(f"cannot trim to {num_tokens}: the history has {self._length} tokens")
        removed = self._length - num_tokens
        self.drop(range(num_tokens, self._length))
        self._length = num_tokens
        return removed

    def drop(self, positions: Iterable[int]) -> None:
        """Forgets the rows at these positions, not that time went by: an eviction, or rows never stored."""
        gone = list(positions)
        for position in gone:
            check_count("a position", position)
        kept = ~np.isin(self._positions, gone)
        if self._key is not None and self._value is not None:
            self._key, self._value = self._key[:, :, kept], self._value[:, :, kept]
        self._positions = self._positions[kept]

    def _rotated(self, rows: Array, positions: Positions, position_ids: ArrayLike | None) -> Array:
        if self._options.rotary is None:
            return rows
        return rotate(rows, self._options.rotary, positions if position_ids is None else position_ids)

    def _check_query(self, q: Array) -> None:
        key, sink = _shaped(self._key), self._options.head_sink
        if q.shape[1] % key.shape[1] != 0 or q.shape[3] != key.shape[3]:
            raise InputError(
                f"query {q.shape} does not fit key {key.shape}: query heads must be a multiple of key heads, "
                "head sizes equal"
            )
        if q.shape[2] > self._length:
            raise InputError(f"query has {q.shape[2]} rows, the history only {self._length} tokens")
        if sink is not None and np.shape(sink) != (q.shape[1],):
            raise InputError(f"head_sink has {np.size(sink)} logits, the query {q.shape[1]} heads")

    def _visible(self, query_position: int) -> NDArray[np.bool_]:
        """Which resident rows the query at this position sees, [R]."""
        distance = query_position - self._positions
        visible = np.ones(distance.shape, np.bool_)
        if self._options.causal:
            visible &= distance >= 0
        if self._options.local_window_size != -1:
            visible &= distance < self._options.local_window_size
        return visible

    def _scores(self, q: Array, seen: NDArray[np.intp]) -> Array:
        """Products of one scaled query row [H, D] with the seen keys, [H, seen]."""
        key = _shaped(self._key)
        groups = len(q) // key.shape[1]
        k = np.repeat(key[0][:, seen], groups, axis=0)  # [H, seen, D]: head h reads KV head h // G
        scores: Array = np.einsum("hd,hkd->hk", q, k)
        return scores

    def _softmax(self, scores: Array, query_position: int) -> Array:
        """Weights of scores [H, seen]; with a sink each row sums to less than one."""
        if np.isneginf(scores).all(axis=1).any():
            raise InputError(f"the query at position {query_position} sees no key; its softmax is undefined")
        sink = np.full((len(scores), 1), -np.inf)
        if self._options.head_sink is not None:
            sink = np.asarray(self._options.head_sink)[:, None]
        elif self._options.smooth_softmax:
            sink = np.zeros((len(scores), 1))
        top = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - top)
        shares: Array = weights / (weights.sum(axis=1, keepdims=True) + np.exp(sink - top))
        return shares


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: AttentionOptions,
    *,
    position_ids: ArrayLike | None = None,
    attention_bias: ArrayLike | None = None,
) -> Array:
    """Attention of the last S of T tokens, the whole history given at once and before rotary.

    query [1, H, S, D], key [1, KV, T, D], value [1, KV, T, Dv] -> [1, S, H * Dv]. position_ids are T rotary
    positions (default 0 .. T - 1), attention_bias is [1, H or 1, S, at least T].
    """
    history = AttentionHistory(options)
    history.append(key, value, position_ids=position_ids)
    rows = checked_array("query", query).shape[2]
    newest = None if position_ids is None else np.ravel(position_ids)[-rows:]
    return history.attend(query, position_ids=newest, attention_bias=attention_bias)


def _shaped(rows: Array | None) -> Array:
    if rows is None:
        raise InputError("the history is empty and has no shape yet; append rows first")
    return rows


def _joined(name: str, old: Array | None, new: Array) -> Array:
    if old is None:
        return new
    if (old.shape[1], old.shape[3]) != (new.shape[1], new.shape[3]):
        raise InputError(f"{name} is {new.shape}, but rows before it {old.shape}: heads and size must agree")
    return np.concatenate([old, new], axis=2)


def _checked_bias(given: ArrayLike | None, num_heads: int, rows: int, total: int) -> Array:
    """The bias as [1, H, S, at least T]; zeros when there is none."""
    if given is None:
        return np.zeros((1, num_heads, rows, total))
    bias = real_array("attention_bias", given).astype(np.float64)
    if bias.ndim != 4 or bias.shape[:3] not in ((1, 1, rows), (1, num_heads, rows)) or bias.shape[3] < total:
        expected = f"[1, {num_heads} or 1, {rows}, at least {total}]"
        raise InputError(f"attention_bias has shape {bias.shape}, it must be {expected}")
    return np.broadcast_to(bias, (1, num_heads, rows, bias.shape[3]))
