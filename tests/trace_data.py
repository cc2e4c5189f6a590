"""Records as a trace has them, and a trace of two calls."""

import json
from dataclasses import replace
from pathlib import Path

from npusim.stage import Stage
from npusim.trace import StepRecord, TraceHeader, TraceWriter, WindowRecord

HEADER = TraceHeader(
    model_sha256="ab12",
    weights_sha256={"a.onnx.data": "ef56"},
    config={"NPUW_LLM_MAX_PROMPT_LEN": "16", "NPUSIM_COMMIT": "DEFERRED"},
    npusim_version="0.1.0",
    openvino_version="2026.4.1",
)
RECORD = StepRecord(
    stage=Stage.GENERATE,
    tokens=(7, 250),
    positions=(12, 13),
    trimmed=3,
    windows=(
        WindowRecord(local_window_size=-1, slots_written=((12, 14),), visible=(0, 14)),
        WindowRecord(local_window_size=5, slots_written=((5, 6), (0, 1)), visible=(8, 14)),
    ),
    host_seconds=1.25e-4,
    graph_seconds=0.1 + 0.2,
    logits_sha256="cd34",
)
FAILED = replace(RECORD, error="CapacityError", windows=(), logits_sha256="", stage=Stage.PREFILL)


def lines_of(path: Path) -> list[dict[str, object]]:
    """A trace of two calls, line by line."""
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
        writer.write(RECORD)
    return [json.loads(line) for line in path.read_text().splitlines()]
