"""The simulator beside other runtimes on the same tokens: how far they differ, where first, and why."""

from npusim.compare.backends import BackendKind
from npusim.compare.comparison import BackendReport, Comparison, ComparisonReport, compare

__all__ = ["BackendKind", "BackendReport", "Comparison", "ComparisonReport", "compare"]
