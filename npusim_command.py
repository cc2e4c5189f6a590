"""What the command `npusim` starts.

It lies outside the package, since importing that takes a second: an interrupt meanwhile ends the command as
any later one does, without a traceback.
"""

import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Import and run the command line; returns its exit code."""
    try:
        from npusim.cli.main import main as run
    except KeyboardInterrupt:
        print("npusim: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return run()
