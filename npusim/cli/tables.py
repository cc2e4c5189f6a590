"""Tables that keep every value at any width of the terminal."""

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

from npusim.cli.output import new_table

FOLDED_WIDTH = 24
"""The least that a column of sentences is folded to."""


def print_table(console: Console, table: Table, *, num_keys: int = 1, absent: str | None = None) -> None:
    """Print a table; where it is too wide, as several that each begin with the first `num_keys` columns.

    Columns with no_wrap stay in one line, others are folded; a value is never cut. absent: the mark of a cell
    that says nothing; a column of nothing else is left out.
    """
    cells = [list(column.cells) for column in table.columns]
    widths = [_needed(console, column, values) for column, values in zip(table.columns, cells, strict=True)]
    gap = table.padding[1]
    telling = [
        index for index, column in enumerate(cells) if index < num_keys or {*map(str, column)} != {absent}
    ]
    for number, chosen in enumerate(_parts(widths, telling, num_keys, console.width, gap)):
        if number:
            console.print()
        fits = _width(widths, chosen, gap) <= console.width
        console.print(_part(table, cells, chosen, fits=fits))


def _parts(widths: list[int], columns: list[int], num_keys: int, most: int, gap: int) -> list[list[int]]:
    """Indices of the columns of each part, as many in one as fit into `most`; all begin with the keys."""
    keys = columns[:num_keys]
    parts = [list(keys)]
    for column in columns[num_keys:]:
        part = [*parts[-1], column]
        if _width(widths, part, gap) <= most or parts[-1] == keys:
            parts[-1] = part
        else:
            parts.append([*keys, column])
    return parts


def _width(widths: list[int], chosen: list[int], gap: int) -> int:
    return sum(widths[index] for index in chosen) + gap * (len(chosen) - 1)


def _part(table: Table, cells: list[list[RenderableType]], chosen: list[int], *, fits: bool) -> Table:
    """Some columns of a table; where not even these fit, folding is all that is left."""
    part = new_table(gap=table.padding[1])
    for index in chosen:
        column = table.columns[index]
        no_wrap = column.no_wrap and fits
        part.add_column(column.header, justify=column.justify, no_wrap=no_wrap, overflow="fold")
    for row in zip(*(cells[index] for index in chosen), strict=True):
        part.add_row(*row)
    return part


def _needed(console: Console, column: Column, values: list[RenderableType]) -> int:
    """Columns of the terminal that the heading and every value fit into."""
    options = console.options.update(max_width=10_000)
    widest = max(Measurement.get(console, options, value).maximum for value in [column.header, *values])
    return widest if column.no_wrap else min(widest, FOLDED_WIDTH)
