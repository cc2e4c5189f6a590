"""`npusim bench`: time per token beside other runtimes, and the suite of goals."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from npusim.bench import goals, plot
from npusim.bench.conversation import Conversation, Runtime
from npusim.bench.goal import FULL_SIZES, GoalRow
from npusim.bench.machine import Machine, describe_machine
from npusim.bench.report import ContextResult, RuntimeResult, measure_contexts
from npusim.bench.synthetic import AttentionShape, ModelShape, build_model, save
from npusim.bench.timing import Plan
from npusim.cli.config_help import config_keys
from npusim.cli.output import Json, new_table, plain, print_json, progress, stdout
from npusim.cli.parsers import Subparsers, add_command, add_config_option, at_least, parse_config
from npusim.config_values import ConfigValue

DESCRIPTION = """\
Time the steps of a generation, one token each, on npusim and on other runtimes: in one
process, in turn, medians over many rounds. Without MODEL, a synthetic one is made.

A ratio of times between 0.75 and 1.3 is reported as no difference: that much lies between
two runs of the same thing. The limit beside them is the time that reading all weights and
KV rows once takes at the memory bandwidth measured just before."""

EPILOG = f"""\
runtimes for --against:
  device   npusim with NPUSIM_EXECUTION=DEVICE: the form that an NPU compiler is given
  ort      ONNX Runtime on the CPU, past and present in one buffer
  npuw     OpenVINO's own NPUW on the CPU device

examples:
  npusim bench model.onnx --against ort,npuw
  npusim bench --layers 24 --hidden 1024 --heads 16 --kv-heads 4
  npusim bench --window 128 -c NPUSIM_KV_LAYOUT=RING --context 512,2048,8192 --plot sweep.png
  npusim bench --suite goals --json

exit code: 0, or 1 where a goal of the suite is not reached

