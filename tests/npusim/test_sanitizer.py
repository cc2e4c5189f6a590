"""The KV sanitizer: silent on right graphs, precise on wrong ones, and without a trace in the cache."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import openvino.opset13 as ops
import pytest
from onnx_edits import of_float16
from tiny_llm import SIZES, config_of, feed, new_request, text
from tiny_model import TinyModel, Weights, build

import npusim
import transforms.frames
import transforms.shared_parts
from transforms.opset import i32

MODELS = Path(__file__).parents[1] / "models"
CONFIG = {
    "NPUW_LLM_MAX_PROMPT_LEN": 24,
    "NPUW_LLM_MIN_RESPONSE_LEN": 20,
    "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 3,
    "NPUW_LLM_PREFILL_CHUNK_SIZE": 7,
    "NPUSIM_SANITIZE": "YES",
}


def _run(name: str, **config: str | int) -> tuple[npusim.LLMInferRequest, list[np.ndarray]]:
    """A prompt of 10, then blocks of 3 of which the last token is always rejected."""
    request = npusim.compile_model(MODELS / name, {**CONFIG, **config}).create_infer_request()
    tokens = np.random.default_rng(5).integers(0, 256, 40)
    logits = [request.infer({"input_ids": tokens[None, :10]})["logits"]]
    for start in range(10, 22, 2):
        block = {
            "input_ids": tokens[None, start : start + 3],
            "position_ids": [[start, start + 1, start + 2]],
        }
        logits.append(request.infer(block)["logits"])
    return request, logits


@pytest.mark.parametrize("name", ["gemma3_alternating.onnx", "gptoss_attention.onnx"])
@pytest.mark.parametrize("precision", ["F32", "F16"])
@pytest.mark.parametrize(
    ("layout", "commit"), [("LINEAR", "EAGER"), ("RING", "EAGER"), ("ROLLING", "DEFERRED")]
)
def test_a_right_graph_passes_with_the_same_bits(name: str, layout: str, commit: str, precision: str) -> None:
    chosen = {"NPUSIM_KV_PRECISION": precision, "NPUSIM_KV_LAYOUT": layout, "NPUSIM_COMMIT": commit}
    checked, logits = _run(name, **chosen)
    plain, expected = _run(name, **chosen, NPUSIM_SANITIZE="NO")
    for got, want in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    for one, other in zip(checked.kv.groups, plain.kv.groups, strict=True):
        np.testing.assert_array_equal(one.past, other.past)


@dataclass(frozen=True, kw_only=True)
class _FaintModel(TinyModel):
    """Values so near 0 that float16 keeps few of their digits, or none."""

    size: float

    def weights(self) -> Weights:
        plain = super().weights()
        return replace(plain, embedding=plain.embedding * np.float32(self.size))


@pytest.mark.parametrize("size", [1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-5])
def test_rounding_to_float16_is_no_leak(size: float) -> None:
    request = new_request(_FaintModel(windows=(4, -1), size=size), precision="F16", sanitize="YES")
    feed(request, text(9), 0)
    for start in (9, 11):
        feed(request, text(3), start)
    assert request.num_stored_tokens == 14


@dataclass(frozen=True, kw_only=True)
class _LoudModel(TinyModel):
    """Queries and keys so large that padded rows, which average the loud values, outgrow float16 later on."""

    size: float

    def weights(self) -> Weights:
        plain = super().weights()
        return replace(plain, qkv=tuple(matrix * np.float32(self.size) for matrix in plain.qkv))


@pytest.mark.parametrize(
    ("windows", "size", "seed"),
    [((4, -1, -1), 0.5, 11), ((4, -1, -1), 1.0, 11), ((4, -1, -1), 3.0, 11), ((4, 4, 4, -1), 3.0, 2)],
)
@pytest.mark.parametrize("layout", ["LINEAR", "RING"])
def test_loud_values_that_padded_rows_carry_on_are_no_leak(
    windows: tuple[int, ...], size: float, seed: int, layout: str
) -> None:
    """The mask is right: with the sanitizer every call succeeds and gives the same bits."""
    model = onnx.load_from_string(build(_LoudModel(windows=windows, size=size, seed=seed)))
    of_float16(model)
    options = {"chunk": 0, "precision": "MODEL", "layout": layout}
    requests = [
        npusim.compile_model(
            ov.Core().read_model(model.SerializeToString()),
            config_of({**SIZES, **options, "sanitize": sanitize}),
        ).create_infer_request()
        for sanitize in ("YES", "NO")
    ]
    tokens = text(16)
    for start, stop in ((0, 8), (8, 9), (9, 11), (11, 12), (12, 15), (15, 16)):
        got, want = (feed(request, tokens[start:stop], start) for request in requests)
        np.testing.assert_array_equal(got, want)


@dataclass(frozen=True, kw_only=True)
class _BrokenModel(TinyModel):
    """Token 3 is no number."""

    def weights(self) -> Weights:
        plain = super().weights()
        embedding = plain.embedding.copy()
        embedding[3] = np.nan
        return replace(plain, embedding=embedding)


def test_a_model_that_computes_no_number_is_no_leak() -> None:
    request = new_request(_BrokenModel(windows=(4, -1)), sanitize="YES")
    feed(request, [1, 2, 4, 5, 6, 7], 0)
    with pytest.raises(npusim.ModelError, match="layer 0: the key of position 6 is infinite or NaN"):
        feed(request, [3], 6)
    assert request.num_stored_tokens == 6


def _see_one_slot_too_many(step: transforms.frames.Step, capacity: int) -> transforms.frames.PastKeys:
    right = _LINEAR(step, capacity)
    filled = ops.less(right.position, ops.add(step.stored, i32(1))).output(0)
    return transforms.frames.PastKeys(position=right.position, filled=filled)


_LINEAR = transforms.frames._linear_past


def test_a_slot_never_filled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms.frames, "_linear_past", _see_one_slot_too_many)
    monkeypatch.setattr(transforms.shared_parts, "visible", _visible_whatever_the_order)
    with pytest.raises(npusim.KVLeakError, match=r"layer 0: slot 0 .* it was never filled") as caught:
        _run("llama.onnx")
    assert (caught.value.layer, caught.value.slot, caught.value.position) == (0, 0, None)


_VISIBLE = transforms.shared_parts.visible


def _visible_whatever_the_order(frame, *, local_window_size, causal):  # noqa: ARG001
    return _VISIBLE(frame, local_window_size=local_window_size, causal=False)


def test_a_window_too_wide_is_named_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_wide(frame, *, local_window_size, causal):
        wider = local_window_size + 1 if local_window_size > 0 else -1
        return _VISIBLE(frame, local_window_size=wider, causal=causal)

    monkeypatch.setattr(transforms.shared_parts, "visible", one_too_wide)
    request = npusim.compile_model(MODELS / "gptoss_attention.onnx", CONFIG).create_infer_request()
    tokens = np.random.default_rng(6).integers(0, 256, 14)
    request.infer({"input_ids": tokens[None, :7]})
    request.infer({"input_ids": tokens[None, 7:8]})
    before = [group.past.copy() for group in request.kv.groups]
    with pytest.raises(npusim.KVLeakError, match=r"slot 0 .* position 0, outside local_window_size 8"):
        request.infer({"input_ids": tokens[None, 8:10]})
    assert request.num_stored_tokens == 8
    for group, bytes_before in zip(request.kv.groups, before, strict=True):
        np.testing.assert_array_equal(group.past, bytes_before)


def test_a_trimmed_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms.frames, "_linear_past", _see_one_slot_too_many)
    monkeypatch.setattr(transforms.shared_parts, "visible", _visible_whatever_the_order)
    wrong = npusim.compile_model(MODELS / "llama.onnx", {**CONFIG, "NPUW_LLM_PREFILL_HINT": "STATIC"})
    request = wrong.create_infer_request()
    tokens = np.random.default_rng(7).integers(0, 256, 12)
    request.infer({"input_ids": tokens[None, :9]})
    assert request.trim(6) == 3
    with pytest.raises(npusim.KVLeakError, match=r"slot 6 .* position 6, which was trimmed"):
        request.infer({"input_ids": tokens[None, 9:10]})
