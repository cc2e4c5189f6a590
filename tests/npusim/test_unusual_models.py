"""Models that run although something about them is unlike the others."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from onnx import ModelProto, numpy_helper
from onnx_edits import Edit, edited, make, of_float16, with_hidden, with_shared_rows
from tiny_llm import SIZES, config_of, error_of, feed, text
from tiny_model import HIDDEN_SIZE, TinyModel, build

import npusim
from npusim import LLMInferRequest
from npusim.native import NativeModel

MODEL = TinyModel(windows=(-1, 4), sinks=(1,))


def read(edit: Edit) -> ov.Model:
    return edited(build(MODEL), edit)


def new_request(model: ov.Model, chunk: int, layout: str = "LINEAR") -> LLMInferRequest:
    return npusim.compile_model(
        model, config_of({**SIZES, "chunk": chunk, "layout": layout})
    ).create_infer_request()


@pytest.mark.parametrize("chunk", [0, 6])
def test_a_model_of_float16_has_logits_of_float32(chunk: int) -> None:
    tokens = text(17)
    request = new_request(read(of_float16), chunk)
    for start, stop in ((0, 14), (14, 17)):
        logits = feed(request, tokens[start:stop], start)
        assert logits.dtype == np.float32
        assert error_of(MODEL, logits, tokens[:stop]) < 5e-3


@pytest.mark.parametrize("layout", ["LINEAR", "RING"])
def test_layers_may_attend_over_the_same_new_rows(layout: str) -> None:
    """OpenVINO computes their values once; both caches get them."""
    model, tokens = read(with_shared_rows), text(17)
    request, native = new_request(model, 6, layout), NativeModel(model)
    for start, stop in ((0, 14), (14, 17)):
        logits = feed(request, tokens[start:stop], start)
        np.testing.assert_allclose(logits, native.feed(tokens[start:stop])[0], rtol=0, atol=2e-5)


def with_a_zero_row(model: ModelProto) -> None:
    """Token 0 has a row of zeros, which a norm without epsilon makes NaN."""
    norm = make("SimplifiedLayerNormalization", "embedded ones", "hidden.0", axis=-1, epsilon=0.0)
    with_hidden(norm, ones=np.ones(HIDDEN_SIZE, np.float32))(model)
    embedding = next(tensor for tensor in model.graph.initializer if tensor.name == "embedding")
    rows = numpy_helper.to_array(embedding).copy()
    rows[0] = 0
    embedding.CopyFrom(numpy_helper.from_array(rows, "embedding"))


@pytest.mark.parametrize("chunk", [0, 6])
def test_padding_brings_no_token_that_the_block_has_not(chunk: int) -> None:
    model, tokens = read(with_a_zero_row), [token % 16 + 1 for token in text(17)]
    request, native = new_request(model, chunk), NativeModel(model)
    for start, stop in ((0, 14), (14, 15), (15, 17)):
        logits = feed(request, tokens[start:stop], start)
        np.testing.assert_allclose(logits, native.feed(tokens[start:stop])[0], rtol=0, atol=2e-5)


def test_inputs_are_found_by_any_of_their_names() -> None:
    model, tokens = ov.Core().read_model(build(MODEL)), text(9)
    for port in model.inputs:
        port.get_tensor().add_names({f"another.{port.get_any_name()}"})
    request, native = new_request(model, 6), NativeModel(model)
    for start, stop in ((0, 7), (7, 9)):
        logits = feed(request, tokens[start:stop], start)
        assert error_of(MODEL, logits, tokens[:stop]) < 2e-5
        np.testing.assert_allclose(logits, native.feed(tokens[start:stop])[0], rtol=0, atol=2e-5)
