"""`npusim replay`: make the calls of a trace again and compare bit for bit."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import npusim
from npusim.cli.output import Advance, Json, plain, print_json, progress, stdout
from npusim.cli.parsers import Subparsers, add_command
from npusim.cli.tracing import openvino_version
from npusim.errors import ModelError
from npusim.model_digest import digest_model
from npusim.replay import ReplayResult, replay
from npusim.trace import StepRecord, Trace, TraceError
from npusim.trace_reader import read_trace

DESCRIPTION = """\
Make the calls of a trace again, on the same model with the settings that the
trace holds, and compare everything but the times bit for bit: logits, slots
written, what was trimmed, what was visible, errors. `npusim run --trace FILE`
writes one (and --draft-trace FILE one for the draft model). So a failure can be
sent: the file and the model are all that is needed."""

EPILOG = """\
A trace ends with a count of its calls. One without that end is incomplete: what
wrote it was killed, or the file was cut short. Its calls are made again as far
as they are there, but what is missing is not compared, and the exit code is 1.

examples:
  npusim run model.onnx --prompt-ids 1,2,3 --trace run.jsonl
  npusim replay run.jsonl model.onnx
  npusim replay run.jsonl model.onnx --json | jq .difference

exit code: 0 if the trace is complete and every call comes out the same, 1 if a
call does not or the trace is incomplete, 2 if the trace cannot be read or was
made with another model"""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "replay", "make the calls of a trace again, bit for bit", DESCRIPTION, EPILOG
    )
    parser.add_argument("trace", metavar="FILE", type=Path, help="trace file that `npusim run --trace` wrote")
    parser.add_argument("model", metavar="MODEL", type=Path, help="the ONNX file that it was made with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Replay and print; 1 if a call comes out different or may be missing."""
    trace = _read(options.trace)
    _check_model(options.model, trace)
    with progress("compiling", None):
        request = npusim.compile_model(options.model, trace.header.config).create_infer_request()
    with progress("replaying", len(trace.records)) as advance:
        result = replay(_advancing(trace, advance), request)
    if options.json:
        print_json(_result_json(trace, result))
    else:
        _print_result(trace, result)
    return 0 if result.difference is None and trace.is_whole else 1


def _read(path: Path) -> Trace:
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: no regular file; give the file that a trace was written to")
        return read_trace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened ({error.strerror})") from error


def _check_model(path: Path, trace: Trace) -> None:
    """Raises ModelError unless the files of the model, weights included, are those of the trace."""
    digest, header = digest_model(path), trace.header
    found = {path.name: digest.model_sha256, **digest.weights_sha256}
    expected = {path.name: header.model_sha256, **header.weights_sha256}
    for name in expected | found:
        if found.get(name) != expected.get(name):
            raise ModelError(
                f"{path.parent / name} has SHA-256 {found.get(name, 'none')[:16]}, the trace was made with "
                f"{expected.get(name, 'none')[:16]}; give the same files, other weights give other logits"
            )


def _advancing(trace: Trace, advance: Advance) -> Iterator[StepRecord]:
    for record in trace.records:
        yield record
        advance()


def _print_result(trace: Trace, result: ReplayResult) -> None:
    console = stdout()
    for line in _result_lines(trace, result):
        console.print(plain(line), soft_wrap=True)


def _result_lines(trace: Trace, result: ReplayResult) -> Iterator[str]:
    total = len(trace.records)
    if result.difference is None:
        yield f"all {total} calls came out the same, bit for bit"
    else:
        yield f"DIFFERENT after {result.num_equal} of {total} calls: {result.difference}"
        if trace.header.openvino_version != openvino_version():
            yield f"made with OpenVINO {trace.header.openvino_version}, this is {openvino_version()}"
    if not trace.is_whole:
        yield "INCOMPLETE: the trace has no end, further calls may be missing from it"


def _result_json(trace: Trace, result: ReplayResult) -> dict[str, Json]:
    difference = result.difference
    return {
        "records": len(trace.records),
        "complete": trace.is_whole,
        "num_equal": result.num_equal,
        "openvino_version": {"trace": trace.header.openvino_version, "here": openvino_version()},
        "difference": None
        if difference is None
        else {
            "index": difference.index,
            "field": difference.field,
            "expected": difference.expected,
            "got": difference.got,
        },
    }
