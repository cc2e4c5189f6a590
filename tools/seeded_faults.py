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
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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


class Verdict(Enum):
    """What the tests said."""

    KILLED = "killed"
    SURVIVED = "survived"


FAULTS = (
    Fault(
        name="window one too wide",
        file="transforms/masks.py",
        old="ops.less(distance, i32(local_window_size))",
        new="ops.less_equal(distance, i32(local_window_size))",
    ),
    Fault(
        name="window one too narrow",
        file="transforms/masks.py",
        old="ops.less(distance, i32(local_window_size))",
        new="ops.less(distance, i32(max(1, local_window_size - 1)))",
    ),
    Fault(
        name="slot distance as window",
        file="transforms/masks.py",
        old="distance = ops.subtract(frame.query_position, frame.key_position)",
        new="""keys = frame.key_position.get_shape()[1]
        rows = frame.query_position.get_shape()[0]
        slots = [[keys - rows + row - slot for slot in range(keys)] for row in range(rows)]
        distance = ops.constant(slots, dtype="int32")""",
    ),
    Fault(
        name="boundary from seqlens_k",
        file="transforms/frames.py",
        old="return PastKeys(position=slots, filled=ops.less(slots, step.stored).output(0))",
        new="return PastKeys(position=slots, filled=ops.less(slots, step.total).output(0))",
    ),
    Fault(
        name="stale slots visible",
        file="transforms/frames.py",
        old="return PastKeys(position=slots, filled=ops.less(slots, step.stored).output(0))",
        new="return PastKeys(position=slots, filled=ops.greater_equal(slots, i32(0)).output(0))",
    ),
    Fault(
        name="sink dropped",
        file="transforms/decompose_gqa.py",
        old="    if gqa.has_sink:",
        new="    if gqa.has_sink and gqa.name == '':",
    ),
    Fault(
        name="sink counted twice",
        file="transforms/decompose_gqa.py",
        old="inputs.append(sink_logits(gqa))",
        new="inputs.append(ops.add(sink_logits(gqa), scalar(0.6931472, gqa.element_type)).output(0))",
    ),
    Fault(
        name="rotary from slot index",
        file="transforms/shared_parts.py",
        old="block = self.frame(site).query_position",
        new="block = i32(list(range(site.capacity, site.capacity + site.sequence_length))).output(0)",
    ),
    Fault(
        name="heads tiled instead of repeated",
        file="transforms/decompose_gqa.py",
        old="ops.unsqueeze(rows, i32([2])), i64([1, gqa.kv_num_heads, gqa.group, length, size])",
        new="ops.unsqueeze(rows, i32([1])), i64([1, gqa.group, gqa.kv_num_heads, length, size])",
    ),
    Fault(
        name="block left-aligned",
        file="npusim/static_graph.py",
        old="self._input_ids[0, pad:] = tokens",
        new="self._input_ids[0, :length] = tokens",
    ),
    Fault(
        name="padding rows stored",
        file="npusim/static_graph.py",
        old="first=self.num_rows - length, length=length",
        new="first=0, length=length",
    ),
    Fault(
        name="trim one too few",
        file="npusim/kv_manager.py",
        old="self._write(start, rows)",
        new="self._write(min(start + 1, self._committed), rows)",
    ),
    Fault(
        name="ring slot off by one",
        file="transforms/frames.py",
        old="age = ops.floor_mod(ops.subtract(newest, _slots(capacity)), i32(capacity))",
        new="age = ops.floor_mod(ops.subtract(newest, row(1, capacity + 1)), i32(capacity))",
    ),
    Fault(
        name="rolling eviction off by one",
        file="transforms/frames.py",
        old="excess = ops.maximum(ops.subtract(stored, i32(capacity)), i32(0))",
        new="excess = ops.maximum(ops.subtract(stored, i32(capacity - 1)), i32(0))",
    ),
    Fault(
        name="gathered rows off by one",
        file="transforms/frames.py",
        old="index = ops.squeeze(clamped, i32([0])).output(0)",
        new="index = ops.squeeze(ops.maximum(ops.subtract(clamped, i32(1)), i32(0)), i32([0])).output(0)",
    ),
    Fault(
        name="eviction before attention",
        file="npusim/request.py",
        old="        graph.load(tokens, start)\n",
        new="""        graph.load(tokens, start)
        for group in self.kv.groups:
            for write in group.layout.plan_append(start, len(tokens)).writes:
                group.past[:, :, write.slot : write.slot + write.length] = 0
""",
    ),
    Fault(
        name="mask shared across windows",
        file="transforms/shared_parts.py",
        old="            key_of(frame.key_position),\n            gqa.local_window_size,\n",
        new="            key_of(frame.key_position),\n",
    ),
    Fault(
        name="past rows re-rounded",
        file="transforms/cached_rows.py",
        old="concat([past, stored], 2)",
        new="concat([past if codec is None else codec.store(codec.load(past)), stored], 2)",
    ),
    Fault(
        name="codes rounded half away from zero",
        file="transforms/cache_codec.py",
        old='ops.round(scaled, "half_to_even")',
        new='ops.round(scaled, "half_away_from_zero")',
    ),
    Fault(
        name="high-water lowered by trim",
        file="npusim/kv_manager.py",
        old="            self._committed, self._pending = num_tokens, None\n",
        new="""            self._committed, self._pending = num_tokens, None
            self._high_water = num_tokens
""",
    ),
)


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
    """Run the tests in a tree up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *KILLERS]
    return subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode == 0


KILLERS = (
    "tests/transforms",
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
