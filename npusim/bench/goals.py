"""The suite of goals: every figure that npusim is held to, measured."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from npusim.bench.goal import GoalRow, GoalSetting, GoalSizes
from npusim.bench.goal_layers import layer_goals
from npusim.bench.goal_models import flat_goals, model_goals, start_goals
from npusim.bench.goal_speculative import speculative_goals

GROUPS: dict[str, Callable[[GoalSetting], list[GoalRow]]] = {
    "layers": layer_goals,
    "model": model_goals,
    "flat": flat_goals,
    "start": start_goals,
    "speculative": speculative_goals,
}
"""Goals that share models, in the order of the report."""


def measure_goals(groups: Sequence[str], sizes: GoalSizes) -> Iterator[GoalRow]:
    """Measure the groups asked for, one after the other; models are written to a folder that goes away."""
    with TemporaryDirectory(prefix="npusim-bench-") as folder:
        setting = GoalSetting(sizes=sizes, folder=Path(folder))
        for group in groups:
            yield from GROUPS[group](setting)
