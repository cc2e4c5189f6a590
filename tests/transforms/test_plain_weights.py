"""Large weights are read as they lie in the model: same numbers, static shapes, nothing else touched."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from driving import Setup, compiled, feed

from npusim import compiled_llm
from transforms import PlainWeights, plain_weights

ROWS, WIDE, NARROW = 512, 514, 64
LENGTH = 3


def layers(*, dtype: type[np.floating] = np.float32, ids: type[np.integer] = np.int64) -> ov.Model:
    """input_ids [1, 3] -> rows of a table -> a large weight, a small one, a large one that is transposed."""
    rng = np.random.default_rng(5)

    def weight(*shape: int) -> ov.Node:
        return ops.constant(rng.standard_normal(shape, dtype=np.float32) / 20, dtype=dtype)

    tokens = ops.parameter([1, LENGTH], ids, "input_ids")
    tokens.output(0).set_names({"input_ids"})
    state = ops.gather(weight(9, ROWS), tokens, ops.constant(0))
    state = ops.matmul(state, weight(ROWS, WIDE), False, False)
    state = ops.matmul(state, weight(WIDE, NARROW), False, False)
    state = ops.matmul(state, weight(9000, NARROW), False, True)
    state.set_friendly_name("head")
    state.output(0).set_names({"logits"})
    return ov.Model([state], [tokens])


def run(model: ov.Model) -> np.ndarray:
    request = (
        ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    )
    return np.array(request.infer({"input_ids": np.array([[8, 0, 3]])})["logits"])


@pytest.mark.parametrize("ids", [np.int64, np.int32])
def test_the_numbers_stay_and_large_weights_are_hidden(ids: type[np.integer]) -> None:
    model = layers(ids=ids)
    before = run(model)
    hide = PlainWeights()
    assert hide.run_on_model(model)
    assert hide.changed == 2
    assert np.abs(before).max() > 0.1
    np.testing.assert_allclose(run(model), before, atol=1e-6)
    assert list(model.output("logits").get_shape()) == [1, LENGTH, 9000]


def test_the_compiler_does_not_fold_it() -> None:
    """A folded reshape would be a FullyConnected with a packed weight again."""
    hidden = layers()
    PlainWeights().run_on_model(hidden)
    counts = []
    for model in (layers(), hidden):
        runtime = ov.Core().compile_model(model, "CPU").get_runtime_model()
        kinds = [node.get_rt_info()["layerType"].astype(str) for node in runtime.get_ordered_ops()]
        counts.append((kinds.count("FullyConnected"), kinds.count("MatMul")))
    assert counts == [(3, 0), (1, 2)]


def test_a_second_run_finds_nothing() -> None:
    model = layers()
    PlainWeights().run_on_model(model)
    again = PlainWeights()
    assert not again.run_on_model(model)
    assert again.changed == 0


def test_other_weights_are_left_alone() -> None:
    model = layers(dtype=np.float16)
    assert not PlainWeights().run_on_model(model)
    assert plain_weights.large_weight_bytes(model) == 0
    assert plain_weights.large_weight_bytes(layers()) == 4 * (ROWS * WIDE + 9000 * NARROW)


def test_a_large_model_has_it_in_its_prefill_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in target, taken for a large one: the same logits, chunk by chunk and after a rejection."""
    setup = Setup(prompt=24, response=9, block=3, chunk=7, layout="RING", slack=1)
    plain = compiled("swa_target", setup).create_infer_request()
    monkeypatch.setattr(plain_weights, "LARGE_WEIGHT_BYTES", 2**15)
    monkeypatch.setattr(compiled_llm, "LARGE_MODEL_BYTES", 2**19)
    compiled.cache_clear()
    large = compiled("swa_target", setup)
    compiled.cache_clear()
    kinds = [
        [node.get_rt_info()["layerType"].astype(str) for node in model.get_runtime_model().get_ordered_ops()]
        for model in (large.compiled_prefill, *large.compiled_generates.values())
    ]
    assert kinds[0].count("FullyConnected") < kinds[1].count("FullyConnected") > 10
    request = large.create_infer_request()
    tokens = np.random.default_rng(2).integers(0, 256, 24).tolist()
    for start, block in ((0, tokens[:20]), (20, tokens[20:23]), (21, tokens[21:24]), (0, tokens[3:22])):
        np.testing.assert_allclose(feed(request, block, start), feed(plain, block, start), atol=2e-5)
