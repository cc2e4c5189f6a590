"""What `npusim bench` prints."""

from collections.abc import Sequence

from npusim.bench.conversation import Runtime
from npusim.bench.goal import GoalRow
from npusim.bench.machine import Machine
from npusim.bench.report import ContextResult, RuntimeResult
from npusim.bench.timing import Verdict
from npusim.cli.output import Json, new_table, plain, stdout
from npusim.cli.tables import print_table


def print_report(machine: Machine, results: Sequence[ContextResult]) -> None:
    """The table of contexts and runtimes, and what the machine allows."""
    table = new_table()
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("runtime", no_wrap=True)
    for heading in ("ms/token", "p10..p90", "tokens/s", "x npusim", "p10..p90"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("host", justify="right", no_wrap=True)
    for result in results:
        for each in result.runtimes:
            table.add_row(*(plain(cell) for cell in _cells(result.context, each)))
        limit = result.limit(machine)
        limits = (str(result.context), "est. limit", f"{1e3 * limit:.2f}", "", f"{1 / limit:,.0f}")
        table.add_row(*(plain(cell) for cell in limits))
    console = stdout()
    print_table(console, table, num_keys=2)
    console.print(
        plain(
            f"{machine.threads} threads, load {machine.load:.1f}, memory read at "
            f"{machine.bandwidth / 1e9:.1f} GB/s; est. limit: weights and KV rows of a step at that rate, an "
            "estimate that a step may beat"
        )
    )


def _cells(context: int, result: RuntimeResult) -> tuple[str, ...]:
    low, high = result.samples.spread
    fewest, most = result.ratio.spread
    is_npusim = result.runtime is Runtime.FAST
    return (
        str(context),
        result.runtime.value,
        f"{1e3 * result.samples.median:.2f}",
        f"{1e3 * low:.2f}..{1e3 * high:.2f}",
        f"{result.tokens_per_second:,.0f}",
        "" if is_npusim else f"{result.ratio.median:.2f}",
        "" if is_npusim else f"{fewest:.2f}..{most:.2f}",
        "" if is_npusim else _verdict(result),
        "" if result.host_share is None else f"{result.host_share:.1%}",
    )


def _verdict(result: RuntimeResult) -> str:
    verdict = result.ratio.verdict
    return verdict.value if verdict is Verdict.NO_DIFFERENCE else f"npusim {verdict.value}"


def report_json(machine: Machine, results: Sequence[ContextResult]) -> dict[str, Json]:
    """The report as one JSON object."""
    return {
        "machine": _machine_json(machine),
        "contexts": [
            {
                "context": result.context,
                "bytes_per_step": result.bytes_per_step,
                "limit_seconds": result.limit(machine),
                "limit_tokens_per_second": 1 / result.limit(machine),
                "runtimes": [_runtime_json(each) for each in result.runtimes],
            }
            for result in results
        ],
    }


def _machine_json(machine: Machine) -> dict[str, Json]:
    return {"threads": machine.threads, "load": machine.load, "bandwidth": machine.bandwidth}


def _runtime_json(result: RuntimeResult) -> dict[str, Json]:
    return {
        "runtime": result.runtime.value,
        "seconds": result.samples.median,
        "spread": list(result.samples.spread),
        "best": result.samples.best,
        "tokens_per_second": result.tokens_per_second,
        "ratio": result.ratio.median,
        "ratio_spread": list(result.ratio.spread),
        "ratio_of_best": result.ratio.of_best,
        "verdict": _verdict(result),
        "host_share": result.host_share,
    }


def print_goals(machine: Machine, rows: Sequence[GoalRow]) -> None:
    """The table of goals."""
    table = new_table()
    table.add_column("goal", overflow="fold")
    table.add_column("measured", justify="right", no_wrap=True)
    for heading in ("p10..p90", "wanted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reached", no_wrap=True)
    for row in rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.3g}..{row.spread[1]:.3g}"
        cells = (row.name, _figure(row), spread, str(row.goal), "yes" if row.reached else "NO")
        table.add_row(*(plain(cell) for cell in cells))
    console = stdout()
    print_table(console, table)
    for reason in dict.fromkeys(row.note for row in rows if row.ratio is None):
        console.print(plain(f"not measured: {reason}"))
    console.print(plain(f"{machine.threads} threads, load {machine.load:.1f}"))


def _figure(row: GoalRow) -> str:
    return "not measured" if row.ratio is None else f"{row.ratio:.3g}"


def goals_json(machine: Machine, rows: Sequence[GoalRow]) -> dict[str, Json]:
    """The suite as one JSON object."""
    return {"machine": _machine_json(machine), "goals": [_goal_json(row) for row in rows]}


def _goal_json(row: GoalRow) -> dict[str, Json]:
    return {
        "name": row.name,
        "ratio": row.ratio,
        "spread": None if row.spread is None else list(row.spread),
        "best": row.best,
        "goal": str(row.goal),
        "reached": row.reached,
        "note": row.note,
    }
