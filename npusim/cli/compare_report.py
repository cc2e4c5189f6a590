"""What `npusim compare` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from npusim.cli.output import Json, finite, new_table, plain, stdout
from npusim.cli.tables import print_table
from npusim.compare import BackendReport, Comparison, ComparisonReport
from npusim.compare.differences import ArgmaxFlip, StepDifference
from npusim.compare.explain import Explanation
from npusim.compare.layers import LayerDifference, LayerReport
from npusim.compare.verdict import verdict_lines

ABSENT = "-"
MOST_FLIPS = 10
"""Lines about likeliest tokens that differ."""


def print_report(asked: Comparison, report: ComparisonReport) -> None:
    """The table of steps, what the likeliest token became, layers, verdicts."""
    console = stdout()
    console.print(plain("largest logits difference to the simulator"), style="bold")
    print_table(console, _step_table(report))
    _print_flips(console, report)
    if asked.layers:
        console.print()
        console.print(plain("largest attention difference to the simulator"), style="bold")
        print_table(console, _layer_table(report.backends))
    console.print()
    for backend in report.backends:
        for line in verdict_lines(backend, report.calls):
            console.print(plain(line), soft_wrap=True)
    for note in _notes(asked, report):
        console.print(plain(note), soft_wrap=True)


def _notes(asked: Comparison, report: ComparisonReport) -> list[str]:
    """What was not tested."""
    notes = [f"not compared with {kind.value}: {reason}" for kind, reason in report.left_out.items()]
    made = len(report.calls) - 1
    if made < asked.num_steps:
        notes.append(f"{made} of {asked.num_steps} steps were made: the cache is full")
    if report.unreached_windows:
        windows = ", ".join(map(str, report.unreached_windows))
        notes.append(f"windows not tested, as the text never leaves them: {windows}; give a longer prompt")
    return notes


def _step_table(report: ComparisonReport) -> Table:
    table = new_table()
    for heading in ("step", "stage", "positions", "tokens", "accepted"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "stage" else "right")
    for backend in report.backends:
        table.add_column(backend.kind.value, no_wrap=True, justify="right")
    for index, call in enumerate(report.calls):
        table.add_row(
            str(index),
            call.stage.value,
            call.shown_positions,
            str(len(call.tokens)),
            f"{call.accepted} of {call.proposed}" if call.proposed else ABSENT,
            *(_step_cell(backend, index) for backend in report.backends),
        )
    return table


def _step_cell(backend: BackendReport, index: int) -> str:
    steps = backend.differences.steps
    if index >= len(steps):
        return ABSENT
    return _marked(steps[index].max_abs_difference, backend.differences.limit)


def _marked(difference: float, limit: float) -> str:
    text = f"{difference:.1e}"
    return text if difference <= limit else f"[bold red]{text}[/bold red]"


def _print_flips(console: Console, report: ComparisonReport) -> None:
    lines = [
        f"{backend.kind.value}, step {index}: at position {flip.position} the likeliest token is "
        f"{flip.backend_token}, here {flip.token}; {_margin(flip, backend.differences.limit)}"
        for backend in report.backends
        for index, step in enumerate(backend.differences.steps)
        for flip in step.flips
    ]
    if not lines:
        return
    console.print()
    for line in lines[:MOST_FLIPS]:
        console.print(plain(line), soft_wrap=True)
    if len(lines) > MOST_FLIPS:
        console.print(plain(f"... and {len(lines) - MOST_FLIPS} more likeliest tokens differ"))


def _margin(flip: ArgmaxFlip, limit: float) -> str:
    """Two logits that may each be off by the limit may change places within twice of it."""
    tie = ", a tie" if flip.margin <= 2 * limit else ""
    return f"the two likeliest here are {flip.margin:.1e} apart{tie}"


def _layer_table(backends: Sequence[BackendReport]) -> Table:
    table = new_table()
    for heading in ("layer", "window"):
        table.add_column(heading, no_wrap=True, justify="right")
    for backend in backends:
        table.add_column(backend.kind.value, no_wrap=True, justify="right")
    shown = [backend.layers.layers for backend in backends if backend.layers is not None]
    for rows in zip(*shown, strict=True):
        window = rows[0].local_window_size
        table.add_row(
            str(rows[0].number),
            ABSENT if window < 0 else str(window),
            *(_marked(layer.max_abs_difference, layer.limit) for layer in rows),
        )
    return table


def report_json(model: str, asked: Comparison, report: ComparisonReport) -> dict[str, Json]:
    """The report as one JSON object."""
    return {
        "model": model,
        "candidate": None if asked.candidate is None else str(asked.candidate),
        "config": dict(asked.config),
        "agrees": report.agrees,
        "calls": [
            {
                "stage": call.stage.value,
                "position": call.position,
                "tokens": list(call.tokens),
                "proposed": call.proposed,
                "accepted": call.accepted,
            }
            for call in report.calls
        ],
        "backends": [_backend_json(backend) for backend in report.backends],
        "left_out": {kind.value: reason for kind, reason in report.left_out.items()},
        "unreached_windows": list(report.unreached_windows),
    }


def _backend_json(backend: BackendReport) -> dict[str, Json]:
    found = backend.differences
    return {
        "name": backend.kind.value,
        "agrees": backend.agrees,
        "allowed": found.limit,
        "worst": finite(found.worst.max_abs_difference),
        "first_divergence": found.diverging[0] if found.diverging else None,
        "refusal": found.refusal,
        "steps": [_step_json(step) for step in found.steps],
        "layers": None if backend.layers is None else _layers_json(backend.layers),
    }


def _step_json(step: StepDifference) -> dict[str, Json]:
    return {
        "max_abs_difference": finite(step.max_abs_difference),
        "position": step.position,
        "rows": step.num_rows,
        "argmax": [_flip_json(flip) for flip in step.flips],
    }


def _flip_json(flip: ArgmaxFlip) -> dict[str, Json]:
    return {
        "position": flip.position,
        "simulator": flip.token,
        "backend": flip.backend_token,
        "margin": flip.margin,
    }


def _layers_json(layers: LayerReport) -> dict[str, Json]:
    return {
        "first_divergence": None if layers.first is None else layers.first.index,
        "explanation": None if layers.explanation is None else _explanation_json(layers.explanation),
        "unexplained": layers.unexplained,
        "layers": [_layer_json(layer) for layer in layers.layers],
    }


def _explanation_json(found: Explanation) -> dict[str, Json]:
    return {
        "verdict": found.verdict,
        "position": found.position,
        "visible": str(found.ours),
        "visible_there": None if found.theirs is None else str(found.theirs),
        "difference": finite(found.difference),
        "left_unexplained": finite(found.residual),
    }


def _layer_json(layer: LayerDifference) -> dict[str, Json]:
    return {
        "index": layer.index,
        "number": layer.number,
        "name": layer.name,
        "local_window_size": layer.local_window_size,
        "max_abs_difference": finite(layer.max_abs_difference),
        "allowed": layer.limit,
    }
