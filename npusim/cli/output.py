"""How commands talk: results on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]


def stdout() -> Console:
    """The console of results. Made anew each time, since a caller may have replaced sys.stdout."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def print_json(value: Mapping[str, Json]) -> None:
    """One JSON object and nothing else on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(description, total=total)

        def advance(steps: float = 1) -> None:
            bar.advance(task, steps)

        yield advance
