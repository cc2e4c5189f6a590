"""Bookkeeping of a pool of cells: which position a cell holds and which sequences own it; no K/V rows.

A cell index is a name that never changes. Every verb returns new tags and leaves the old ones as they were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from npusim.errors import InputError
from npusim.reference.caches import Indices, Mask
from npusim.reference.numbers import check_count, check_rows


@dataclass(frozen=True)
class CellTags:
    """Per cell its position and its owners; a cell is free when no sequence owns it."""

    positions: tuple[int, ...]
    owners: tuple[frozenset[int], ...]

    @classmethod
    def empty(cls, num_cells: int) -> "CellTags":
        """A pool in which every cell is free."""
        return cls(positions=(0,) * num_cells, owners=(frozenset(),) * num_cells)

    @property
    def free(self) -> list[int]:
        """Free cells, lowest first."""
        return [cell for cell, owners in enumerate(self.owners) if not owners]

    @property
    def used_end(self) -> int:
        """One past the last cell in use."""
        return max((cell + 1 for cell, owners in enumerate(self.owners) if owners), default=0)

    def cells_of(self, sequence: int) -> dict[int, int]:
        """The cell of each position that a sequence owns."""
        return {self.positions[cell]: cell for cell, owners in enumerate(self.owners) if sequence in owners}

    def length_of(self, sequence: int) -> int:
        """One past the highest position of a sequence; 0 where it has none."""
        return max((position + 1 for position in self.cells_of(sequence)), default=0)

    def with_claims(self, cells: Sequence[int], positions: Indices, sequences: Indices) -> "CellTags":
        """Each cell taken for one position of one sequence."""
        claimed = {
            cell: (int(position), frozenset({int(sequence)}))
            for cell, position, sequence in zip(cells, positions, sequences, strict=True)
        }
        every = [claimed.get(cell, held) for cell, held in enumerate(self._held())]
        return CellTags(tuple(position for position, _ in every), tuple(owners for _, owners in every))

    def with_owner(self, sequence: int, cells: Sequence[int]) -> "CellTags":
        """The sequence owns the cells too."""
        return self._with_owners({cell: self.owners[cell] | {sequence} for cell in cells})

    def without_owner(self, sequence: int, cells: Sequence[int]) -> "CellTags":
        """The sequence owns the cells no longer; those without another owner become free."""
        return self._with_owners({cell: self.owners[cell] - {sequence} for cell in cells})

    def visible(self, sequences: Indices, positions: Indices) -> Mask:
        """Which cells each query may see by sequence and order, [queries, used_end]: owned and not newer."""
        rows = [
            [
                sequence in self.owners[cell] and self.positions[cell] <= position
                for cell in range(self.used_end)
            ]
            for sequence, position in zip(sequences.tolist(), positions.tolist(), strict=True)
        ]
        return np.array(rows, np.bool_).reshape(len(rows), self.used_end)

    def _held(self) -> list[tuple[int, frozenset[int]]]:
        return list(zip(self.positions, self.owners, strict=True))

    def _with_owners(self, changed: Mapping[int, frozenset[int]]) -> "CellTags":
        owners = tuple(changed.get(cell, owners) for cell, owners in enumerate(self.owners))
        return CellTags(self.positions, owners)


@dataclass(frozen=True, eq=False)
class FlatStep:
    """One step of several sequences on a flat token axis: [n] each; `last_rows` is by sequence."""

    tokens: Indices
    positions: Indices
    sequences: Indices
    last_rows: dict[int, int]

    def __post_init__(self) -> None:
        axes = {"tokens": self.tokens, "positions": self.positions, "sequences": self.sequences}
        for name, numbers in axes.items():
            check_rows(name, numbers)
            if numbers.dtype.kind not in "iu" or numbers.shape != (self.tokens.size,) or not numbers.size:
                raise InputError(
                    f"{name} is {numbers.dtype} {numbers.shape}; give an integer for each token, "
                    f"[{self.tokens.size}], and at least one token"
                )
        last_rows = {sequence: row for row, sequence in enumerate(self.sequences.tolist())}
        if self.last_rows != last_rows:
            raise InputError(f"last_rows is {self.last_rows}; of these sequences it is {last_rows}")


def flatten_step(feeds: Mapping[int, tuple[Sequence[int], int]]) -> FlatStep:
    """Lays `{sequence: (tokens, first position)}` one after the other, in the order given."""
    if not isinstance(feeds, Mapping) or not feeds:
        raise InputError(f"{_NEEDED}; got {feeds!r}")
    checked = {sequence: _checked_feed(sequence, feed) for sequence, feed in feeds.items()}
    tokens = [token for sequence_tokens, _ in checked.values() for token in sequence_tokens]
    positions = [first + i for given, first in checked.values() for i in range(len(given))]
    sequences = [sequence for sequence, (given, _) in checked.items() for _ in given]
    last_rows = {sequence: row for row, sequence in enumerate(sequences)}
    return FlatStep(
        np.array(tokens, np.int64), np.array(positions, np.int64), np.array(sequences, np.int64), last_rows
    )


_NEEDED = "a step needs at least one sequence, and each sequence at least one token"


def _checked_feed(sequence: object, feed: tuple[Sequence[int], int]) -> tuple[list[int], int]:
    """Tokens and first position of a sequence as Python integers."""
    check_count("sequence", sequence)
    try:
        given, first = feed
        tokens = list(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"sequence {sequence}: {error}; give (tokens, first position)") from error
    if not tokens:
        raise InputError(f"{_NEEDED}; sequence {sequence} has none")
    check_count(f"the first position of sequence {sequence}", first)
    for token in tokens:
        check_count(f"a token of sequence {sequence}", token)
    return [int(token) for token in tokens], int(first)
