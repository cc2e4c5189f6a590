"""Key and value rows of one layer: allocated whole or grown, addressed by slot."""

from typing import assert_never

import numpy as np

from npusim.reference.caches import CacheConfig, CacheSizing, Indices, Rows


class RowStore:
    """At most `limit` rows of [B, K, limit, H] keys and [B, K, limit, V] values, zero until written.

    Growing appends rows and renumbers none, so a slot keeps its meaning.
    """

    def __init__(self, config: CacheConfig, limit: int) -> None:
        self._config = config
        self._limit = limit
        self.clear()

    @property
    def num_rows(self) -> int:
        """Rows allocated now."""
        return int(self._key.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, keys and values."""
        return self._key.nbytes + self._value.nbytes

    def clear(self) -> None:
        """Back to the beginning: nothing of what was written is left."""
        match self._config.sizing:
            case CacheSizing.STATIC:
                rows = self._limit
            case CacheSizing.DYNAMIC:
                rows = 0
            case _:
                assert_never(self._config.sizing)
        self._key = self._zeros(rows, self._config.head_size)
        self._value = self._zeros(rows, self._config.value_size)

    def write(self, slots: Indices, key: Rows, value: Rows) -> None:
        """Puts key [B, K, S, H] and value [B, K, S, V] at S slots, growing first where one lies beyond."""
        self.reserve(slots)
        self._key[:, :, slots] = key
        self._value[:, :, slots] = value

    def read(self, slots: Indices) -> tuple[Rows, Rows]:
        """Copies of the rows at the slots, in their order."""
        return self._key[:, :, slots], self._value[:, :, slots]

    def reserve(self, slots: Indices) -> None:
        """Grows, keys and values or neither, until the slots are there."""
        rows = int(slots.max()) + 1
        if rows <= self.num_rows:
            return
        more = min(self._limit, max(rows, 2 * self.num_rows)) - self.num_rows
        key = np.concatenate([self._key, self._zeros(more, self._config.head_size)], axis=2)
        value = np.concatenate([self._value, self._zeros(more, self._config.value_size)], axis=2)
        self._key, self._value = key, value

    def _zeros(self, rows: int, size: int) -> Rows:
        shape = (self._config.batch_size, self._config.kv_num_heads, rows, size)
        return np.zeros(shape, self._config.dtype)
