"""Tables keep every value at any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npusim.cli.output import new_table
from npusim.cli.tables import print_table

SENTENCE = "the window is measured in slots, and a slot is not a position"
ROWS = (("0", "32/8 x 128", "4096 (not causal)", SENTENCE), ("11", "4/2 x 16", "[bold]-[/bold]", "-"))


def table() -> Table:
    made = new_table()
    for heading in ("layer", "heads", "window"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("refused", overflow="fold")
    for row in ROWS:
        made.add_row(*row)
    return made


def printed(width: int, num_keys: int = 1) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(console, table(), num_keys=num_keys)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_a_table_that_fits_is_one() -> None:
    assert printed(120) == [
        "layer       heads             window  refused",
        f"    0  32/8 x 128  4096 (not causal)  {SENTENCE}",
        "   11    4/2 x 16                  -  -",
    ]


def test_sentences_are_folded_before_a_table_is_parted() -> None:
    lines = printed(62)
    assert lines[1:4] == [
        "    0  32/8 x 128  4096 (not causal)  the window is measured",
        "                                      in slots, and a slot is",
        "                                      not a position",
    ]


def test_columns_that_do_not_fit_come_below_behind_their_keys() -> None:
    assert printed(61) == [
        "layer       heads             window",
        "    0  32/8 x 128  4096 (not causal)",
        "   11    4/2 x 16                  -",
        "",
        "layer  refused",
        "    0  the window is measured in slots, and a slot is not a",
        "       position",
        "   11  -",
    ]


@pytest.mark.parametrize(("absent", "left"), [(None, "a b c"), ("-", "a c"), ("x", "a b c")])
def test_a_column_that_says_nothing_is_left_out(absent: str | None, left: str) -> None:
    made = new_table()
    for heading in ("a", "b", "c"):
        made.add_column(heading, no_wrap=True)
    for row in (("-", Text("-"), Text("x")), ("-", Text("-"), Text("-"))):
        made.add_row(*row)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_table(console, made, absent=absent)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert " ".join(lines[0].split()) == left
    assert len(lines[2].split()) == len(left.split())


def test_several_keys_are_repeated() -> None:
    lines = printed(41, num_keys=2)
    headings = [line.split() for line in lines if line.startswith("layer")]
    assert headings == [["layer", "heads", "window"], ["layer", "heads", "refused"]]


@pytest.mark.parametrize("width", range(28, 130, 6))
def test_no_value_is_cut(width: int) -> None:
    squeezed = "".join("".join(printed(width)).split())
    for cell in ("32/8 x 128", "4096 (not causal)", SENTENCE, "4/2 x 16"):
        assert "".join(cell.split()) in squeezed


@pytest.mark.parametrize("width", [5, 9, 17])
def test_where_not_even_the_keys_fit_values_are_folded(width: int) -> None:
    squeezed = "".join("".join(printed(width)).split())
    digits = sorted(
        character for row in ROWS for cell in row[1:3] for character in cell if character.isdigit()
    )
    keys = 3 * ["0", "1", "1"]
    assert sorted(filter(str.isdigit, squeezed)) == sorted(digits + keys)
