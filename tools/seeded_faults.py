"""Break the product on purpose, one fault at a time, and see whether the tests notice.

Usage: python tools/seeded_faults.py [--list] [--only NAME ...] [--json]

Each fault is one edit in a copy of the tree; the tests that should kill it run there. Exit code 0: all
killed, 1: a fault survived, 2: a fault no longer applies to the source or the tests fail without any fault.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One edit: in `file`, `old` (which stands there exactly once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str


with Path(__file__).with_suffix(".toml").open("rb") as _file:
    FAULTS = tuple(Fault(**fault) for fault in tomllib.load(_file)["fault"])


class Verdict(Enum):
    """What the tests said."""

    KILLED = "killed"
    SURVIVED = "survived"


class DoesNotApplyError(Exception):
    """The source moved on: a fault's text is no longer there exactly once."""


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis", ".venv", "*.egg-info")
    for name in ("npusim", "transforms", "tests", "tools"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)
    shutil.copy(ROOT / "README.md", target)


def tests_pass(tree: Path) -> bool:
    """Run the tests in a tree up to the first failure; DoesNotApplyError when they do not even begin."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *KILLERS]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise DoesNotApplyError(f"the tests do not run: {run.stdout[-500:]}{run.stderr[-500:]}")
    return run.returncode == pytest.ExitCode.OK


KILLERS = (
    "tests/transforms",
    "tests/npusim/test_speculative_generation.py",
    "tests/npusim/test_speculative_drafters.py",
    "tests/npusim/test_sampling.py",
    "tests/npusim/test_pyramid.py",
    "tests/npusim/test_request.py",
    "tests/npusim/test_kv_manager.py",
    "tests/npusim/test_quantized_models.py",
    "tests/npusim/test_layouts_on_models.py",
    "tests/npusim/test_stateful_law.py",
)
"""The quickest tests first: most faults die in the single op."""


def judge(fault: Fault) -> Verdict:
    """Apply one fault to a copy of the tree and run the tests."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        apply(fault, tree)
        return Verdict.SURVIVED if tests_pass(tree) else Verdict.KILLED


def apply(fault: Fault, tree: Path) -> None:
    """Make the edit; DoesNotApplyError when the text is not there exactly once."""
    path = tree / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise DoesNotApplyError(
            f"{fault.name}: its text stands {source.count(fault.old)} times in {fault.file}"
        )
    path.write_text(source.replace(fault.old, fault.new))


def check_baseline() -> None:
    """Without a fault the tests pass, or no verdict means anything."""
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        if not tests_pass(Path(folder)):
            raise DoesNotApplyError("the tests fail without any fault; mend them first")


def report(verdicts: dict[str, Verdict], *, as_json: bool) -> None:
    """A table for people, or one JSON object."""
    if as_json:
        print(json.dumps({name: verdict.value for name, verdict in verdicts.items()}))
        return
    table = Table("fault", "verdict", box=None)
    for name, verdict in verdicts.items():
        style = "green" if verdict is Verdict.KILLED else "bold red"
        table.add_row(name, f"[{style}]{verdict.value}")
    Console().print(table)


def main() -> int:
    """Judge the faults asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if options.list:
        print("\n".join(f"{fault.name}  ({fault.file})" for fault in chosen))
        return 0
    try:
        check_baseline()
        progress = track(chosen, "judging", console=Console(stderr=True), transient=True)
        verdicts = {fault.name: judge(fault) for fault in progress}
    except DoesNotApplyError as error:
        print(error, file=sys.stderr)
        return 2
    report(verdicts, as_json=options.json)
    return 0 if all(verdict is Verdict.KILLED for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
