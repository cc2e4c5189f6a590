"""Compile a model, feed a prompt and one token: seconds and peak memory as JSON. Run as a process of its own.

Usage: python -m npusim.bench.first_token MODEL
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

import npusim

PROMPT_LEN = 128


def main() -> None:
    """Measure and print; memory is what was added to that of the loaded program."""
    before = _peak_bytes()
    began = time.perf_counter()
    compiled = npusim.compile_model(sys.argv[1], {"NPUW_LLM_MAX_PROMPT_LEN": PROMPT_LEN})
    request = compiled.create_infer_request()
    request.infer({"input_ids": np.zeros((1, PROMPT_LEN), np.int64)})
    request.infer({"input_ids": np.zeros((1, 1), np.int64)})
    seconds = time.perf_counter() - began
    sys.stdout.write(json.dumps({"seconds": seconds, "peak_bytes": _peak_bytes() - before}) + "\n")


def _peak_bytes() -> int:
    """The most memory this program ever held.

    Not from getrusage where it can be helped: on Linux its peak includes what the parent held at the fork.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
