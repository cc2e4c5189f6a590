"""Graphs that would answer wrong once static, because of what they do around the attention ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_edits import Edit, attention, inside_an_if, unchanged, with_numbers_of_layers
from tiny_model import TinyModel, build

from npusim import ModelError
from npusim.model_spec import read_spec

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


def with_bias_from_the_mask(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2]), "axes"))
    bias = [
        helper.make_node("Cast", ["attention_mask"], ["float_mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["float_mask", "axes"], ["bias"]),
    ]
    attention(model)[1].input[10] = "bias"
    for node in reversed(bias):
        model.graph.node.insert(0, node)


def with_length_of_the_mask(model: ModelProto) -> None:
    """seqlens_k as some exporters have it: the length of the mask less one."""
    minus = next(node for node in model.graph.node if list(node.output) == ["last"])
    minus.input[0] = "mask_length"
    before = next(node for node in model.graph.node if list(node.output) == ["mask_length"])
    model.graph.node.remove(before)
    model.graph.node.insert(list(model.graph.node).index(minus), before)
    shape = next(node for node in model.graph.node if list(node.output) == ["mask_shape"])
    model.graph.node.remove(shape)
    model.graph.node.insert(0, shape)


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
    "bias from the mask": (
        with_bias_from_the_mask,
        "attention.1: its attention_bias is computed from attention_mask, whose entries are slots",
    ),
    "length of the mask": (
        with_length_of_the_mask,
        r"seqlens_k of attention\.\d is computed from the length of attention_mask, which .* counts slots",
    ),
    "inside an If": (
        inside_an_if,
        r"attention.1: this GroupQueryAttention is inside the body of .* \(If\); .* without control flow",
    ),
}


def read(edit: Edit, model: TinyModel = MODEL) -> ov.Model:
    proto = onnx.load_model_from_string(build(model))
    edit(proto)
    return ov.Core().read_model(proto.SerializeToString())


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_that_would_be_wrong_when_static(name: str) -> None:
    edit, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        read_spec(read(edit))


def test_what_they_would_be_without_is_read() -> None:
    assert len(read_spec(read(unchanged)).layers) == 3


def with_position_table(offset: int | None) -> Edit:
    """Learned position embeddings of 23 rows, looked up by position_ids, or by position_ids + offset."""

    def edit(model: ModelProto) -> None:
        constants = {"table": np.zeros((23, 20), np.float32), "offset": np.array(offset or 0)}
        model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in constants.items())
        embed = model.graph.node[0]
        embed.output[0] = "embedded"
        nodes = [
            helper.make_node("Add", ["position_ids", "offset"], ["moved"]),
            helper.make_node("Cast", ["position_ids" if offset is None else "moved"], ["rows"], to=6),
            helper.make_node("Gather", ["table", "rows"], ["position"]),
            helper.make_node("Add", ["embedded", "position"], ["hidden.0"]),
        ]
        for place, node in enumerate(nodes[offset is None :]):
            model.graph.node.insert(place + 1, node)

    return edit


@pytest.mark.parametrize(("offset", "positions"), [(None, 23), (2, 21)])
def test_tables_outside_the_ops_limit_the_positions(offset: int | None, positions: int) -> None:
    """The rotary tables have 40 rows."""
    model = replace(MODEL, position_ids=True)
    assert read_spec(read(with_position_table(offset), model)).max_positions == positions
    assert read_spec(read(unchanged, model)).max_positions == 40


@pytest.mark.parametrize(
    ("numbers", "order"), [((0, 1, 2), [0, 1, 2]), ((0, 2, 1), [0, 2, 1]), ((12, 3, 7), [1, 2, 0])]
)
def test_layers_are_in_the_order_of_their_numbers(numbers: tuple[int, int, int], order: list[int]) -> None:
    layers = read_spec(read(with_numbers_of_layers(numbers))).layers
    assert [layer.name for layer in layers] == [f"attention.{index}" for index in order]
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert [layer.number for layer in layers] == sorted(numbers)
