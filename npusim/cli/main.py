"""Entry point of `npusim`: parse, dispatch, and turn errors into one message and an exit code."""

import argparse
import os
import sys
from collections.abc import Sequence

from npusim.cli import bench, check, compare, demo, export, plan, replay, run
from npusim.errors import NpuSimError
from transforms import DecompositionError

COMMANDS = (demo, run, check, compare, replay, plan, export, bench)
"""Modules with `register(subparsers)`, in the order of the help text."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DESCRIPTION = """\
Run an ONNX language model as an NPU would: two fixed graphs, a KV cache that the host
owns, on a CPU, exact.

An NPU compiles static shapes only. The past lies in a buffer of C slots and the new
tokens in S slots behind it, so the slot of a key is not its position in the text.
npusim lowers GroupQueryAttention for that, moves the cache as an NPU runtime does, and
lets you compare every step with the model run natively."""

EPILOG = """\
start here:
  npusim demo                 the built-in models, each step compared with a native run
  npusim check model.onnx     what every attention layer is, and whether it runs
  npusim run model.onnx --prompt-ids 1,2,3 --max-new-tokens 16
  npusim COMMAND --help       what a command does, its settings, examples

exit codes:
  0  done, nothing differed or was refused
  1  something differed (demo, compare, replay) or was refused (check)
  2  wrong usage, or a file, setting or prompt that cannot be used"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="npusim",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse itself exits for --help and wrong usage."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.execute(options)
        sys.stdout.flush()
    except (NpuSimError, DecompositionError) as error:
        print(f"npusim: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("npusim: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`npusim check m.onnx | head -1`). Python flushes stdout once more at exit;
        # pointed at nothing it has nothing to complain about.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


if __name__ == "__main__":
    sys.exit(main())
