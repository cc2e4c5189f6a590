"""One sequence per batch row, stored by position: full layers whole, windowed layers in a ring of rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from npusim.errors import CapacityError, InputError, TrimError
from npusim.reference.caches import (
    AttendSpec,
    CacheConfig,
    Indices,
    Rows,
    band_spec,
    check_step_rows,
)
from npusim.reference.numbers import check_count, is_integer
from npusim.reference.row_store import RowStore


@dataclass
class _Step:
    """A step on its way through the layers; nothing of it is in the cache yet."""

    position: Indices  # [S]
    rows: dict[int, tuple[Rows, Rows]] = field(default_factory=dict)  # by layer, in storage dtype
    specs: dict[int, AttendSpec] = field(default_factory=dict)  # by window

    def spec_for(self, window: int, num_keys: int) -> AttendSpec:
        """One spec per window and step, the same object for every layer that has the window."""
        if window not in self.specs:
            self.specs[window] = band_spec(self.position.size, num_keys, window)
        return self.specs[window]


class ContiguousReferenceCache:
    """A cache with one length for all layers; a step counts once its last layer was served.

    Position p of a layer with n slots lies in slot p mod n, which for a full layer is slot p. The rows of a
    step are held aside until every layer has been served, so a step broken off leaves nothing behind.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._stores = [RowStore(config, config.num_slots(layer)) for layer in range(config.num_layers)]
        self._length = 0
        self._high_water = 0
        self._step: _Step | None = None

    @property
    def config(self) -> CacheConfig:
        """The configuration given."""
        return self._config

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self._length

    @property
    def high_water(self) -> int:
        """One past the highest position written since the cache was last empty; no rewind lowers it."""
        return self._high_water

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(store.nbytes for store in self._stores)

    def can_extend(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens fits; InputError for what is no number of tokens."""
        check_count("num_tokens", num_tokens)
        return self._length + num_tokens <= self._config.capacity

    def update_and_fetch(
        self, layer: int, key: Rows, value: Rows, position: Indices
    ) -> tuple[Rows, Rows, AttendSpec]:
        """Takes a layer's new rows and hands back the history that they may see, new rows included.

        key [B, K, S, H], value [B, K, S, V], position [S] = length .. length + S - 1, the same for each layer
        of a step. The history comes in the order of positions, in the storage dtype; for a windowed layer it
        begins with the window of the first new row.
        """
        check_step_rows(self._config, layer, key, value, position)
        step = self._step_at(layer, position)
        past_key, past_value = self._stores[layer].read(self._past_slots(layer))
        new_key, new_value = key.astype(self._config.dtype), value.astype(self._config.dtype)
        key_history = np.concatenate([past_key, new_key], axis=2)  # [B, K, T, H]
        value_history = np.concatenate([past_value, new_value], axis=2)  # [B, K, T, V]
        spec = step.spec_for(self._config.window(layer), key_history.shape[2])
        rows = {**step.rows, layer: (new_key, new_value)}
        if len(rows) == self._config.num_layers:
            self._commit(step.position, rows)
        else:
            step.rows, self._step = rows, step
        return key_history, value_history, spec

    def abandon_step(self) -> None:
        """Drops a step that not every layer has been served for; the cache is as before it."""
        if self._step is None:
            raise InputError("no step is under way, there is nothing to abandon")
        self._step = None

    def can_rewind(self, num_tokens: int) -> bool:
        """Whether every layer still holds the whole window of the end that a rewind to `num_tokens` makes."""
        if self._step is not None or not self._is_length(num_tokens):
            return False
        layers = range(self._config.num_layers)
        return num_tokens == 0 or all(self._holds(layer, num_tokens) for layer in layers)

    def rewind(self, num_tokens: int) -> int:
        """Goes back to `num_tokens` stored, all layers or none; returns how many tokens were dropped."""
        if self._step is not None:
            raise InputError("a step is under way; finish or abandon it before a rewind")
        if not self._is_length(num_tokens):
            raise TrimError(f"rewind to {num_tokens}, but stored are {self._length}; give 0..{self._length}")
        if not self.can_rewind(num_tokens):
            layers = [n for n in range(self._config.num_layers) if not self._holds(n, num_tokens)]
            raise TrimError(
                f"rewind from {self._length} to {num_tokens}: positions were written up to "
                f"{self._high_water - 1}, and layers {layers} no longer hold the window before {num_tokens}; "
                "rewind less, reset, or give more window_slack"
            )
        removed = self._length - num_tokens
        self._length = num_tokens
        if num_tokens == 0:
            self._high_water = 0  # no older row can be read any more
        return removed

    def reset(self) -> None:
        """As new: no tokens, no step under way, rows zero (STATIC) or given back (DYNAMIC)."""
        for store in self._stores:
            store.clear()
        self._length = 0
        self._high_water = 0
        self._step = None

    def _is_length(self, num_tokens: int) -> bool:
        return is_integer(num_tokens) and 0 <= num_tokens <= self._length

    def _holds(self, layer: int, num_tokens: int) -> bool:
        """The slot of position p was last written by p + slots exactly when p + slots < high_water."""
        window = self._config.window(layer)
        oldest_needed = 0 if window < 0 else max(0, num_tokens - window + 1)
        return oldest_needed >= self._high_water - self._config.num_slots(layer)

    def _past_slots(self, layer: int) -> Indices:
        """Slots of the stored rows in the window of the next position, oldest first."""
        window = self._config.window(layer)
        oldest = 0 if window < 0 else max(0, self._length - window + 1)
        return np.arange(oldest, self._length) % self._config.num_slots(layer)

    def _step_at(self, layer: int, position: Indices) -> _Step:
        """The step under way, or a new one; refuses what continues neither."""
        step = self._step
        if step is None:
            expected = self._length + np.arange(position.size)
            if not np.array_equal(position, expected):
                raise InputError(
                    f"positions {position.tolist()} do not continue {self._length} stored tokens; "
                    f"give {expected.tolist()}, after a rewind where tokens are to be replaced"
                )
            if not self.can_extend(position.size):
                raise CapacityError(
                    f"step of {position.size} at length {self._length} needs "
                    f"{self._length + position.size} rows, capacity is {self._config.capacity}"
                )
            return _Step(position=position.astype(np.int64))
        if layer in step.rows:
            raise InputError(
                f"layer {layer} was served already at positions {step.position.tolist()}; "
                f"{self._config.num_layers - len(step.rows)} other layers are missing: serve or abandon_step"
            )
        if not np.array_equal(position, step.position):
            raise InputError(
                f"layer {layer}: positions {position.tolist()} differ from those "
                f"of the step, {step.position.tolist()}"
            )
        return step

    def _commit(self, position: Indices, rows: Mapping[int, tuple[Rows, Rows]]) -> None:
        """Stores the rows of a whole step; what can fail, as memory can run out, before the first is written.

        Else a ring would have lost rows to a step that never counted.
        """
        writes = []
        for layer, (key, value) in rows.items():
            store, num_slots = self._stores[layer], self._config.num_slots(layer)
            kept = slice(max(0, position.size - num_slots), None)  # the newest rows that fit
            slots = position[kept] % num_slots
            store.reserve(slots)
            writes.append((store, slots, key[:, :, kept], value[:, :, kept]))
        for store, slots, key, value in writes:
            store.write(slots, key, value)
        self._length += position.size
        self._high_water = max(self._high_water, self._length)
        self._step = None
