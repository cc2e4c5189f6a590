"""`npusim bench`: time per token beside other runtimes, and the suite of goals."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from npusim.bench import goals, plot
from npusim.bench.conversation import Conversation, Runtime
from npusim.bench.goal import FULL_SIZES
from npusim.bench.machine import describe_machine
from npusim.bench.report import measure_contexts
from npusim.bench.synthetic import AttentionShape, ModelShape, build_model, save
from npusim.bench.timing import Plan
from npusim.cli.bench_report import goals_json, print_goals, print_report, report_json
from npusim.cli.config_help import config_keys
from npusim.cli.output import print_json, progress
from npusim.cli.parsers import (
    Subparsers,
    add_command,
    add_config_option,
    at_least,
    parse_config,
    refuse_idle,
)
from npusim.config_options import MAX_PROMPT_LEN, MIN_RESPONSE_LEN
from npusim.config_values import ConfigValue
from npusim.errors import ConfigError

CONTEXT, NUM_TOKENS, NUM_ROUNDS = 256, 128, 15
MEASURED_OPTIONS = ("context", "tokens", "against", "rounds", "plot", "config")
SHAPE_OPTIONS = (
    ("layers", ModelShape().num_layers, "layers"),
    ("hidden", ModelShape().hidden_size, "hidden size"),
    ("heads", AttentionShape().num_heads, "query heads"),
    ("kv_heads", AttentionShape().kv_num_heads, "key-value heads"),
    ("head_size", AttentionShape().head_size, "channels of a head"),
    ("vocab", ModelShape().vocab_size, "token ids"),
)
"""Name, default and meaning."""

DESCRIPTION = """\
Time the steps of a generation, one token each, on npusim and on other runtimes:
in one process, in turn, medians over many rounds. Without MODEL, a synthetic
one is made.

A ratio of times between 0.75 and 1.3 is reported as no difference: that much
lies between two runs of the same thing. The limit beside them is an estimate:
the time that reading all weights and KV rows once takes at the memory bandwidth
measured just before, in the same process. A step may beat it, where the machine
was busy meanwhile or a cache still holds what is read."""

EPILOG = f"""\
runtimes for --against:
  device   npusim with NPUSIM_EXECUTION=DEVICE: the form that an NPU compiler is
           given
  ort      ONNX Runtime on the CPU, past and present in one buffer
  npuw     OpenVINO's own NPUW on the CPU device

examples:
  npusim bench model.onnx --against ort,npuw
  npusim bench --layers 24 --hidden 1024 --heads 16 --kv-heads 4
  npusim bench --window 128 -c NPUSIM_KV_LAYOUT=RING --context 512,2048,8192
  npusim bench --context 512,2048,8192 --plot sweep.png
  npusim bench --suite goals --json

