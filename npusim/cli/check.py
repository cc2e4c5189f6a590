"""`npusim check`: one row for each attention layer, nothing compiled unless NPUW is probed."""

import argparse
from collections.abc import Mapping

from npusim.check import CheckedLayer, CheckReport, check_model
from npusim.cli.output import (
    Json,
    by_layers,
    new_table,
    plain,
    print_json,
    print_sentences,
    progress,
    stdout,
)
from npusim.cli.parsers import Subparsers, add_command
from npusim.cli.tables import print_table
from npusim.npuw_probe import NativeProbe, probe_layer
from npusim.onnx_attention import AttentionLayer, Rotary

DESCRIPTION = """\
Show what every attention layer of an ONNX language model is, and what npusim
makes of it. Nothing is compiled, except with --probe-npuw: it also shows what
the installed OpenVINO does to each kind of layer when NPUW is given the model
as it is."""

EPILOG = """\
columns, but for those that would be "-" in every row:
  heads     query heads / key-value heads x head size
  window    keys that a query sees, itself included; "-" is all of the past
  sink      one more logit in the softmax denominator: head_sink (learnt, one
            per head) or smooth_softmax (0)
  rotary    form, rotated channels where not all of the head, positions in the
            tables
  rolling   sliding_window_cache=1: exported for a window-sized cache that moves
  KV cache  element type of the cache tensors, and how it is quantized
  native NPUW (--probe-npuw)
            what NPUW, on the CPU device with its own defaults, does with the op
            by itself: a model of one such layer (a window is tried as a small
            one) runs in a process of its own. right, drops the window, drops
            the sink, wrong, refuses, crashes, ...; "-" where the layer is
            refused here. Lowered by npusim they run: npusim compare
  refused   why the layer cannot be lowered; "-" where it can

examples:
  npusim check model.onnx
  npusim check model.onnx --probe-npuw
  npusim check model.onnx --json | jq '.layers[] | select(.refusals != [])'

exit code: 0 if everything runs, 1 if something is refused, 2 for wrong usage or
an unusable file"""

ABSENT = "-"

Native = Mapping[int, NativeProbe]
"""By number of the layer what NPUW does with it; layers that were not tried are not there."""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "check", "what every attention layer is, and whether it runs", DESCRIPTION, EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="ONNX file of a language model")
    parser.add_argument(
        "--probe-npuw", action="store_true", help="try each kind of layer on NPUW as it comes (some seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Print the report; 0 if the model runs."""
    report = check_model(options.model)
    native = _probe(report) if options.probe_npuw else None
    if options.json:
        print_json(_report_json(report, native))
    else:
        _print_report(report, native)
    return 0 if report.runs else 1


def _probe(report: CheckReport) -> Native:
    """Layers of one kind are tried once."""
    layers = [checked.layer for checked in report.layers if not checked.refusals]
    native = {}
    with progress("probing NPUW", len(layers)) as advance:
        for layer in layers:
            native[layer.number] = probe_layer(layer)
            advance()
    return native


def _print_report(report: CheckReport, native: Native | None) -> None:
    table = new_table()
    for heading in ("layer", "heads", "window", "sink", "rotary", "rolling", "KV cache"):
        table.add_column(heading, no_wrap=True)
    if native is not None:
        table.add_column("native NPUW", no_wrap=True)
    table.add_column("refused", overflow="fold")
    for checked in report.layers:
        table.add_row(*(plain(cell) for cell in _cells(checked, native)))
    console = stdout()
    print_table(console, table, absent=ABSENT)
    reasons = {number: str(probe) for number, probe in (native or {}).items() if probe.reason}
    print_sentences(console, by_layers("native NPUW", reasons))
    print_sentences(console, (f"refused: {refusal}" for refusal in report.refusals))
    refused = sum(bool(checked.refusals) for checked in report.layers)
    outcome = "all run" if report.runs else f"{refused} refused: the model does not run"
    print_sentences(console, [f"{len(report.layers)} attention layers, {outcome}"])


def _cells(checked: CheckedLayer, native: Native | None) -> tuple[str, ...]:
    layer = checked.layer
    return (
        str(layer.number),
        f"{layer.num_heads}/{layer.kv_num_heads} x {layer.head_size or '?'}",
        _window(layer),
        layer.sink.value if layer.has_sink else ABSENT,
        _rotary(layer),
        "yes" if layer.rolling_cache else ABSENT,
        layer.kv_cache_type,
        *(() if native is None else (_native(native, layer),)),
        "; ".join(checked.refusals) or ABSENT,
    )


def _native(native: Native, layer: AttentionLayer) -> str:
    return native[layer.number].verdict.value if layer.number in native else ABSENT


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


def _report_json(report: CheckReport, native: Native | None) -> dict[str, Json]:
    return {
        "model": report.path,
        "runs": report.runs,
        "refusals": list(report.refusals),
        "layers": [_layer_json(checked, native) for checked in report.layers],
    }


def _layer_json(checked: CheckedLayer, native: Native | None) -> dict[str, Json]:
    layer, rotary = checked.layer, checked.layer.rotary
    probed = {} if native is None else {"native_npuw": _native_json(native.get(layer.number))}
    return {
        "index": layer.index,
        "number": layer.number,
        "name": layer.name,
        "node_name": layer.node_name,
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
        **probed,
        "refusals": list(checked.refusals),
    }


def _native_json(probe: NativeProbe | None) -> dict[str, Json] | None:
    if probe is None:
        return None
    return {"verdict": probe.verdict.value, "reason": probe.reason}


def _rotary_json(layer: AttentionLayer, rotary: Rotary) -> dict[str, Json]:
    return {
        "form": _form(rotary),
        "rotated_channels": rotary.rotated_channels,
        "partial": layer.is_partial_rotary,
        "table_length": rotary.table_length,
    }
