"""What the installed OpenVINO makes of an attention layer when NPUW is given the op itself, not a lowering.

Asked of the thing: a model of one such layer goes the native way (the op kept, its cache made a state, as
ONNX Runtime's OpenVINO provider does it), in a process of its own since it may crash, and its logits are held
against the definition, with and without the window and the sink.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation

from npusim.npuw import unavailable_reason
from npusim.onnx_attention import AttentionLayer, Sink
from npusim.probe_model import VOCAB_SIZE, ProbeLayer, build_onnx, reference_logits
from npusim.reference.options import Array

PROMPT, STEPS = 10, 6
WINDOW = 4
"""Of the probe, whatever the layer's: small enough to be crossed within the prompt and the steps."""

UNKNOWN_HEAD_SIZE = 64
"""Where the file leaves it open."""

TIMEOUT_SECONDS = 120
PROPERTIES = {
    "NPU_USE_NPUW": "YES",
    "NPUW_LLM": "YES",
    "NPUW_DEVICES": "CPU",
    "NPUW_LLM_MAX_PROMPT_LEN": "32",
    "NPUW_LLM_MIN_RESPONSE_LEN": "32",
}


class NativeVerdict(Enum):
    """What the native way does with a layer."""

    RIGHT = "right"
    DROPS_WINDOW = "drops the window"
    DROPS_SINK = "drops the sink"
    DROPS_BOTH = "drops window and sink"
    WRONG = "wrong"
    NOT_FINITE = "not finite"
    REFUSES = "refuses"
    CRASHES = "crashes"
    NOT_PROBED = "not probed"


@dataclass(frozen=True, kw_only=True)
class NativeProbe:
    """A verdict, and the runtime's own words where it has some."""

    verdict: NativeVerdict
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.verdict.value}: {self.reason}" if self.reason else self.verdict.value


def probe_layer(layer: AttentionLayer) -> NativeProbe:
    """Probe a layer of a file; layers that differ in nothing that matters are probed once."""
    reason = unavailable_reason()
    if reason is not None:
        return NativeProbe(verdict=NativeVerdict.NOT_PROBED, reason=reason)
    if layer.kv_cache_type not in _FLOATS:
        return NativeProbe(
            verdict=NativeVerdict.NOT_PROBED,
            reason=f"no probe is built with a cache of {layer.kv_cache_type}, only of {', '.join(_FLOATS)}",
        )
    return probe(
        ProbeLayer(
            num_heads=layer.num_heads,
            kv_num_heads=layer.kv_num_heads,
            head_size=layer.head_size or UNKNOWN_HEAD_SIZE,
            local_window_size=WINDOW if layer.local_window_size > 0 else -1,
            sink=layer.sink,
            rolling_cache=layer.rolling_cache,
            float16=_FLOATS[layer.kv_cache_type],
            positions=0 if layer.rotary is None else ProbeLayer.positions,
            interleaved=layer.rotary is not None and layer.rotary.interleaved,
        )
    )


_FLOATS = {"float32": False, "float16": True}


@cache
def probe(layer: ProbeLayer) -> NativeProbe:
    """Run the native way in a process of its own, and judge."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "npusim.npuw_probe", _spelled(layer), str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return NativeProbe(
                verdict=NativeVerdict.CRASHES, reason=f"no answer within {TIMEOUT_SECONDS} seconds"
            )
        if not answer.is_file():
            return NativeProbe(
                verdict=NativeVerdict.CRASHES, reason=f"the process ended with code {done.returncode}"
            )
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "refused" in found:
        return NativeProbe(verdict=NativeVerdict.REFUSES, reason=found["refused"])
    return judge(layer, np.array(found["logits"], np.float64))


def judge(layer: ProbeLayer, logits: Array) -> NativeProbe:
    """Which variant of a layer computes these logits [1 + STEPS, vocabulary], the last rows of each call.

    Prompt and steps are judged apart: a runtime may drop the window in both and, in the steps, read slots
    that were never written (2026.2 does). What the prompt shows is then not lost.
    """
    prompt = _judge_rows(layer, logits, slice(0, 1))
    steps = _judge_rows(layer, logits, slice(1, None))
    if steps is prompt:
        return NativeProbe(verdict=prompt)
    if prompt is NativeVerdict.RIGHT:
        return NativeProbe(verdict=steps, reason="in the steps after the prompt, which is right")
    return NativeProbe(verdict=prompt, reason=f"and the steps after the prompt: {steps.value}")


def _judge_rows(layer: ProbeLayer, logits: Array, rows: slice) -> NativeVerdict:
    if not np.isfinite(logits[rows]).all():
        return NativeVerdict.NOT_FINITE
    variants = {
        NativeVerdict.RIGHT: layer,
        NativeVerdict.DROPS_WINDOW: replace(layer, local_window_size=-1),
        NativeVerdict.DROPS_SINK: replace(layer, sink=Sink.NONE),
        NativeVerdict.DROPS_BOTH: replace(layer, local_window_size=-1, sink=Sink.NONE),
    }
    for verdict, variant in variants.items():
        expected = reference_logits(variant, probe_tokens())[PROMPT - 1 :][rows]
        if np.abs(logits[rows] - expected).max() < 0.03 * np.abs(expected).max():
            return verdict
    return NativeVerdict.WRONG


def probe_tokens() -> list[int]:
    """The tokens of a probe: a prompt, then single steps."""
    tokens: list[int] = np.random.default_rng(2).integers(0, VOCAB_SIZE, PROMPT + STEPS).tolist()
    return tokens


def native_model(layer: ProbeLayer) -> ov.Model:
    """The op as it is, its cache in variable states that are gathered by beam_idx."""
    model = ov.Core().read_model(build_onnx(layer))
    added = {
        "beam_idx": ops.parameter([-1], ov.Type.i32),
        "position_ids": ops.parameter([-1, -1], ov.Type.i64),
    }
    for name, parameter in added.items():
        parameter.set_friendly_name(name)
        parameter.output(0).get_tensor().set_names({name})
    caches = [port for port in model.inputs if port.get_any_name().startswith("past_key_values")]
    for port in caches:
        past = port.get_node().output(0)
        readers = past.get_target_inputs()
        gathered = ops.gather(past, added["beam_idx"], ops.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    model.add_parameters(list(added.values()))
    model.validate_nodes_and_infer_types()
    names = [port.get_any_name() for port in caches]
    apply_make_stateful_transformation(
        model, {name: name.replace("past_key_values", "present") for name in names}
    )
    return model


def run_native(layer: ProbeLayer) -> list[list[float]]:
    """The newest row of logits of each call: the prompt, then one token at a time."""
    request = ov.compile_model(native_model(layer), "NPU", PROPERTIES).create_infer_request()
    tokens, rows = np.array([probe_tokens()]), []
    stops = range(PROMPT, PROMPT + STEPS + 1)
    for start, stop in zip([0, *stops], stops, strict=False):
        outputs = request.infer(
            {
                "input_ids": tokens[:, start:stop],
                "attention_mask": np.ones((1, stop), np.int64),
                "position_ids": np.arange(start, stop)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        rows.append([float(value) for value in outputs["logits"][0, -1]])
    return rows


def _spelled(layer: ProbeLayer) -> str:
    return json.dumps({**asdict(layer), "sink": layer.sink.value})


def _main(spelled: str, answer: str) -> None:
    fields = json.loads(spelled)
    layer = ProbeLayer(**{**fields, "sink": Sink(fields["sink"])})
    try:
        found: dict[str, object] = {"logits": run_native(layer)}
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        found = {"refused": lines[-1] if lines else type(error).__name__}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