{config_keys()}"""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "bench", "time per token, beside other runtimes", DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", nargs="?", type=Path, help="ONNX file of a language model")
    _add_shape_options(parser)
    parser.add_argument(
        "--context",
        metavar="N[,N...]",
        type=_contexts,
        default=(256,),
        help="tokens stored before the steps; several make a sweep (default 256)",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=at_least(2), default=128, help="tokens per conversation (default 128)"
    )
    parser.add_argument(
        "--against",
        metavar="NAME[,NAME...]",
        type=_runtimes,
        default=(Runtime.DEVICE,),
        help="device, ort, npuw (default device)",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=at_least(1), default=15, help="rounds of all runtimes (default 15)"
    )
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw time per token over context")
    parser.add_argument("--suite", choices=["goals"], help="measure everything that npusim is held to")
    parser.add_argument(
        "--groups",
        metavar="NAME[,NAME...]",
        type=_groups,
        default=tuple(goals.GROUPS),
        help=f"of the suite: {', '.join(goals.GROUPS)} (default all)",
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.suite:
        return _run_suite(options)
    if options.plot:
        plot.check_available()
    machine = describe_machine()
    with TemporaryDirectory(prefix="npusim-bench-") as folder, progress("measuring", None):
        path = options.model or _synthetic(options, Path(folder))
        settings: dict[str, ConfigValue] = {**parse_config(options.config)}
        conversation = Conversation(
            path=path, context=1, num_steps=options.tokens, settings=tuple(settings.items())
        )
        plan = Plan(rounds=options.rounds, burst=min(5, options.tokens - 1))
        results = measure_contexts(conversation, options.context, options.against, plan)
    if options.plot:
        plot.draw(options.plot, results, machine)
    if options.json:
        print_json(_report_json(machine, results))
    else:
        _print_report(machine, results)
    return 0


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape of the synthetic model")
    shape, attention = ModelShape(), AttentionShape()
    for name, default, meaning in (
        ("layers", shape.num_layers, "layers"),
        ("hidden", shape.hidden_size, "hidden size"),
        ("heads", attention.num_heads, "query heads"),
        ("kv-heads", attention.kv_num_heads, "key-value heads"),
        ("head-size", attention.head_size, "channels of a head"),
        ("vocab", shape.vocab_size, "token ids"),
    ):
        group.add_argument(
            f"--{name}",
            metavar="N",
            type=at_least(1),
            default=default,
            help=f"{meaning} (default {default})",
        )
    group.add_argument("--ffn", metavar="N", type=at_least(1), help="width of the MLP (default 3 x hidden)")
    group.add_argument("--window", metavar="N", type=at_least(1), help="sliding window (default none)")


def _synthetic(options: argparse.Namespace, folder: Path) -> Path:
    shape = ModelShape(
        attention=AttentionShape(
            num_heads=options.heads,
            kv_num_heads=options.kv_heads,
            head_size=options.head_size,
            local_window_size=options.window or -1,
        ),
        hidden_size=options.hidden,
        num_layers=options.layers,
        intermediate_size=options.ffn or 3 * options.hidden,
        vocab_size=options.vocab,
        max_positions=max(options.context) + options.tokens + 1,
    )
    path = folder / "synthetic.onnx"
    save(build_model(shape), path)
    return path


def _contexts(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(part) for part in text.split(","))


def _runtimes(text: str) -> tuple[Runtime, ...]:
    known = {runtime.value: runtime for runtime in Runtime if runtime is not Runtime.FAST}
    return tuple(known[name] for name in _names(text, list(known)))


def _groups(text: str) -> tuple[str, ...]:
    return tuple(_names(text, list(goals.GROUPS)))


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known are {', '.join(known)}")
    return names


def _print_report(machine: Machine, results: Sequence[ContextResult]) -> None:
    table = new_table()
    table.add_column("context", justify="right")
    table.add_column("runtime")
    for heading in ("ms/token", "p10..p90", "tokens/s", "x npusim", "p10..p90"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("host", justify="right")
    for result in results:
        for each in result.runtimes:
            table.add_row(*(plain(cell) for cell in _cells(result.context, each)))
        limit = result.limit(machine)
        limits = (str(result.context), "limit", f"{1e3 * limit:.2f}", "", f"{1 / limit:,.0f}")
        table.add_row(*(plain(cell) for cell in limits))
    console = stdout()
    console.print(table)
    console.print(
        plain(
            f"{machine.threads} threads, load {machine.load:.1f}, memory read at "
            f"{machine.bandwidth / 1e9:.1f} GB/s; limit: weights and KV rows of a step at that rate"
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
        "" if is_npusim else f"npusim {result.ratio.verdict.value}",
        "" if result.host_share is None else f"{result.host_share:.1%}",
    )


def _report_json(machine: Machine, results: Sequence[ContextResult]) -> dict[str, Json]:
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
        "verdict": result.ratio.verdict.value,
        "host_share": result.host_share,
    }


def _run_suite(options: argparse.Namespace) -> int:
    machine = describe_machine()
    with progress("measuring", None) as advance:
        rows = []
        for row in goals.measure_goals(options.groups, FULL_SIZES):
            rows.append(row)
            advance()
    if options.json:
        print_json({"machine": _machine_json(machine), "goals": [_goal_json(row) for row in rows]})
    else:
        _print_goals(machine, rows)
    return 0 if all(row.reached for row in rows) else 1


def _print_goals(machine: Machine, rows: Sequence[GoalRow]) -> None:
    table = new_table()
    table.add_column("goal")
    for heading in ("measured", "p10..p90", "wanted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reached")
    for row in rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.3g}..{row.spread[1]:.3g}"
        figure = row.note if row.ratio is None else f"{row.ratio:.3g}"
        cells = (row.name, figure, spread, str(row.goal), "yes" if row.reached else "NO")
        table.add_row(*(plain(cell) for cell in cells))
    console = stdout()
    console.print(table)
    console.print(plain(f"{machine.threads} threads, load {machine.load:.1f}"))


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
