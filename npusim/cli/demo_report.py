"""What `npusim demo` found, and how it shows it."""

from dataclasses import dataclass

from rich.table import Table

from npusim import byte_vocabulary, speculative
from npusim.cli.output import Json, finite, new_table, plain, print_fields, stdout
from npusim.parity import StepParity

TOLERANCE = 1e-4
"""Greatest absolute logits difference that is a match: float32 sums in another order, logits up to 30."""

ROUNDED_CACHE_TOLERANCE = 2e-2
"""The same for a cache that rounds its rows. A window off by one differs by 0.1 somewhere in a run."""

DIFFERENCES_PER_ROW = 8


@dataclass(frozen=True, kw_only=True)
class Part:
    """One generation with its parity record."""

    generation: speculative.Generation
    parity: tuple[StepParity, ...]
    kv_nbytes: int

    @property
    def worst(self) -> float:
        """The greatest logits difference of all steps."""
        return max(step.max_abs_difference for step in self.parity)


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Both generations from one prompt. cache_rounds: whether rows are less exact once they are stored."""

    prompt: str
    cache_rounds: bool
    plain: Part
    drafted: Part

    @property
    def tolerance(self) -> float:
        """The greatest logits difference that is a match."""
        return ROUNDED_CACHE_TOLERANCE if self.cache_rounds else TOLERANCE

    @property
    def worst(self) -> float:
        """The greatest logits difference of both."""
        return max(self.plain.worst, self.drafted.worst)

    @property
    def is_lossless(self) -> bool:
        """Whether drafting changed no token."""
        return self.plain.generation.tokens == self.drafted.generation.tokens

    @property
    def matches(self) -> bool:
        """Whether the demo shows what it promises.

        While all calls match, a cache that rounds can let tokens differ only where two are a near tie.
        """
        return (self.is_lossless or self.cache_rounds) and self.worst <= self.tolerance


def print_result(result: DemoResult) -> None:
    console = stdout()
    text = byte_vocabulary.decode(result.plain.generation.tokens)
    print_fields(console, {"prompt": result.prompt, "continuation": text})
    console.print()
    console.print(_difference_table("token by token", result.plain, result.tolerance))
    console.print()
    console.print(_difference_table("with drafts", result.drafted, result.tolerance))
    console.print()
    console.print(_summary_table(result))
    console.print()
    console.print(plain(_verdict(result)), soft_wrap=True)


def _difference_table(title: str, part: Part, tolerance: float) -> Table:
    """The difference of each call, several to a row; a row begins with the position of its first call."""
    table = new_table(f"{title}: largest logits difference of each call to the native run")
    table.add_column("position", justify="right", no_wrap=True)
    for _ in range(DIFFERENCES_PER_ROW):
        table.add_column(justify="right", no_wrap=True)
    for start in range(0, len(part.parity), DIFFERENCES_PER_ROW):
        steps = part.parity[start : start + DIFFERENCES_PER_ROW]
        table.add_row(str(steps[0].position), *(_difference(step, tolerance) for step in steps))
    return table


def _difference(step: StepParity, tolerance: float) -> str:
    text = f"{step.max_abs_difference:.1e}"
    return text if step.max_abs_difference <= tolerance else f"[bold red]{text}[/bold red]"


def _summary_table(result: DemoResult) -> Table:
    table = new_table()
    for heading in ("", "tokens", "steps", "accepted", "tokens/step", "worst", "KV bytes"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, part in (("token by token", result.plain), ("with drafts", result.drafted)):
        generation = part.generation
        drafted = any(step.proposed for step in generation.steps)
        table.add_row(
            name,
            str(len(generation.tokens)),
            str(len(generation.steps)),
            f"{generation.acceptance_rate:.0%}" if drafted else "-",
            f"{generation.tokens_per_target_step:.2f}",
            f"{part.worst:.1e}",
            f"{part.kv_nbytes:,}",
        )
    return table


def _verdict(result: DemoResult) -> str:
    parts = (result.plain, result.drafted)
    calls = [step for part in parts for step in part.parity]
    mismatches = sum(step.max_abs_difference > result.tolerance for step in calls)
    limit = f"{result.tolerance:g}"
    counted = " and ".join(str(len(part.generation.steps)) for part in parts)
    number = f"{len(calls)} calls (2 prefills, {counted} steps)"
    parity = (
        f"MISMATCH: {mismatches} of {number} differ from the native run by more than {limit}"
        if mismatches
        else f"all {number} match the native run (worst {result.worst:.1e}, allowed {limit})"
    )
    return f"{parity}\n{_lossless(result)}"


def _lossless(result: DemoResult) -> str:
    if result.is_lossless:
        return "drafting changed no token"
    if not result.matches:
        return "MISMATCH: drafting changed the tokens"
    return (
        "drafting changed the tokens, at a near tie: the float16 cache rounds the rows it stores, a block "
        "reads its own unrounded"
    )


def result_json(result: DemoResult) -> dict[str, Json]:
    return {
        "prompt": result.prompt,
        "text": byte_vocabulary.decode(result.plain.generation.tokens),
        "matches": result.matches,
        "lossless": result.is_lossless,
        "cache_rounds": result.cache_rounds,
        "tolerance": result.tolerance,
        "worst_difference": finite(result.worst),
        "plain": _part_json(result.plain),
        "speculative": _part_json(result.drafted),
    }


def _part_json(part: Part) -> dict[str, Json]:
    return {
        "tokens": list(part.generation.tokens),
        "finish_reason": part.generation.finish_reason.value,
        "target_steps": len(part.generation.steps),
        "acceptance_rate": part.generation.acceptance_rate,
        "tokens_per_target_step": part.generation.tokens_per_target_step,
        "worst_difference": finite(part.worst),
        "kv_nbytes": part.kv_nbytes,
        "steps": [
            {
                "position": step.position,
                "num_tokens": step.num_tokens,
                "max_abs_difference": finite(step.max_abs_difference),
            }
            for step in part.parity
        ],
    }
