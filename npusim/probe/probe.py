"""Run one layer of a kind through NPUW as OpenVINO comes, and say what became of its window and sink."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import openvino as ov

from npusim.compare.differences import row_differences
from npusim.compiled_llm import compile_model
from npusim.onnx_attention import AttentionLayer, Sink
from npusim.probe import worker
from npusim.probe.layer_kind import LayerKind, layer_kind
from npusim.probe.one_layer import VOCAB_SIZE, one_layer_model, without_sink, without_window

PROMPT_LENGTH = 44  # past the largest window that is probed
NUM_STEPS = 4
PROPERTIES = {
    "NPU_USE_NPUW": "YES",
    "NPUW_DEVICES": "CPU",
    "NPUW_LLM": "YES",
    "NPUW_LLM_MAX_PROMPT_LEN": "64",
    "NPUW_LLM_MIN_RESPONSE_LEN": "64",
}
SIMULATOR_CONFIG = {"NPUW_LLM_MAX_PROMPT_LEN": 64, "NPUW_LLM_MIN_RESPONSE_LEN": 64}
SHARE = 0.02
"""Logits agree that differ by so much of the largest; in float16 they differ by 0.005."""

TIMEOUT = 120.0
"""Seconds for one kind; a compilation takes about five."""

Logits = list[npt.NDArray[np.float32]]
"""For each block its newest rows, [n, vocab]."""


class Outcome(Enum):
    """What becomes of a layer."""

    RIGHT = "right"
    DROPS_WINDOW = "drops window"
    DROPS_SINK = "drops sink"
    DROPS_BOTH = "drops window and sink"
    WRONG = "wrong"
    REFUSES = "refuses"
    CRASHES = "crashes"
    HANGS = "hangs"
    NOT_AVAILABLE = "not available"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What was found, and in what words NPUW itself said it, if it did."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.detail}" if self.detail else self.outcome.value


def probe_kind(kind: LayerKind, *, python: str = sys.executable, timeout: float = TIMEOUT) -> Behaviour:
    """Try it in a process of its own, which may crash or hang. `python` may be one with another OpenVINO."""
    with tempfile.TemporaryDirectory(prefix="npusim-probe-") as name:
        folder = Path(name)
        model = one_layer_model(kind)
        onnx.save(model, folder / "model.onnx")
        task = {"blocks": _blocks(), "properties": PROPERTIES}
        (folder / "task.json").write_text(json.dumps(task))
        # -P: the script's own folder holds modules of npusim's names, which are none of its business.
        command = [python, "-P", str(Path(worker.__file__)), str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return Behaviour(outcome=Outcome.HANGS, detail=f"no answer within {timeout:g} s")
        return _read_result(kind, folder, done)


def probe_layers(
    layers: Sequence[AttentionLayer], on_kind: Callable[[], None] = lambda: None
) -> dict[int, Behaviour]:
    """By index of the layer what becomes of it; layers of one kind are tried once. Others are left out.

    on_kind is called after each kind.
    """
    kinds = {layer.index: kind for layer in layers if (kind := layer_kind(layer)) is not None}
    found: dict[LayerKind, Behaviour] = {}
    for kind in kinds.values():
        if kind not in found:
            found[kind] = probe_kind(kind)
            on_kind()
    return {index: found[kind] for index, kind in kinds.items()}


def _blocks() -> list[list[int]]:
    """A prompt and single tokens behind it."""
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, PROMPT_LENGTH + NUM_STEPS).tolist()
    return [tokens[:PROMPT_LENGTH], *([token] for token in tokens[PROMPT_LENGTH:])]


def _read_result(kind: LayerKind, folder: Path, done: subprocess.CompletedProcess[bytes]) -> Behaviour:
    result = folder / "result.json"
    if done.returncode != 0 or not result.is_file():
        return Behaviour(outcome=Outcome.CRASHES, detail=_cause_of_death(done))
    said = json.loads(result.read_text())
    if said["state"] == "unavailable":
        return Behaviour(outcome=Outcome.NOT_AVAILABLE, detail=said["reason"])
    if said["state"] == "refused":
        return Behaviour(outcome=Outcome.REFUSES, detail=said["reason"])
    with np.load(folder / "logits.npz") as arrays:
        return classify(kind, [arrays[name] for name in arrays.files])


def _cause_of_death(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def classify(kind: LayerKind, logits: Logits) -> Behaviour:
    """Which guess the logits are; the simulator says what each would give.

    The prompt decides. The generate steps must then go on as the same guess does, or the detail says so.
    """
    guesses = {outcome: _simulated(guess) for outcome, guess in _guesses(kind)}
    right = guesses[Outcome.RIGHT]
    scale = max(float(np.abs(rows).max()) for rows in right)
    prompt = {outcome: _distance(logits[:1], rows[:1]) for outcome, rows in guesses.items()}
    nearest = min(prompt, key=lambda outcome: prompt[outcome])
    if not prompt[nearest] <= SHARE * scale:
        off = prompt[Outcome.RIGHT]
        return Behaviour(outcome=Outcome.WRONG, detail=_off("the prompt's", off, scale))
    off = _distance(logits[1:], guesses[nearest][1:])
    if off <= SHARE * scale:
        return Behaviour(outcome=nearest)
    outcome = Outcome.WRONG if nearest is Outcome.RIGHT else nearest
    return Behaviour(outcome=outcome, detail=_off("generate steps'", off, scale))


def _off(whose: str, distance: float, scale: float) -> str:
    if not np.isfinite(distance):
        return f"{whose} logits are not numbers"
    return f"{whose} logits are off by {distance:.1e} of {scale:.1e}"


def _guesses(kind: LayerKind) -> Iterator[tuple[Outcome, LayerKind]]:
    yield Outcome.RIGHT, kind
    if kind.local_window_size > 0:
        yield Outcome.DROPS_WINDOW, without_window(kind)
    if kind.sink is not Sink.NONE:
        yield Outcome.DROPS_SINK, without_sink(kind)
        if kind.local_window_size > 0:
            yield Outcome.DROPS_BOTH, without_sink(without_window(kind))


def _simulated(kind: LayerKind) -> Logits:
    """What a layer of the kind gives for the same blocks."""
    model = ov.Core().read_model(one_layer_model(kind).SerializeToString())
    request = compile_model(model, SIMULATOR_CONFIG).create_infer_request()
    return [request.infer({"input_ids": [block]})["logits"][0].copy() for block in _blocks()]


def _distance(logits: Logits, guess: Logits) -> float:
    """The greatest difference in the rows that there are; NaN is infinitely far."""
    return max(
        float(row_differences(theirs[-len(ours) :], ours).max())
        for ours, theirs in zip(logits, guess, strict=True)
    )
