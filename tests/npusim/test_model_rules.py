"""Graphs that would answer wrong once static, because of what they do around the attention ops."""

from __future__ import annotations

import onnx
import openvino as ov
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx_edits import Edit, attention, inside_an_if, unchanged, with_numbers_of_layers
from tiny_model import TinyModel, build

from npusim import ModelError
from npusim.model_spec import read_spec
from transforms import find_gqa

MODEL = TinyModel(windows=(-1, 5, 4))


def with_past_of(layer: int, key: str, value: str) -> Edit:
    def edit(model: ModelProto) -> None:
        attention(model)[layer].input[3:5] = [f"past_key_values.{key}", f"past_key_values.{value}"]

    return edit


def with_crossed_caches(model: ModelProto) -> None:
    with_past_of(1, "2.key", "2.value")(model)
    with_past_of(2, "1.key", "1.value")(model)


def with_a_past_that_is_measured(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Shape", ["past_key_values.1.key"], ["past_shape"]))
    model.graph.output.append(helper.make_tensor_value_info("past_shape", TensorProto.INT64, [4]))


def with_a_present_that_is_read(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["present.1.key"], ["seen"]))
    model.graph.output.append(helper.make_tensor_value_info("seen", TensorProto.FLOAT, ["a", 1, "b", 16]))


REFUSED: dict[str, tuple[Edit, str]] = {
    "one past for two layers": (
        with_past_of(1, "2.key", "2.value"),
        "its cache past_key_values.2.key is read 2 times, by .*; a cache belongs to",
    ),
    "one past for keys and values": (
        with_past_of(1, "1.key", "1.key"),
        "attention.1: its cache past_key_values.1.key is read 2 times",
    ),
    "crossed layers": (
        with_crossed_caches,
        "attention.1: its keys come from past_key_values.2.key and go to present.1.key; a runtime",
    ),
    "crossed keys and values": (
        with_past_of(1, "1.value", "1.key"),
        "attention.1: its keys come from past_key_values.1.value and go to present.1.key",
    ),
    "a past that is measured": (
        with_a_past_that_is_measured,
        "attention.1: its cache past_key_values.1.key is read 2 times, by .*past_shape",
    ),
    "a present that is read": (
        with_a_present_that_is_read,
        r"attention.1: output 1 \(present\) is read by .* \(Relu\); .* must be a model output",
    ),
    "inside an If": (
        inside_an_if,
        r"attention.1: this GroupQueryAttention is inside the body of .* \(If\); .* without control flow",
    ),
}


def read(edit: Edit) -> ov.Model:
    proto = onnx.load_model_from_string(build(MODEL))
    edit(proto)
    return ov.Core().read_model(proto.SerializeToString())


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_that_would_be_wrong_when_static(name: str) -> None:
    edit, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        read_spec(read(edit))


def test_what_they_would_be_without_is_read() -> None:
    assert len(read_spec(read(unchanged)).layers) == 3


def test_ops_of_one_name() -> None:
    model = read(unchanged)
    for node in find_gqa(model)[:2]:
        node.output(0).get_tensor().set_names({"same"})
    with pytest.raises(ModelError, match=r"2 GroupQueryAttention ops are called same; give .* of its own"):
        read_spec(model)


@pytest.mark.parametrize(
    ("numbers", "order"), [((0, 1, 2), [0, 1, 2]), ((0, 2, 1), [0, 2, 1]), ((12, 3, 7), [1, 2, 0])]
)
def test_layers_are_in_the_order_of_their_numbers(numbers: tuple[int, int, int], order: list[int]) -> None:
    layers = read_spec(read(with_numbers_of_layers(numbers))).layers
    assert [layer.name for layer in layers] == [f"attention.{index}" for index in order]
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert [layer.number for layer in layers] == sorted(numbers)
