"""The native reference against ONNX Runtime on the same files."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from gqa_models import Quantized
from quantized_models import OrtSteps, quantized, read

from npusim import native
from npusim.errors import InputError, ModelError, TrimError
from npusim.native import NativeModel

TESTS = Path(__file__).parents[1]
MODELS = {
    **{name: TESTS / "models" / f"{name}.onnx" for name in ("llama", "phi3_window8", "qwen3")},
    **{name: TESTS / "models" / f"{name}.onnx" for name in ("gemma3_alternating", "gptoss_attention")},
    **{name: TESTS.parent / "npusim" / "models" / f"{name}.onnx" for name in ("swa_target", "swa_draft")},
}
NUM_TOKENS = 47  # past every window: 8 and 32
# Blocks of 3, 4 and 6 are as long as some model has query heads, the case of OpenVINO's static-shape fault.
BLOCKS = {"single": (1,), "prompt": (12, 1, 1, 1), "mixed": (4, 6, 3, 1, 5, 2, 7), "whole": (NUM_TOKENS,)}


def tokens_of(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 256, NUM_TOKENS)]


def blocks_of(tokens: list[int], lengths: Iterable[int]) -> list[list[int]]:
    blocks = []
    while tokens:
        for length in lengths:
            if tokens:
                blocks.append(tokens[:length])
                tokens = tokens[length:]
    return blocks


def onnxruntime_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits [1, n, vocab] of one pass over all tokens, with an empty past."""
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "sliding_window_cache":
                attribute.i = 0  # its contract wants a past of full capacity; the window itself stays
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.zeros((1, value.shape[1], 0, 16), np.float32)
    return session.run(["logits"], feeds)[0]


@pytest.fixture(scope="module", params=sorted(MODELS))
def reference(request) -> tuple[NativeModel, list[int], np.ndarray]:
    path = MODELS[request.param]
    tokens = tokens_of(seed=len(request.param))
    return NativeModel(path), tokens, onnxruntime_logits(path, tokens)


@pytest.mark.parametrize("blocks", sorted(BLOCKS))
def test_any_blocks_give_onnxruntimes_logits(reference, blocks):
    model, tokens, expected = reference
    model.reset()
    logits = np.concatenate([model.feed(block) for block in blocks_of(tokens, BLOCKS[blocks])], axis=1)
    assert logits.dtype == np.float32
    assert model.num_stored_tokens == NUM_TOKENS
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 33, NUM_TOKENS])
def test_after_a_trim_the_rest_gives_the_same_logits(reference, kept):
    model, tokens, expected = reference
    model.reset()
    model.feed(tokens)
    assert model.trim(kept) == NUM_TOKENS - kept
    assert model.num_stored_tokens == kept
    if kept < NUM_TOKENS:
        np.testing.assert_allclose(model.feed(tokens[kept:]), expected[:, kept:], rtol=0, atol=1e-4)


def test_logits_are_not_overwritten_by_the_next_call():
    model = NativeModel(MODELS["llama"])
    first = model.feed([3, 5])
    kept = first.copy()
    model.feed([7, 11])
    np.testing.assert_array_equal(first, kept)


def test_the_rolling_flag_left_set_would_be_wrong(monkeypatch):
    monkeypatch.setattr(native, "_take_past_as_it_is", lambda _: None)
    model, tokens = NativeModel(MODELS["gemma3_alternating"]), tokens_of(seed=1)
    expected = onnxruntime_logits(MODELS["gemma3_alternating"], tokens)
    np.testing.assert_allclose(model.feed(tokens[:12]), expected[:, :12], rtol=0, atol=1e-4)
    assert np.abs(model.feed(tokens[12:13]) - expected[:, 12:13]).max() > 0.1


@pytest.mark.parametrize("form", [Quantized(), Quantized(bits=4), Quantized(bits=4, kind="PER_CHANNEL")])
def test_caches_of_codes(form):
    """Their inputs leave the head size open, and a row of 4-bit codes takes half of it."""
    model, tokens = quantized(MODELS["llama"], form), tokens_of(seed=5)
    native, expected = NativeModel(read(model)), OrtSteps(model)
    for start, stop in ((0, 15), (15, 20), (20, 21)):
        logits = native.feed(tokens[start:stop])
        np.testing.assert_allclose(logits, expected.feed(tokens[start:stop], start), rtol=0, atol=1e-4)


def test_bad_calls_are_refused_and_change_nothing():
    model = NativeModel(MODELS["qwen3"])
    tokens = tokens_of(seed=2)
    expected = model.feed(tokens)
    model.trim(20)
    with pytest.raises(InputError, match="feed: got no token"):
        model.feed([])
    for wrong in (-1, 21, True, 1.5, "3", None):
        with pytest.raises(TrimError, match=f"trim to {wrong!r} tokens: 20 are stored"):
            model.trim(wrong)
    size = expected.shape[2]
    for bad, message in (
        ([-1], "token 0 of the block is -1"),
        ([0, size], f"token 1 of the block is {size}"),
    ):
        with pytest.raises(InputError, match=f"{message}, outside the vocabulary"):
            model.feed(bad)
    for odd in (None, [1.7], ["a"], [[1, 2]], [True]):
        with pytest.raises(InputError, match="the block"):
            model.feed(odd)
    assert model.num_stored_tokens == 20
    np.testing.assert_allclose(model.feed(np.array(tokens[20:])), expected[:, 20:], rtol=0, atol=1e-5)


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"absent\.onnx: no such file"):
        NativeModel(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match="softcap=50: only softcap=0 is lowered"):
        NativeModel(TESTS / "models" / "gemma2_softcap.onnx")


def test_a_model_without_attention_is_refused(tmp_path):
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "relu.onnx")
    with pytest.raises(ModelError, match="no GroupQueryAttention op"):
        NativeModel(tmp_path / "relu.onnx")


def test_an_unknown_input_is_refused_by_name(tmp_path):
    model = onnx.load(MODELS["llama"])
    model.graph.input[0].name = "tokens"
    for node in model.graph.node:
        node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]
    onnx.save(model, tmp_path / "renamed.onnx")
    with pytest.raises(ModelError, match="input tokens is unknown"):
        NativeModel(tmp_path / "renamed.onnx")
