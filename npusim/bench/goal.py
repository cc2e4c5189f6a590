"""What a goal is: a figure, a limit, and whether it is reached; and the sizes that goals are measured at."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from npusim.bench.synthetic import AttentionShape, ModelShape
from npusim.bench.timing import Plan, Ratio


class Sense(Enum):
    """Which side of its limit a figure has to be on."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A limit for a figure."""

    sense: Sense
    limit: float
    unit: str = "x"

    def __str__(self) -> str:
        return f"{self.sense.value} {self.limit:g} {self.unit}"

    def is_reached(self, figure: float) -> bool:
        """Whether the figure lies on the right side."""
        return figure >= self.limit if self.sense is Sense.AT_LEAST else figure <= self.limit


@dataclass(frozen=True, kw_only=True)
class GoalRow:
    """One line of the report.

    ratio: the figure. spread: 10th and 90th percentile where there are several. best: the quotient of the
    smallest times, None where nothing was timed side by side. note: why there is no figure, or what it means.
    """

    name: str
    goal: Goal
    ratio: float | None
    spread: tuple[float, float] | None = None
    best: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool:
        """Never without a figure."""
        return self.ratio is not None and self.goal.is_reached(self.ratio)


def row_of_ratio(name: str, goal: Goal, ratio: Ratio, note: str = "") -> GoalRow:
    """The row of two things timed side by side."""
    return GoalRow(
        name=name, goal=goal, ratio=ratio.median, spread=ratio.spread, best=ratio.of_best, note=note
    )


def at_least(limit: float) -> Goal:
    """A quotient of times that has to be this large."""
    return Goal(sense=Sense.AT_LEAST, limit=limit)


def at_most(limit: float, unit: str = "x") -> Goal:
    """A figure that has to be this small."""
    return Goal(sense=Sense.AT_MOST, limit=limit, unit=unit)


@dataclass(frozen=True, kw_only=True)
class GoalSizes:
    """The sizes that goals are measured at.

    layer: of attention alone, at two contexts; window: of windowed layers; chain_length: layers in a chain.
    model: at a prompt of `prompt` and `num_steps` further tokens. flat_contexts: a short one, longer ones.
    large_model: the one whose start is timed. new_tokens: of a speculative run.
    """

    layer: AttentionShape
    layer_contexts: tuple[int, int]
    window: int
    chain_length: int
    model: ModelShape
    prompt: int
    num_steps: int
    flat_contexts: tuple[int, ...]
    large_model: ModelShape
    new_tokens: int
    plan: Plan


FULL_SIZES = GoalSizes(
    layer=AttentionShape(num_heads=64, kv_num_heads=8),
    layer_contexts=(2048, 8192),
    window=128,
    chain_length=12,
    model=ModelShape(max_positions=33024),
    prompt=256,
    num_steps=128,
    flat_contexts=(512, 8192, 32768),
    large_model=ModelShape(
        attention=AttentionShape(num_heads=16, kv_num_heads=4),
        hidden_size=1024,
        num_layers=24,
        intermediate_size=3072,
    ),
    new_tokens=96,
    plan=Plan(rounds=15, burst=20, warmup=5),
)
"""Those that the limits are meant for."""


@dataclass(frozen=True, kw_only=True)
class GoalSetting:
    """Where and at what sizes goals are measured."""

    sizes: GoalSizes
    folder: Path
