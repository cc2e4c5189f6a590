"""The built single-op models as OpenVINO reads them."""

from __future__ import annotations

import gqa_models
import openvino as ov
import pytest
from gqa_models import GQA, Bias, Quantized, RotaryTable, TokenCount


def read(model: bytes) -> ov.Model:
    return ov.Core().read_model(model)


def gqa_nodes(model: ov.Model) -> list[ov.Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "GroupQueryAttention"]


def input_shapes(node: ov.Node) -> list[str]:
    return [str(port.get_partial_shape()) for port in node.inputs()]


def test_every_input_and_attribute_arrives() -> None:
    gqa = GQA(
        num_heads=6,
        sequence_length=3,
        capacity=5,
        local_window_size=4,
        scale=0.375,
        rotary=RotaryTable(channels=12, positions=20, interleaved=True),
        position_ids=True,
        bias=Bias.PER_HEAD,
        bias_length=9,
        head_sink=(0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
        smooth_softmax=True,
        sliding_window_cache=True,
    )
    model = read(gqa_models.build(gqa))
    (node,) = gqa_nodes(model)
    assert input_shapes(node)[:12] == [
        "[1,6,3,16]",
        "[1,2,3,16]",
        "[1,2,3,16]",
        "[1,2,5,16]",
        "[1,2,5,16]",
        "[1]",
        "[]",
        "[20,6]",
        "[20,6]",
        "[1,3]",
        "[1,6,3,9]",
        "[6]",
    ]
    attributes = node.get_attributes()
    expected = {
        "num_heads": 6,
        "kv_num_heads": 2,
        "scale": 0.375,
        "local_window_size": 4,
        "do_rotary": True,
        "rotary_interleaved": True,
        "causal": True,
        "smooth_softmax": True,
        "sliding_window_cache": True,
    }
    assert {name: attributes[name] for name in expected} == expected
    assert [port.get_any_name() for port in model.outputs] == ["attention", "present_key", "present_value"]


def test_defaults_are_left_to_the_op() -> None:
    (node,) = gqa_nodes(read(gqa_models.build(GQA(sequence_length=3, capacity=0))))
    assert input_shapes(node)[3:] == ["[1,2,0,16]", "[1,2,0,16]", "[1]", "[]"] + ["[0]"] * 9
    attributes = node.get_attributes()
    names = ("scale", "local_window_size", "do_rotary", "causal", "smooth_softmax", "sliding_window_cache")
    assert [attributes[name] for name in names] == [0.0, -1, False, True, False, False]


@pytest.mark.parametrize(("int64", "kind"), [(False, ov.Type.i32), (True, ov.Type.i64)])
def test_a_token_count_survives_as_input_and_output(int64: bool, kind: ov.Type) -> None:
    gqa = GQA(sequence_length=3, capacity=5, causal=False, float16=True)
    model = read(gqa_models.build(gqa, num_tokens=TokenCount(int64=int64)))
    port = model.input("num_tokens")
    assert (port.get_element_type(), str(port.get_partial_shape())) == (kind, "[]")
    passed_on = model.output("num_tokens_out").get_node().input_value(0).get_node()
    assert passed_on.get_type_name() == "Identity"
    assert passed_on.input_value(0).get_node() == port.get_node()
    assert model.input("query").get_element_type() == ov.Type.f16
    assert gqa_nodes(model)[0].get_attributes()["causal"] is False


def test_a_symbolic_head_size_is_open_in_the_cache_alone() -> None:
    gqa = GQA(sequence_length=3, capacity=5, symbolic_head_size=True)
    (node,) = gqa_nodes(read(gqa_models.build(gqa)))
    assert input_shapes(node)[:5] == ["[1,4,3,16]", "[1,2,3,16]", "[1,2,3,16]", "[1,2,5,?]", "[1,2,5,?]"]


@pytest.mark.parametrize(
    ("quantized", "past", "scale", "kind"),
    [
        (Quantized(), "[1,2,5,16]", "[1]", ov.Type.i8),
        (Quantized(kind="PER_CHANNEL"), "[1,2,5,16]", "[1,2,1,16]", ov.Type.i8),
        (Quantized(bits=4), "[1,2,5,8]", "[1]", ov.Type.u8),
    ],
)
def test_a_quantized_cache(quantized: Quantized, past: str, scale: str, kind: ov.Type) -> None:
    gqa = GQA(sequence_length=3, capacity=5, quantized=quantized)
    (node,) = gqa_nodes(read(gqa_models.build(gqa)))
    assert input_shapes(node)[3] == past
    assert input_shapes(node)[12:14] == [scale, scale]
    assert node.input_value(3).get_element_type() == kind


def test_layers_share_the_lengths_and_nothing_else() -> None:
    layers = [GQA(sequence_length=3, capacity=5, local_window_size=w, rotary=RotaryTable()) for w in (4, -1)]
    model = read(gqa_models.build_layers(layers))
    nodes = gqa_nodes(model)
    assert sorted(node.get_attributes()["local_window_size"] for node in nodes) == [-1, 4]
    assert nodes[0].input_value(5).get_node() == nodes[1].input_value(5).get_node()
    assert [port.get_any_name() for port in model.outputs][:2] == [
        "layers.0.attention",
        "layers.0.present_key",
    ]
    assert "layers.1.query" in [port.get_any_name() for port in model.inputs]
