"""The list of seeded faults stays in step with the source; judging them is a command of its own."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import seeded_faults  # noqa: E402


@pytest.mark.parametrize("fault", seeded_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_still_applies_and_changes_the_source(fault: seeded_faults.Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.old) == 1
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
