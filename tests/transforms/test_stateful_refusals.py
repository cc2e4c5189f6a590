"""What has no exact stateful form is refused by name, and the model is then what it was."""

from collections.abc import Callable

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from model_files import READABLE

from transforms import DecompositionError, StatefulGQA, find_gqa

Edit = Callable[[ov.Model], None]


def with_input(port: int, value: np.ndarray | ov.Node) -> Edit:
    """The third node reads something else."""

    def edit(model: ov.Model) -> None:
        source = ops.constant(value) if isinstance(value, np.ndarray) else value
        find_gqa(model)[2].input(port).replace_source_output(source.output(0))

    return edit


def with_one_past_for_both(model: ov.Model) -> None:
    node = find_gqa(model)[2]
    node.input(3).replace_source_output(node.input_value(4))


def without_attention_mask(model: ov.Model) -> None:
    model.input("attention_mask").get_tensor().set_names({"mask"})


COMPUTED = ops.unsqueeze(
    ops.range(ops.constant(0), ops.constant(4), ops.constant(1), "i64"), ops.constant([0])
)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (with_input(9, COMPUTED), "only the model's own input position_ids is known to hold"),
        (with_input(10, np.zeros((1, 1, 4, 4), np.float32)), "attention_bias is given"),
        (with_input(11, np.zeros(3, np.float32)), r"head_sink has shape \[3\]; 4 elements are needed"),
        (with_input(7, np.zeros((512, 8), np.float16)), "cos_cache is .*float16.*, query is .*float32"),
        (with_one_past_for_both, "a model input that only this node reads is needed"),
        (without_attention_mask, "no input attention_mask; its inputs are"),
    ],
)
def test_refused_models_are_left_unchanged(edit: Edit, message: str) -> None:
    model = ov.Core().read_model(READABLE["llama"])
    edit(model)
    before = [node.get_name() for node in model.get_ordered_ops()]
    with pytest.raises(DecompositionError, match=message):
        StatefulGQA().run_on_model(model)
    assert [node.get_name() for node in model.get_ordered_ops()] == before
    assert len(find_gqa(model)) == 4


def test_a_model_without_the_op_is_left_alone() -> None:
    parameter = ops.parameter([1, 4], np.float32, "x")
    model = ov.Model([ops.relu(parameter)], [parameter])
    lowering = StatefulGQA()
    assert not lowering.run_on_model(model)
    assert lowering.lowered == 0
