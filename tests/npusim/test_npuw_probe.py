"""Asking the installed OpenVINO: the probe's model is what it says, and every verdict can come out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ort_runner import session

from npusim import npuw, npuw_probe
from npusim.npuw_probe import NativeProbe, NativeVerdict, judge, probe, probe_layer, probe_tokens
from npusim.onnx_attention import AttentionLayer, Sink, read_onnx_attention
from npusim.probe_model import ProbeLayer, build_onnx, reference_logits

PLAIN = ProbeLayer(num_heads=4, kv_num_heads=2, head_size=16)
LAYERS = {
    "plain": PLAIN,
    "window": replace(PLAIN, local_window_size=4),
    "sink": replace(PLAIN, sink=Sink.HEAD_SINK),
    "smooth": replace(PLAIN, sink=Sink.SMOOTH_SOFTMAX),
    "both": replace(PLAIN, local_window_size=4, sink=Sink.HEAD_SINK),
    "interleaved": replace(PLAIN, interleaved=True, num_heads=6, head_size=32),
    "no rotary": replace(PLAIN, positions=0),
}


def logits_of(layer: ProbeLayer) -> np.ndarray:
    return reference_logits(layer, probe_tokens())[npuw_probe.PROMPT - 1 :]


@pytest.mark.parametrize("name", LAYERS)
def test_the_file_is_what_the_arithmetic_says(name: str) -> None:
    layer, tokens = LAYERS[name], probe_tokens()
    empty = np.zeros((1, layer.kv_num_heads, 0, layer.head_size), np.float32)
    feeds = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "past_key_values.0.key": empty,
        "past_key_values.0.value": empty,
    }
    logits = session(build_onnx(layer)).run(["logits"], feeds)[0]
    np.testing.assert_allclose(logits[0], reference_logits(layer, tokens), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "computed", "verdict"),
    [
        ("plain", "plain", NativeVerdict.RIGHT),
        ("both", "both", NativeVerdict.RIGHT),
        ("window", "plain", NativeVerdict.DROPS_WINDOW),
        ("both", "sink", NativeVerdict.DROPS_WINDOW),
        ("sink", "plain", NativeVerdict.DROPS_SINK),
        ("smooth", "plain", NativeVerdict.DROPS_SINK),
        ("both", "window", NativeVerdict.DROPS_SINK),
        ("both", "plain", NativeVerdict.DROPS_BOTH),
        ("plain", "window", NativeVerdict.WRONG),
        ("plain", "no rotary", NativeVerdict.WRONG),
    ],
)
def test_verdicts(name: str, computed: str, verdict: NativeVerdict) -> None:
    noise = np.random.default_rng(1).normal(size=(1, logits_of(PLAIN).shape[1])) * 5e-3
    assert judge(LAYERS[name], logits_of(LAYERS[computed]) + noise) == NativeProbe(verdict=verdict)


def test_what_is_not_finite_is_said_so() -> None:
    logits = logits_of(PLAIN)
    logits[2, 3] = np.nan
    found = judge(PLAIN, logits)
    assert found.verdict is NativeVerdict.NOT_FINITE
    assert str(found) == "not finite: in the steps after the prompt, which is right"


def test_what_the_prompt_shows_is_not_lost_in_faulty_steps() -> None:
    logits = logits_of(PLAIN)
    logits[1:] = np.nan
    found = judge(LAYERS["both"], logits)
    assert found.verdict is NativeVerdict.DROPS_BOTH
    assert found.reason == "and the steps after the prompt: not finite"


def test_a_window_kept_in_the_prompt_alone_is_dropped() -> None:
    logits = logits_of(LAYERS["window"])
    logits[1:] = logits_of(PLAIN)[1:]
    assert judge(LAYERS["window"], logits).verdict is NativeVerdict.DROPS_WINDOW


def test_a_process_that_dies_is_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(npuw_probe.sys, "executable", str(dying))
    found = probe(replace(PLAIN, head_size=48))
    assert found.verdict is NativeVerdict.CRASHES
    assert str(found) == "crashes: the process ended with code -11"


def attention_layer(tmp_path: Path, layer: ProbeLayer) -> AttentionLayer:
    path = tmp_path / "probe.onnx"
    path.write_bytes(build_onnx(layer))
    return read_onnx_attention(path).layers[0]


_UNAVAILABLE = npuw.unavailable_reason()


@pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))
def test_the_installed_openvino_is_asked(tmp_path: Path) -> None:
    """Whatever it does, a layer with window and sink does not come out right without a lowering."""
    layer = attention_layer(tmp_path, replace(PLAIN, local_window_size=9, sink=Sink.HEAD_SINK))
    found = probe_layer(layer)
    assert found.verdict not in (NativeVerdict.RIGHT, NativeVerdict.NOT_PROBED)
    assert found is probe_layer(layer), "asked once"
    if found.verdict is NativeVerdict.REFUSES:
        assert found.reason


def test_a_quantized_cache_is_not_probed(tmp_path: Path) -> None:
    layer = replace(attention_layer(tmp_path, PLAIN), kv_cache_type="uint8")
    assert probe_layer(layer).verdict is NativeVerdict.NOT_PROBED
