"""StaticShapes sets every length of the tokens and the caches, or refuses and leaves the model alone."""

from __future__ import annotations

import numpy as np
import onnx
import openvino as ov
import pytest
from lowered_op import core
from onnx import ModelProto, helper, numpy_helper
from onnx_edits import Edit, unchanged
from tiny_model import TinyModel, build

from transforms import DecompositionError, StaticShapes

MODEL = TinyModel(windows=(-1, 5), position_ids=True)


def of_fixed_lengths(model: ModelProto) -> None:
    """As an export for blocks of 7 tokens has them."""
    for port in model.graph.input:
        if not port.name.startswith("past"):
            for dimension, length in zip(port.type.tensor_type.shape.dim, (1, 7), strict=True):
                dimension.dim_value = length


def with_rows_of_its_own(model: ModelProto) -> None:
    """Something in the graph has 7 rows and cannot have others."""
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 7, 20), np.float32), "fixed"))
    model.graph.node[0].output[0] = "embedded"
    model.graph.node.insert(1, helper.make_node("Add", ["embedded", "fixed"], ["hidden.0"]))


def read(edit: Edit) -> ov.Model:
    model = onnx.load_model_from_string(build(MODEL))
    edit(model)
    return core().read_model(model.SerializeToString())


def shapes(model: ov.Model) -> dict[str, str]:
    return {port.get_any_name(): str(port.get_partial_shape()) for port in model.inputs}


@pytest.mark.parametrize("edit", [unchanged, of_fixed_lengths])
def test_lengths_are_set_also_where_the_model_fixes_them(edit: Edit) -> None:
    model = read(edit)
    StaticShapes(sequence_length=3, past_length={"attention.0": 8, "attention.1": 4}).run_on_model(model)
    past = {f"past_key_values.0.{kind}": "[1,1,8,16]" for kind in ("key", "value")}
    past |= {f"past_key_values.1.{kind}": "[1,1,4,16]" for kind in ("key", "value")}
    assert shapes(model) == {
        "input_ids": "[1,3]",
        "attention_mask": "[1,11]",
        "position_ids": "[1,3]",
        **past,
    }


@pytest.mark.parametrize(
    ("edit", "past_length", "message"),
    [
        (with_rows_of_its_own, 4, r"cannot have these shapes \(.*\); export it with dynamic ones"),
        (unchanged, {}, "past_length has no entry for attention.0"),
        (unchanged, {"attention.0": 4, "attention.1": 4, "nobody": 4}, r"past_length names \['nobody'\]"),
    ],
)
def test_what_a_model_cannot_have(edit: Edit, past_length: int | dict[str, int], message: str) -> None:
    model = read(edit)
    before = shapes(model)
    with pytest.raises(DecompositionError, match=message):
        StaticShapes(sequence_length=3, past_length=past_length).run_on_model(model)
    assert shapes(model) == before


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ({"sequence_length": 0, "past_length": 4}, DecompositionError, "sequence_length=0"),
        ({"sequence_length": 3, "past_length": -1}, DecompositionError, "the second at least 0"),
        ({"sequence_length": 3, "past_length": {"a": -1}}, DecompositionError, "the second at least 0"),
        (
            {"sequence_length": 3, "past_length": 4, "attention_length": 2},
            DecompositionError,
            "attention_length=2; .* the third at least the first",
        ),
        ({"sequence_length": 3.0, "past_length": 4}, TypeError, "sequence_length=3.0, .* whole numbers"),
        ({"sequence_length": 3, "past_length": {"a": "4"}}, TypeError, "whole numbers"),
    ],
)
def test_lengths_that_are_none(lengths: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StaticShapes(**lengths)
