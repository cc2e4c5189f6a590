"""How commands talk: results on stdout, everything else on stderr."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]


class _Console(Console):
    """A console that leaves a reader that has gone to the caller; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich while a BrokenPipeError is handled."""
        raise BrokenPipeError


PIPE_WIDTH = 200
"""Columns where stdout is no terminal: tables keep their cells in one line for grep."""


def stdout() -> Console:
    """The console of results. Made anew each time, since a caller may have replaced sys.stdout."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return _Console(file=sys.stdout, highlight=False, width=width)


def new_table(title: str | None = None, *, gap: int = 2) -> Table:
    """An empty table without lines, `gap` spaces between its columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
    )


def print_fields(console: Console, fields: Mapping[str, str]) -> None:
    """One "name  value" a line, names in one column; a long value is left to the terminal to wrap."""
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        console.print(Text(name.ljust(width), style="bold").append_text(plain(value)), soft_wrap=True)


def print_sentences(console: Console, lines: Iterable[str]) -> None:
    """Lines as they are, for grep; on a terminal they are broken between words."""
    for line in lines:
        console.print(plain(line), soft_wrap=not console.is_terminal)


def by_layers(heading: str, sentences: Mapping[int, str]) -> list[str]:
    """Each sentence once, behind the numbers of the layers that it holds for."""
    layers: dict[str, list[str]] = {}
    for number, sentence in sentences.items():
        layers.setdefault(sentence, []).append(str(number))
    return [
        f"{heading}, layer{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {sentence}"
        for sentence, numbers in layers.items()
    ]


def finite(value: float) -> float | None:
    """The number, or null in JSON, which knows no infinity."""
    return value if math.isfinite(value) else None


def print_json(value: Mapping[str, Json]) -> None:
    """One JSON object and nothing else on stdout, in ASCII: it passes through a pipe of any encoding."""
    print(json.dumps(value, indent=2, allow_nan=False))


def plain(text: str) -> Text:
    """Text as it is: brackets in it are no markup, control characters are shown as escapes."""
    return Text(
        "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    )


class Advance(Protocol):
    """Moves a progress bar on."""

    def __call__(self, steps: float = 1) -> None: ...


@contextmanager
def progress(description: str, total: float | None) -> Iterator[Advance]:
    """A progress bar on stderr, only where stderr is a terminal; total None is work of unknown length."""
    console = Console(file=sys.stderr)
    count = () if total is None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(description, total=total)

        def advance(steps: float = 1) -> None:
            bar.advance(task, steps)

        yield advance
