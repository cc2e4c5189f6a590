"""Many sequences over one pool of one-token cells; who sees what follows from the tags of the cells alone."""

from dataclasses import dataclass, field

import numpy as np

from npusim.errors import CapacityError, ConfigError, InputError, TrimError
from npusim.reference.caches import (
    AttendSpec,
    CacheConfig,
    Indices,
    Rows,
    check_step_rows,
)
from npusim.reference.cell_tags import CellTags, FlatStep
from npusim.reference.numbers import check_count, is_integer
from npusim.reference.row_store import RowStore


@dataclass
class _Plan:
    """One step's allocation, shared by all layers; `tags` become the cache's once all are served."""

    tags: CellTags
    cells: Indices  # [n]
    positions: Indices  # [n]
    base: AttendSpec
    specs: dict[int, AttendSpec] = field(default_factory=dict)  # by window
    served: set[int] = field(default_factory=set)

    def spec_for(self, window: int) -> AttendSpec:
        """One spec per window and step, the same object for every layer that has the window."""
        if window not in self.specs:
            self.specs[window] = self._windowed(window)
        return self.specs[window]

    def _windowed(self, window: int) -> AttendSpec:
        mask = self.base.mask
        if window < 0 or mask is None:
            return self.base
        key_positions = np.array(self.tags.positions[: mask.shape[1]])
        near = self.positions[:, None] - key_positions[None, :] < window  # [n, used_end]
        return AttendSpec.explicit(mask & near)


class CellReferenceCache:
    """A pool of `config.capacity` cells; sequences fork, shrink and share a step.

    Windows mask and evict nothing. A step is `begin_step` and then one `update_and_fetch` for each layer; the
    last one makes it count.
    """

    def __init__(self, config: CacheConfig) -> None:
        if config.batch_size != 1:
            raise ConfigError(f"batch_size is {config.batch_size}; cells lie on one flat token axis, give 1")
        if config.window_slack:
            raise ConfigError(f"window_slack is {config.window_slack}; cells evict nothing, give 0")
        self._config = config
        self._stores = [RowStore(config, config.capacity) for _ in range(config.num_layers)]
        self._tags = CellTags.empty(config.capacity)
        self._plan: _Plan | None = None

    @property
    def config(self) -> CacheConfig:
        """The configuration given."""
        return self._config

    @property
    def free_cells(self) -> int:
        """Cells that no sequence owns."""
        return len(self._tags.free)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(store.nbytes for store in self._stores)

    def can_extend(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens, of whatever sequences, finds cells; InputError for no number."""
        check_count("num_tokens", num_tokens)
        return num_tokens <= self.free_cells

    def seq_len(self, sequence: int) -> int:
        """One past the highest position of a sequence; 0 for one that has none."""
        check_count("sequence", sequence)
        return self._tags.length_of(sequence)

    def begin_step(self, step: FlatStep) -> None:
        """Admits a step: each sequence continues at its length, and there are cells for all tokens.

        The lowest free cells are planned for it. Nothing is changed before the last layer is served.
        """
        self._refuse_step("begin another step")
        if not isinstance(step, FlatStep):
            raise InputError(f"a step is a {type(step).__name__}; give what flatten_step returns")
        for sequence in np.unique(step.sequences).tolist():
            given = step.positions[step.sequences == sequence]
            expected = self._tags.length_of(sequence) + np.arange(given.size)
            if sequence < 0 or not np.array_equal(given, expected):
                raise InputError(
                    f"sequence {sequence}: positions {given.tolist()} must be {expected.tolist()}, "
                    "and a sequence is named by 0 or more"
                )
        if not self.can_extend(step.positions.size):
            raise CapacityError(
                f"step of {step.positions.size} tokens, but {self.free_cells} of "
                f"{self._config.capacity} cells are free; remove sequences first"
            )
        cells = self._tags.free[: step.positions.size]
        tags = self._tags.with_claims(cells, step.positions, step.sequences)
        base = AttendSpec.explicit(tags.visible(step.sequences, step.positions))
        self._plan = _Plan(tags, np.array(cells, np.int64), step.positions.astype(np.int64), base)

    def update_and_fetch(
        self, layer: int, key: Rows, value: Rows, position: Indices
    ) -> tuple[Rows, Rows, AttendSpec]:
        """Puts a layer's new rows into the step's cells and hands back the pool up to the last cell in use.

        key [1, K, n, H], value [1, K, n, V], position [n] as declared in `begin_step`.
        """
        plan = self._plan
        if plan is None:
            raise InputError(f"layer {layer}: no step is under way; call begin_step first")
        check_step_rows(self._config, layer, key, value, position)
        if layer in plan.served:
            raise InputError(f"layer {layer} was served already in this step; begin_step comes first")
        if not np.array_equal(position, plan.positions):
            raise InputError(
                f"layer {layer}: positions {position.tolist()} differ from those "
                f"of the step, {plan.positions.tolist()}"
            )
        store = self._stores[layer]
        store.write(plan.cells, key.astype(self._config.dtype), value.astype(self._config.dtype))
        key_pool, value_pool = store.read(np.arange(plan.tags.used_end))
        spec = plan.spec_for(self._config.window(layer))
        plan.served.add(layer)
        if len(plan.served) == self._config.num_layers:
            self._tags, self._plan = plan.tags, None
        return key_pool, value_pool, spec

    def abandon_step(self) -> None:
        """Drops a step that not every layer has been served for; its cells stay free."""
        if self._plan is None:
            raise InputError("no step is under way, there is nothing to abandon")
        self._plan = None

    def seq_cp(self, source: int, target: int, upto: int | None = None) -> int:
        """Forks: `target`, empty so far, shares the positions of `source` below `upto` (None: all).

        Returns how many. No row is copied; what either sequence adds later is its own.
        """
        self._refuse_step("fork")
        length = self.seq_len(source)
        end = length if upto is None else upto
        if not is_integer(target) or target < 0 or self.seq_len(target):
            raise InputError(
                f"sequence {target!r} is no number of 0 or more, or has tokens; fork to a new one"
            )
        if not is_integer(end) or not 0 < end <= length:
            raise InputError(f"fork of sequence {source} up to {end}; it has length {length}")
        cells = [cell for position, cell in self._tags.cells_of(source).items() if position < end]
        self._tags = self._tags.with_owner(target, cells)
        return len(cells)

    def seq_rm(self, sequence: int, start: int = 0, end: int | None = None) -> int:
        """Takes positions start .. end - 1 (to the end) from a sequence; returns how many it had of them.

        Nothing is evicted by windows, so every such rewind is exact. Cells without another owner become free.
        """
        self._refuse_step("remove")
        length = self.seq_len(sequence)
        stop = length if end is None else end
        if not (is_integer(start) and is_integer(stop) and 0 <= start <= stop <= length):
            raise TrimError(f"removal of {start}..{stop} from sequence {sequence} of length {length}")
        held = self._tags.cells_of(sequence)
        cells = [cell for position, cell in held.items() if start <= position < stop]
        self._tags = self._tags.without_owner(sequence, cells)
        return len(cells)

    def reset(self) -> None:
        """As new: all cells free, no step under way, rows zero (STATIC) or given back (DYNAMIC)."""
        for store in self._stores:
            store.clear()
        self._tags = CellTags.empty(self._config.capacity)
        self._plan = None

    def _refuse_step(self, verb: str) -> None:
        if self._plan is not None:
            raise InputError(f"a step is under way; finish or abandon it before you {verb}")
