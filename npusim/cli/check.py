"""`npusim check`: one row for each attention layer, nothing compiled."""

import argparse

from npusim.check import CheckedLayer, CheckReport, check_model
from npusim.cli.output import Json, new_table, plain, print_json, stdout
from npusim.cli.parsers import Subparsers, add_command
from npusim.onnx_attention import AttentionLayer, Rotary

DESCRIPTION = """\
Show what every attention layer of an ONNX language model is, and what npusim makes of it.
Nothing is compiled."""

EPILOG = """\
columns:
  heads     query heads / key-value heads x head size
  window    keys that a query sees, itself included; "-" is all of the past
  sink      one more logit in the softmax denominator: head_sink (learnt, one per head)
            or smooth_softmax (0)
  rotary    form, rotated channels where not all of the head, positions in the tables
  rolling   sliding_window_cache=1: exported for a window-sized cache that moves
  KV cache  element type of the cache tensors, and how it is quantized
  refused   why the layer cannot be lowered; "-" where it can

examples:
  npusim check model.onnx
  npusim check model.onnx --json | jq '.layers[] | select(.refusals != [])'

exit code: 0 if everything runs, 1 if something is refused, 2 if the file is unusable"""

ABSENT = "-"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "check", "what every attention layer is, and whether it runs", DESCRIPTION, EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="ONNX file of a language model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Print the report; 0 if the model runs."""
    report = check_model(options.model)
    if options.json:
        print_json(_report_json(report))
    else:
        _print_report(report)
    return 0 if report.runs else 1


def _print_report(report: CheckReport) -> None:
    table = new_table()
    for heading in ("layer", "heads", "window", "sink", "rotary", "rolling", "KV cache"):
        table.add_column(heading, no_wrap=True)
    table.add_column("refused", overflow="fold")
    for checked in report.layers:
        table.add_row(*(plain(cell) for cell in _cells(checked)))
    console = stdout()
    console.print(table)
    for refusal in report.refusals:
        console.print(plain(f"refused: {refusal}"))
    refused = sum(bool(checked.refusals) for checked in report.layers)
    if report.runs:
        console.print(plain(f"{len(report.layers)} attention layers, all run"))
    else:
        console.print(
            plain(f"{len(report.layers)} attention layers, {refused} refused: the model does not run")
        )


def _cells(checked: CheckedLayer) -> tuple[str, ...]:
    layer = checked.layer
    return (
        str(layer.index),
        f"{layer.num_heads}/{layer.kv_num_heads} x {layer.head_size or '?'}",
        _window(layer),
        layer.sink.value if layer.has_sink else ABSENT,
        _rotary(layer),
        "yes" if layer.rolling_cache else ABSENT,
        layer.kv_cache_type,
        "; ".join(checked.refusals) or ABSENT,
    )


def _window(layer: AttentionLayer) -> str:
    window = ABSENT if layer.local_window_size == -1 else str(layer.local_window_size)
    return window if layer.causal else f"{window} (not causal)"


def _rotary(layer: AttentionLayer) -> str:
    rotary = layer.rotary
    if rotary is None:
        return ABSENT
    channels = f" {rotary.rotated_channels} of {layer.head_size}" if layer.is_partial_rotary else ""
    return f"{_form(rotary)}{channels}, {rotary.table_length or '?'}"


def _form(rotary: Rotary) -> str:
    return "interleaved" if rotary.interleaved else "half-split"


def _report_json(report: CheckReport) -> dict[str, Json]:
    return {
        "model": report.path,
        "runs": report.runs,
        "refusals": list(report.refusals),
        "layers": [_layer_json(checked) for checked in report.layers],
    }


def _layer_json(checked: CheckedLayer) -> dict[str, Json]:
    layer, rotary = checked.layer, checked.layer.rotary
    return {
        "index": layer.index,
        "name": layer.name,
        "num_heads": layer.num_heads,
        "kv_num_heads": layer.kv_num_heads,
        "head_size": layer.head_size,
        "local_window_size": layer.local_window_size,
        "causal": layer.causal,
        "sink": layer.sink.value,
        "rotary": None if rotary is None else _rotary_json(layer, rotary),
        "sliding_window_cache": layer.rolling_cache,
        "kv_cache_type": layer.kv_cache_type,
        "softcap": layer.softcap,
        "refusals": list(checked.refusals),
    }


def _rotary_json(layer: AttentionLayer, rotary: Rotary) -> dict[str, Json]:
    return {
        "form": _form(rotary),
        "rotated_channels": rotary.rotated_channels,
        "partial": layer.is_partial_rotary,
        "table_length": rotary.table_length,
    }
