"""Runs an ONNX model by NPUW as OpenVINO comes: a script for a process of its own, which may crash.

    python -P worker.py FOLDER

FOLDER holds model.onnx and task.json {"blocks": [[token, ...], ...], "properties": {...}}; result.json
{"state": "ran" | "refused" | "unavailable", "reason": text} and logits.npz, an array for each block, are
written there. It needs numpy and openvino and nothing of npusim, so that any Python may run it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation

PAST, PRESENT = "past_key_values", "present"


def main(folder: Path) -> None:
    """Do the task of a folder."""
    task = json.loads((folder / "task.json").read_text())
    state, reason, logits = run(str(folder / "model.onnx"), task["blocks"], task["properties"])
    np.savez(folder / "logits.npz", *logits)
    (folder / "result.json").write_text(json.dumps({"state": state, "reason": reason}))


def run(path: str, blocks: list[list[int]], properties: dict[str, str]) -> tuple[str, str, list[np.ndarray]]:
    """State, reason and the logits [n or fewer, vocab] of each block."""
    core = ov.Core()
    try:
        core.get_property("NPU", "SUPPORTED_PROPERTIES")
    except RuntimeError as error:
        return "unavailable", _last_line(error), []
    try:
        model = core.read_model(path)
        make_stateful(model)
        request = core.compile_model(model, "NPU", properties).create_infer_request()
        return "ran", "", infer_blocks(request, blocks)
    except RuntimeError as error:
        return "refused", _last_line(error), []


def make_stateful(model: ov.Model) -> None:
    """The form that NPUW takes, by OpenVINO's own pass; GroupQueryAttention stays as it is."""
    position_ids = ops.parameter([-1, -1], ov.Type.i64, "position_ids")
    position_ids.output(0).get_tensor().set_names({"position_ids"})
    beam_idx = ops.parameter([-1], ov.Type.i32, "beam_idx")
    beam_idx.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([position_ids, beam_idx])
    pairs = {}
    for port in list(model.inputs):
        name = port.get_any_name()
        if not name.startswith(PAST):
            continue
        readers = list(port.get_node().output(0).get_target_inputs())
        gathered = ops.gather(port.get_node(), beam_idx, ops.constant(0, dtype=np.int64))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
        pairs[name] = name.replace(PAST, PRESENT)
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, pairs)


def infer_blocks(request: ov.InferRequest, blocks: list[list[int]]) -> list[np.ndarray]:
    """Feed the blocks one behind the other; of each the newest rows of logits, at most as many as it has."""
    logits, start = [], 0
    for block in blocks:
        stop = start + len(block)
        outputs = request.infer(
            {
                "input_ids": np.array([block]),
                "attention_mask": np.ones((1, stop), np.int64),
                "position_ids": np.arange(start, stop)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits.append(np.array(outputs["logits"][0, -len(block) :], np.float32))
        start = stop
    return logits


def _last_line(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    main(Path(sys.argv[1]))
