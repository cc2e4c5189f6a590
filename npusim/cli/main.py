"""Entry point of `npusim`: parse, dispatch, and turn errors into one message and an exit code."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from npusim.cli import bench, check, compare, demo, export, plan, replay, run
from npusim.errors import NpuSimError
from transforms import DecompositionError

COMMANDS = (demo, run, check, compare, replay, plan, export, bench)
"""Modules with `register(subparsers)`, in the order of the help text."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DESCRIPTION = """\
Run an ONNX language model as an NPU would: two fixed graphs, a KV cache that
the host owns, on a CPU, exact.

An NPU compiles static shapes only. The past lies in a buffer of C slots and the
new tokens in S slots behind it, so the slot of a key is not its position in the
text. npusim lowers GroupQueryAttention for that, moves the cache as an NPU
runtime does, and lets you compare every step with the model run natively."""

EPILOG = """\
start here:
  npusim demo              the built-in models, each step beside a native run
  npusim check model.onnx  what every attention layer is, and whether it runs
  npusim run model.onnx --prompt-ids 1,2,3 --max-new-tokens 16
  npusim COMMAND --help    what a command does, its settings, examples

exit codes:
  0    done, nothing differed or was refused
  1    something differed (demo, compare, replay), was refused (check) or is
       slower than its goal (bench)
  2    wrong usage, or a file, setting or prompt that cannot be used, or output
       that cannot be written
  130  interrupted (Ctrl-C)
  141  the reader of the output has gone (npusim ... | head -1)"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other refusal is said; argparse prints the usage as well."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message. Commands get parsers of this class, too."""
        self.exit(_failed(f"{message}; see {self.prog} --help"))

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Nothing may be left over: a command says so itself, with its own help, not `npusim` for it."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="npusim",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def without_command(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return EXIT_USAGE

    parser.set_defaults(execute=without_command)
    parser.add_argument("--version", action="version", version=f"npusim {version('npusim')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.register(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse itself exits for --help and wrong usage."""
    if sys.stderr is None:  # closed by the caller: `npusim ... 2>&-`
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        return _failed("the output is closed; give it a file, a pipe or a terminal")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII pipe, a file name that is no UTF-8
    try:
        return _run(arguments)
    except (NpuSimError, DecompositionError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        print("npusim: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has gone (`npusim check m.onnx | head -1`)
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        return _failed(f"{error.filename or 'the output'}: {error.strerror or error}")


def _run(arguments: Sequence[str] | None) -> int:
    """Run the command and write out everything it printed, whether it returns or exits."""
    try:
        options = build_parser().parse_args(arguments)
        code: int = options.execute(options)
    finally:
        sys.stdout.flush()
    return code


def _failed(message: str) -> int:
    print(f"npusim: error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _drop_output() -> None:
    """Python flushes stdout once more at exit; pointed at nothing it has nothing to complain about."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