exit code: 0, 1 where a goal of the suite is not reached, 2 for wrong usage or
an unusable file

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
        help=f"tokens stored before the steps; several make a sweep (default {CONTEXT})",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=at_least(2), help=f"tokens per conversation (default {NUM_TOKENS})"
    )
    parser.add_argument(
        "--against", metavar="NAME[,NAME...]", type=_runtimes, help="device, ort, npuw (default device)"
    )
    parser.add_argument(
        "--rounds", metavar="N", type=at_least(1), help=f"rounds of all runtimes (default {NUM_ROUNDS})"
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="draw time per token: over context, or as bars"
    )
    parser.add_argument("--suite", choices=["goals"], help="measure everything that npusim is held to")
    parser.add_argument(
        "--groups",
        metavar="NAME[,NAME...]",
        type=_groups,
        help=f"of the suite: {', '.join(goals.GROUPS)} (default all)",
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Measure and print."""
    _check_options(options)
    return _run_suite(options) if options.suite else _run_contexts(options)


def _check_options(options: argparse.Namespace) -> None:
    """ConfigError, before any work, for options of which nothing would come and a picture without a place."""
    shape = [name for name, _, _ in SHAPE_OPTIONS] + ["ffn", "window"]
    if options.suite:
        _refuse(
            options,
            ["model", *shape, *MEASURED_OPTIONS],
            "--suite chooses its own models and lengths; leave it out",
        )
    else:
        refuse_idle(options, "--suite", "--groups")
    if options.model:
        _refuse(options, shape, "MODEL has a shape already; leave one of the two out")
    if options.plot:
        plot.check_writable(options.plot)


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    given = [name for name in names if getattr(options, name)]
    if given:
        shown = {"model": "MODEL", "config": "-c"}.get(given[0], f"--{given[0].replace('_', '-')}")
        raise ConfigError(f"{shown}: {why}")


def _run_contexts(options: argparse.Namespace) -> int:
    contexts: Sequence[int] = options.context or (CONTEXT,)
    against: Sequence[Runtime] = options.against or (Runtime.DEVICE,)
    num_tokens = options.tokens or NUM_TOKENS
    plan = Plan(rounds=options.rounds or NUM_ROUNDS, burst=min(10, num_tokens - 1))
    settings = _settings(options)
    parts = 1 + len(contexts) * (1 + len(against) + plan.rounds)
    with (
        TemporaryDirectory(prefix="npusim-bench-") as folder,
        progress("building, compiling, measuring", parts) as advance,
    ):
        path = options.model or _synthetic(options, Path(folder), max(contexts) + num_tokens + 1)
        machine = describe_machine()
        advance()
        conversation = Conversation(
            path=path, context=1, num_steps=num_tokens, settings=tuple(settings.items())
        )
        results = measure_contexts(conversation, contexts, against, plan, advance)
    if options.json:
        print_json(report_json(machine, results))
    else:
        print_report(machine, results)
    if options.plot:
        plot.draw(options.plot, results, machine, options.model.name if options.model else "synthetic model")
        print(f"npusim: wrote {options.plot}", file=sys.stderr)
    return 0


def _settings(options: argparse.Namespace) -> dict[str, ConfigValue]:
    settings: dict[str, ConfigValue] = {**parse_config(options.config)}
    for key in (MAX_PROMPT_LEN, MIN_RESPONSE_LEN):
        if key in settings:
            raise ConfigError(f"-c {key}: --context and --tokens give the lengths; leave it out")
    return settings


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape of the synthetic model")
    for name, default, meaning in SHAPE_OPTIONS:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="N",
            type=at_least(1),
            help=f"{meaning} (default {default})",
        )
    group.add_argument("--ffn", metavar="N", type=at_least(1), help="width of the MLP (default 3 x hidden)")
    group.add_argument("--window", metavar="N", type=at_least(1), help="sliding window (default none)")


def _synthetic(options: argparse.Namespace, folder: Path, max_positions: int) -> Path:
    sizes = {name: getattr(options, name) or default for name, default, _ in SHAPE_OPTIONS}
    shape = ModelShape(
        attention=AttentionShape(
            num_heads=sizes["heads"],
            kv_num_heads=sizes["kv_heads"],
            head_size=sizes["head_size"],
            local_window_size=options.window or -1,
        ),
        hidden_size=sizes["hidden"],
        num_layers=sizes["layers"],
        intermediate_size=options.ffn or 3 * sizes["hidden"],
        vocab_size=sizes["vocab"],
        max_positions=max_positions,
    )
    path = folder / "synthetic.onnx"
    save(build_model(shape), path)
    return path


def _contexts(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(part) for part in _each_once(text))


def _runtimes(text: str) -> tuple[Runtime, ...]:
    known = {runtime.value: runtime for runtime in Runtime if runtime is not Runtime.FAST}
    return tuple(known[name] for name in _names(text, list(known)))


def _groups(text: str) -> tuple[str, ...]:
    return tuple(_names(text, list(goals.GROUPS)))


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = _each_once(text)
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known are {', '.join(known)}")
    return names


def _each_once(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} has a part twice; name each once")
    return parts


def _run_suite(options: argparse.Namespace) -> int:
    with progress("measuring", None) as advance:
        machine = describe_machine()
        rows = []
        for row in goals.measure_goals(options.groups or tuple(goals.GROUPS), FULL_SIZES):
            rows.append(row)
            advance()
    if options.json:
        print_json(goals_json(machine, rows))
    else:
        print_goals(machine, rows)
    return 0 if all(row.reached for row in rows) else 1
