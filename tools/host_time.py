"""Host time of a generate step: everything outside the compiled graph, in microseconds and as a share.

Usage: python tools/host_time.py [STEPS]

The built-in target model at context 128, one token a step; medians over STEPS steps (default 250), and the
smallest over five runs, as a busy machine can only add to it.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from importlib import resources

import numpy as np

import npusim

PROMPT = 128


@dataclass(frozen=True)
class StepTimes:
    """Medians in microseconds."""

    host: float
    graph: float


def measure(request: npusim.LLMInferRequest, steps: int) -> StepTimes:
    """One prefill, then `steps` generate steps of one token."""
    request.infer({"input_ids": np.full((1, PROMPT), 97)})
    token = np.full((1, 1), 97)
    host, graph = [], []
    for _ in range(steps):
        began = time.perf_counter()
        request.infer({"input_ids": token}, share_outputs=True)
        whole = time.perf_counter() - began
        host.append(whole - request.graph_seconds)
        graph.append(request.graph_seconds)
    request.reset_state()
    return StepTimes(host=statistics.median(host) * 1e6, graph=statistics.median(graph) * 1e6)


def main() -> None:
    """Measure and print one line."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 250
    config = {"NPUW_LLM_MAX_PROMPT_LEN": PROMPT, "NPUW_LLM_MIN_RESPONSE_LEN": steps + 1}
    with resources.as_file(resources.files("npusim") / "models" / "swa_target.onnx") as path:
        request = npusim.compile_model(path, config).create_infer_request()
    best = min((measure(request, steps) for _ in range(5)), key=lambda times: times.host)
    share = best.host / (best.host + best.graph)
    print(f"host {best.host:.0f} us, graph {best.graph:.0f} us, host share {share:.1%}")


if __name__ == "__main__":
    main()
