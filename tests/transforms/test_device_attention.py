"""Which attention is taken for the device form, and which is left alone."""

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from execution_cases import run, types

from transforms import ExecutionForm


def plain_attention(**options: object) -> ov.Model:
    """An SDPA over 4 heads, S = 3, K = 5, D = 16, of which one detail can be changed."""
    key_shape = options.get("key_shape", [1, 4, 5, 16])
    mask_shape = options.get("mask_shape", [1, 1, 3, 5])
    mask_type = options.get("mask_type", np.float32)
    query = ops.parameter([1, 4, 3, 16], np.float32)
    key, value = (ops.parameter(key_shape, np.float32) for _ in range(2))
    mask = ops.parameter(mask_shape, mask_type)
    inputs = [query, key, value, mask]
    if options.get("scale", True):
        inputs.append(ops.constant(np.float32(0.3)))
    attention = ops.scaled_dot_product_attention(*inputs, causal=options.get("causal", False))
    return ov.Model([attention], [query, key, value, mask], "plain")


def test_an_attention_without_groups_or_past_is_rewritten_too() -> None:
    model = plain_attention()
    assert ExecutionForm().run_on_model(model)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"mask_type": bool},
        {"scale": False},
        {"mask_shape": [3, 5]},
        {"mask_shape": [1, 1, 1, 5]},
        {"key_shape": [-1, 4, 5, 16]},
        {"key_shape": [1, 1, 5, 16]},
    ],
    ids=str,
)
def test_another_attention_is_left_alone(options: dict[str, object]) -> None:
    model = plain_attention(**options)
    rewrite = ExecutionForm()
    assert not rewrite.run_on_model(model)
    assert rewrite.rewritten == 0
    assert types(model)["ScaledDotProductAttention"] == 1


def test_a_broadcast_that_is_no_repetition_of_heads_stays() -> None:
    """[1, 2, 5, 16] repeated behind the heads, h -> h mod 2, is not the order of grouped heads."""
    query = ops.parameter([1, 4, 3, 16], np.float32)
    rows = ops.parameter([1, 2, 5, 16], np.float32)
    mask = ops.parameter([1, 1, 3, 5], np.float32)
    lifted = ops.unsqueeze(rows, ops.constant(np.array([1])))
    repeated = ops.broadcast(lifted, ops.constant(np.array([1, 2, 2, 5, 16])))
    wide = ops.reshape(repeated, ops.constant(np.array([1, 4, 5, 16])), False)
    attention = ops.scaled_dot_product_attention(query, wide, wide, mask, ops.constant(np.float32(0.3)))
    model = ov.Model([attention], [query, rows, mask], "interleaved")
    feeds = {i: np.random.default_rng(i).normal(size=p.shape) for i, p in enumerate(model.inputs)}
    before = run(model, feeds)[0]
    ExecutionForm().run_on_model(model)
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=0, atol=1e-5)
