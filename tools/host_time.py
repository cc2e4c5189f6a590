"""How long a generate step of the built-in target keeps the host, beside the compiled graph.

Usage: python tools/host_time.py [--steps N] [--json]

The host's time is all of `infer` outside the compiled graph: checking inputs, laying out the block, writing
KV rows, handing out logits. Medians over the steps of one conversation; below 150 us is the goal on an idle
machine (exit code 1 above it).
"""

import argparse
import json
import sys
import time
from importlib.resources import as_file, files

import numpy as np

import npusim
from npusim.cli.parsers import at_least

GOAL_MICROSECONDS = 150
WARM_UP = 20
MOST_STEPS = 900  # for which the model's rotary tables have positions
PROMPT = b"Return a list of the "


def measure(num_steps: int) -> tuple[float, float]:
    """Median seconds of the host and of the whole step, over num_steps steps after a warm-up."""
    with as_file(files("npusim") / "models" / "swa_target.onnx") as path:
        sizes = {"NPUW_LLM_MAX_PROMPT_LEN": 64, "NPUW_LLM_MIN_RESPONSE_LEN": num_steps + WARM_UP}
        request = npusim.compile_model(path, sizes).create_infer_request()
    request.infer({"input_ids": np.array([list(PROMPT)])})
    host, whole = [], []
    token = {"input_ids": np.array([[PROMPT[0]]])}
    for _ in range(num_steps + WARM_UP):
        began = time.perf_counter()
        request.infer(token, share_outputs=True)
        seconds = time.perf_counter() - began
        whole.append(seconds)
        host.append(seconds - request.graph_seconds)
    return float(np.median(host[WARM_UP:])), float(np.median(whole[WARM_UP:]))


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--steps", metavar="N", type=at_least(1), default=300, help=f"default 300, at most {MOST_STEPS}"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if options.steps > MOST_STEPS:
        parser.error(f"--steps {options.steps}: the built-in model has positions for {MOST_STEPS}")
    host, whole = measure(options.steps)
    reached = 1e6 * host < GOAL_MICROSECONDS
    if options.json:
        print(json.dumps({"host_seconds": host, "step_seconds": whole, "reached": reached}))
    else:
        print(f"host {1e6 * host:.0f} us of a step of {1e6 * whole:.0f} us ({host / whole:.0%})")
        print(f"goal: below {GOAL_MICROSECONDS} us: {'reached' if reached else 'NOT reached'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
