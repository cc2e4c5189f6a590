"""Which attention is taken for the device form, and which is left alone."""

from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from execution_cases import run, types
from numpy.typing import NDArray
from openvino.utils.node_factory import NodeFactory

from transforms import ExecutionForm
from transforms.form_choice import AttentionForm


@dataclass(frozen=True, kw_only=True)
class Plain:
    """An SDPA over 4 heads, S = 3, K = 5, D = 16 with a mask, a scale and sinks; details can be changed."""

    batch: int = 1
    key_batch: int = 1
    causal: bool = False
    key_shape: tuple[int, ...] = (4, 5, 16)
    mask_shape: tuple[int, ...] = (1, 1, 3, 5)
    mask_type: type = np.float32
    scale_shape: tuple[int, ...] = ()
    sink_shape: tuple[int, ...] = (1, 4, 1, 1)

    def model(self) -> ov.Model:
        query = ops.parameter([self.batch, 4, 3, 16], np.float32)
        key, value = (ops.parameter([self.key_batch, *self.key_shape], np.float32) for _ in range(2))
        mask = ops.parameter(list(self.mask_shape), self.mask_type)
        scale = ops.constant(np.full(self.scale_shape, 0.3, np.float32))
        sink = ops.constant(np.full(self.sink_shape, 0.7, np.float32))
        inputs = [query, key, value, mask, scale, sink]
        attention = NodeFactory("opset13").create(
            "ScaledDotProductAttention", [node.output(0) for node in inputs], {"causal": self.causal}
        )
        return ov.Model([attention], [query, key, value, mask], "plain")


def test_an_attention_without_groups_or_past_is_rewritten_too() -> None:
    model = Plain().model()
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    assert ExecutionForm().run_on_model(model)
    assert types(model)["ScaledDotProductAttention"] == 0
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "plain",
    [
        Plain(batch=2),
        Plain(batch=2, key_batch=2),
        Plain(causal=True),
        Plain(mask_type=bool),
        Plain(mask_shape=(3, 5)),
        Plain(mask_shape=(1, 1, 1, 5)),
        Plain(key_shape=(-1, 5, 16)),
        Plain(key_shape=(1, 5, 16)),
        Plain(sink_shape=(1, 4, 3, 1)),
        Plain(scale_shape=(1, 1)),
    ],
    ids=str,
)
def test_another_attention_is_left_alone(plain: Plain) -> None:
    model = plain.model()
    rewrite = ExecutionForm()
    assert not rewrite.run_on_model(model)
    assert rewrite.rewritten == 0
    assert types(model)["ScaledDotProductAttention"] == 1


def test_an_attention_without_a_scale_is_left_alone() -> None:
    rows = [ops.parameter([1, 4, 3, 16], np.float32) for _ in range(3)]
    mask = ops.parameter([1, 1, 3, 3], np.float32)
    model = ov.Model([ops.scaled_dot_product_attention(*rows, mask)], [*rows, mask], "no scale")
    assert not ExecutionForm().run_on_model(model)


def test_ranges_that_keys_and_values_do_not_share_stay_joined() -> None:
    first, second = (ops.parameter([1, 4, length, 16], np.float32) for length in (2, 3))
    value = ops.parameter([1, 4, 5, 16], np.float32)
    check_same_numbers(ops.concat([first, second], 2), value, [first, second, value])


def test_pieces_of_the_channels_are_no_ranges() -> None:
    """Rotary leaves keys as a Concat too, along axis 3."""
    first, second = (ops.parameter([1, 4, 5, 8], np.float32) for _ in range(2))
    check_same_numbers(ops.concat([first, second], 3), ops.concat([second, first], 3), [first, second])


def check_same_numbers(key: ov.Node, value: ov.Node, parameters: list[ov.Node]) -> None:
    query = ops.parameter([1, 4, 3, 16], np.float32)
    mask, scale = ops.parameter([1, 1, 3, 5], np.float32), ops.constant(np.float32(0.3))
    attention = ops.scaled_dot_product_attention(query, key, value, mask, scale)
    model = ov.Model([attention], [query, *parameters, mask], "pieces")
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    for form in (AttentionForm.SPLIT, AttentionForm.JOINED):
        rewritten = model.clone()
        assert ExecutionForm(lambda _sizes, form=form: form).run_on_model(rewritten)
        np.testing.assert_allclose(run(rewritten, feeds)[0], before, rtol=0, atol=1e-5)


def random_feeds(model: ov.Model) -> dict[str, NDArray[np.generic]]:
    """Normal numbers for every input, named in order."""
    feeds: dict[str, NDArray[np.generic]] = {}
    for index, port in enumerate(model.inputs):
        port.get_tensor().set_names({f"input {index}"})
        feeds[f"input {index}"] = np.random.default_rng(index).normal(size=port.shape).astype(np.float32)
    return feeds


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
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    ExecutionForm().run_on_model(model)
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=0, atol=1e-5)
