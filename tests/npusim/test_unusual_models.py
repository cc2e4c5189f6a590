"""Models that run although something about them is unlike the others."""

from __future__ import annotations

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx_edits import Edit, of_float16, with_shared_rows
from tiny_llm import SIZES, config_of, error_of, feed, text
from tiny_model import TinyModel, build

import npusim
from npusim import LLMInferRequest
from npusim.native import NativeModel

MODEL = TinyModel(windows=(-1, 4), sinks=(1,))


def read(edit: Edit) -> ov.Model:
    proto = onnx.load_model_from_string(build(MODEL))
    edit(proto)
    return ov.Core().read_model(proto.SerializeToString())


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
