"""`npusim export`: write a model as openvino_genai takes it, with windows and sinks that hold on an NPU."""

import argparse
from pathlib import Path

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
from npusim.export import ExportedLayer, ExportSummary, Tokenizer, export

DESCRIPTION = """\
Lower an ONNX language model and write it as openvino_genai takes it: a stateful
OpenVINO model, its configuration files and a tokenizer. The folder runs in
LLMPipeline on "CPU" and on "NPU" (also on NPUW without an NPU), with the
windows and sinks that the ONNX file has."""

EPILOG = """\
columns, but for those that would be "-" in every row:
  window    keys that a query sees, itself included; "-" is all of the past
  sink      one more logit in the softmax denominator
  natively  what the installed OpenVINO's NPUW does with the op itself: found by
            trying
Below, once for the layers that it holds for: why natively, and what became of
a layer.

examples:
  npusim export model.onnx exported
  npusim export model.onnx exported --tokenizer tokenizer_folder

and then, in Python
  import openvino_genai
  f32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
  pipeline = openvino_genai.LLMPipeline("exported", "CPU", **f32)
  print(pipeline.generate("Return a list of", max_new_tokens=64))
Without the two settings the CPU plugin computes in bfloat16 where it can and
keeps a cache of 8 bits, so that the text may differ from that of npusim run. On
a machine without an NPU "NPU" is NPUW on the CPU device, with a float16 cache:
  openvino_genai.LLMPipeline("exported", "NPU", NPUW_DEVICES="CPU")

exit code: 0 if the model was written, 2 for wrong usage, or a file or folder
that cannot be used"""

ABSENT = "-"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "export", "write a model for openvino_genai, lowered", DESCRIPTION, EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="ONNX file of a language model")
    parser.add_argument("folder", metavar="OUT_DIR", help="folder to write to; made if it is not there")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR|bytes|none",
        default=Tokenizer.AUTO.value,
        help="folder with openvino_tokenizer.xml and openvino_detokenizer.xml; bytes: one token per byte "
        "(259 tokens); none: the pipeline takes token ids. Left out: bytes where the vocabulary is that",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the model that OUT_DIR holds; files of other names stay",
    )
    parser.add_argument(
        "--no-probe", action="store_true", help="do not ask what the installed NPUW does with each layer"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Write the folder and say what is in it."""
    with progress("exporting", None):
        summary = export(
            options.model,
            options.folder,
            tokenizer=_tokenizer(options.tokenizer),
            overwrite=options.overwrite,
            probe_native=not options.no_probe,
        )
    if options.json:
        print_json(_summary_json(summary))
    else:
        _print_summary(summary)
    return 0


def _tokenizer(text: str) -> Tokenizer | Path:
    """One of the named sources, else a folder."""
    named = {source.value: source for source in Tokenizer}
    return named.get(text, Path(text))


def _print_summary(summary: ExportSummary) -> None:
    table = new_table()
    for heading in ("layer", "window", "sink", "natively"):
        table.add_column(heading, no_wrap=True)
    for exported in summary.layers:
        table.add_row(*(plain(cell) for cell in _cells(exported)))
    console = stdout()
    print_table(console, table, absent=ABSENT)
    natively = {each.layer.number: str(each.native) for each in summary.layers if each.native.reason}
    print_sentences(console, by_layers("natively", natively))
    print_sentences(console, by_layers("lowered", {e.layer.number: e.lowered for e in summary.layers}))
    print_sentences(console, [f"written to {summary.folder}: {', '.join(summary.files)}"])
    print_sentences(console, (f"note: {note}" for note in summary.notes))


def _cells(exported: ExportedLayer) -> tuple[str, ...]:
    layer = exported.layer
    return (
        str(layer.number),
        str(layer.local_window_size) if layer.local_window_size > 0 else ABSENT,
        layer.sink.value if layer.has_sink else ABSENT,
        exported.native.verdict.value,
    )


def _summary_json(summary: ExportSummary) -> dict[str, Json]:
    return {
        "folder": str(summary.folder),
        "files": list(summary.files),
        "notes": list(summary.notes),
        "layers": [_layer_json(exported) for exported in summary.layers],
    }


def _layer_json(exported: ExportedLayer) -> dict[str, Json]:
    layer = exported.layer
    return {
        "index": layer.index,
        "number": layer.number,
        "local_window_size": layer.local_window_size,
        "sink": layer.sink.value,
        "lowered": exported.lowered,
        "native": exported.native.verdict.name,
        "native_reason": exported.native.reason,
    }
