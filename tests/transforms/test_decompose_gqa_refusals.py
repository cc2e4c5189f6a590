"""What cannot be lowered exactly is refused by name, and the model is then what it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import gqa_models
import numpy as np
import onnx
import openvino as ov
import openvino.opset13 as ops
import pytest
import tiny_model
from gqa_models import GQA, Bias, RotaryTable
from lowered_op import core, read_layers
from onnx import TensorProto
from onnx.helper import make_tensor_value_info
from onnx_edits import inside_an_if
from openvino.passes import Manager
from tiny_model import TinyModel

from transforms import (
    BlockTokens,
    Branch,
    DecomposeGQA,
    DecompositionError,
    KeyLayout,
    find_gqa,
    tokens_in_attention_mask,
)

STATIC = GQA(sequence_length=3, capacity=5)
WINDOWED = replace(STATIC, local_window_size=4)


def description(model: ov.Model) -> list[tuple[object, ...]]:
    """Everything a caller can see of a model's graph."""
    return [
        (
            node.get_type_name(),
            node.get_friendly_name(),
            str(node.get_attributes()),
            [port.get_source_output().get_node().get_friendly_name() for port in node.inputs()],
            [(sorted(port.get_names()), str(port.get_partial_shape())) for port in node.outputs()],
        )
        for node in model.get_ordered_ops()
    ]


def refuse(
    model: ov.Model,
    message: str,
    branch: Branch = Branch.GENERATE,
    key_layout: KeyLayout | Mapping[str, KeyLayout] = KeyLayout.LINEAR,
    block_tokens: BlockTokens | None = None,
) -> None:
    decompose = DecomposeGQA(branch, key_layout=key_layout, block_tokens=block_tokens)
    before = description(model)
    with pytest.raises(DecompositionError, match=message):
        decompose.run_on_model(model)
    assert decompose.lowered == 0
    assert description(model) == before


def changed(gqa: GQA, **attributes: object) -> ov.Model:
    """A model whose op says what no ONNX file may: the frontend would refuse it."""
    model = read_layers([gqa])
    for name, value in attributes.items():
        find_gqa(model)[0].set_attribute(name, value)
    return model


@pytest.mark.parametrize("branch", Branch)
@pytest.mark.parametrize(
    ("gqa", "attributes", "message"),
    [
        (STATIC, {"local_window_size": 0}, "attention: local_window_size=0"),
        (STATIC, {"local_window_size": -3}, "attention: local_window_size=-3"),
        (STATIC, {"local_window_size": 2**31}, "local_window_size=2147483648; .* so 2147483647 is the most"),
        (WINDOWED, {"causal": False}, "attention: local_window_size=4 with causal=0"),
        (replace(STATIC, num_heads=5), {}, "attention: num_heads=5, kv_num_heads=2"),
        (STATIC, {"num_heads": 8}, "query has 4 heads, the attributes say 8"),
        (STATIC, {"num_heads": 0}, "num_heads=0"),
        (STATIC, {"scale": float("inf")}, "attention: scale=inf; a finite number"),
        (replace(STATIC, head_sink=(1.0, -math.inf, 0.0, 2.0)), {}, "attention: head_sink contains -inf"),
        (STATIC, {"do_rotary": True}, "do_rotary=1 without cos_cache and sin_cache"),
        (
            replace(STATIC, bias=Bias.SHARED),
            {},
            r"attention_bias has shape \[1,1,3,\?\]",
        ),
    ],
)
def test_an_op_that_cannot_be_lowered(
    gqa: GQA, attributes: dict[str, object], message: str, branch: Branch
) -> None:
    refuse(changed(gqa, **attributes), message, branch)


@pytest.mark.parametrize(
    ("gqa", "message"),
    [
        (replace(STATIC, sequence_length=None), r"query \[1,4,\?,16\] has a dynamic length"),
        (replace(STATIC, capacity=None), r"past_key \[1,2,\?,16\] has a dynamic length"),
        (replace(STATIC, batch=None), r"(query|batch) .*\[\?,"),
    ],
)
def test_a_dynamic_shape(gqa: GQA, message: str) -> None:
    refuse(read_layers([gqa]), message)


ROTARY = replace(STATIC, rotary=RotaryTable(as_inputs=True), position_ids=True)
BIASED = replace(STATIC, bias=Bias.PER_HEAD, bias_length=9)


def with_port(gqa: GQA, name: str, shape: list[int], kind: int | None = None) -> ov.Model:
    """The model with another shape, or type, of one input."""
    model = onnx.load_from_string(gqa_models.build(gqa))
    port = next(port for port in model.graph.input if port.name == name)
    port.CopyFrom(make_tensor_value_info(name, kind or port.type.tensor_type.elem_type, shape))
    return core().read_model(model.SerializeToString())


@pytest.mark.parametrize(
    ("gqa", "port", "message"),
    [
        (BIASED, ("attention_bias", [1, 2, 3, 9]), r"attention_bias has shape \[1,2,3,9\]"),
        (BIASED, ("attention_bias", [1, 4, 2, 9]), "attention_bias has 2 rows, the block has 3"),
        (BIASED, ("attention_bias", [2, 4, 3, 9]), r"attention_bias has shape \[2,4,3,9\]"),
        (BIASED, ("attention_bias", [1, 4, 3, 9], TensorProto.FLOAT16), "attention_bias"),
        (BIASED, ("attention_bias", [1, 4, 3, 2]), "attention_bias"),
        (ROTARY, ("position_ids", [1, 2]), "position_ids"),
        (ROTARY, ("cos_cache", [64, 6]), "cos_cache"),
        (ROTARY, ("sin_cache", [32, 8]), "sin_cache"),
        (ROTARY, ("cos_cache", [64, 8], TensorProto.FLOAT16), "cos_cache"),
        (STATIC, ("past_key", [1, 4, 5, 16]), r"past_key has shape \[1,4,5,16\]"),
        (STATIC, ("past_value", [1, 2, 6, 16]), r"past_value has shape \[1,2,6,16\]"),
        (STATIC, ("past_key", [1, 2, 5, 8]), r"past_key has shape \[1,2,5,8\]"),
        (STATIC, ("seqlens_k", [2]), "seqlens_k"),
    ],
)
def test_an_input_that_does_not_fit(gqa: GQA, port: tuple[str, list[int]], message: str) -> None:
    refuse(with_port(gqa, *port), f"attention: .*{message}")


def test_a_sink_of_another_number_of_heads() -> None:
    refuse(read_layers([replace(STATIC, head_sink=(1.0, 2.0, 3.0))]), "attention: .*head_sink")


def batched(sizes: dict[str, int]) -> ov.Model:
    """The batch is open in the file and given here, port by port; other ports stay open."""
    model = read_layers([replace(STATIC, batch=None)])
    shapes = {
        port.get_any_name(): ov.PartialShape(
            [sizes[port.get_any_name()], *list(port.get_partial_shape())[1:]]
        )
        for port in model.inputs
        if port.get_any_name() in sizes
    }
    model.reshape(shapes)
    return model


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"past_key": 2, "past_value": 2}, r"\[(2|\?),"),
        ({"query": 1, "past_key": 2, "past_value": 2}, r"\[(2|\?),"),
        ({"past_key": 1, "past_value": 1}, r"query .*\[\?,"),
    ],
)
def test_a_batch_other_than_one(sizes: dict[str, int], message: str) -> None:
    refuse(batched(sizes), message)


@pytest.mark.parametrize(
    ("gqa", "layout", "branch", "message"),
    [
        (STATIC, KeyLayout.RING, Branch.GENERATE, "RING needs a window, local_window_size=-1"),
        (STATIC, KeyLayout.GATHERED, Branch.GENERATE, "GATHERED needs a window"),
        (WINDOWED, KeyLayout.ROLLING, Branch.PREFILL, "ROLLING with Branch.PREFILL"),
        (
            replace(WINDOWED, capacity=3),
            KeyLayout.ROLLING,
            Branch.GENERATE,
            "a ROLLING past of 3 slots cannot hold local_window_size=4; at least 4",
        ),
        (
            replace(WINDOWED, capacity=2),
            KeyLayout.RING,
            Branch.GENERATE,
            "a RING past of 2 slots cannot hold local_window_size=4; at least 3",
        ),
    ],
)
def test_a_layout_that_cannot_hold(gqa: GQA, layout: KeyLayout, branch: Branch, message: str) -> None:
    refuse(read_layers([gqa]), message, branch, layout)


def test_a_layout_for_a_node_that_is_not_there() -> None:
    refuse(read_layers([WINDOWED]), "key_layout names .*nobody", key_layout={"nobody": KeyLayout.RING})


def test_one_bad_node_keeps_its_neighbours_from_being_lowered() -> None:
    model = read_layers([WINDOWED, STATIC, WINDOWED])
    bad = next(node for node in find_gqa(model) if node.get_attributes()["local_window_size"] == -1)
    bad.set_attribute("local_window_size", 0)
    refuse(model, "layers.1.attention: local_window_size=0")
    bad.set_attribute("local_window_size", -1)
    decompose = DecomposeGQA(Branch.GENERATE)
    assert decompose.run_on_model(model)
    assert decompose.lowered == 3


def test_an_op_inside_control_flow() -> None:
    model = onnx.load_from_string(tiny_model.build(TinyModel(windows=(-1, 5))))
    inside_an_if(model)
    refuse(core().read_model(model.SerializeToString()), r"attention.1: .* inside the body of .* \(If\)")


def failing_count(_model: ov.Model) -> ov.Output:
    raise DecompositionError("no count in this model")


def constant(value: object) -> BlockTokens:
    return lambda _model: ops.constant(value).output(0)


@pytest.mark.parametrize(
    ("block_tokens", "message"),
    [
        (failing_count, "no count in this model"),
        (tokens_in_attention_mask, "no input input_ids to count .*; give block_tokens of your own"),
        (constant(np.array([2, 3])), r"block_tokens gave i64 of shape \[2\]; one integer"),
        (constant(np.array(2.0)), "block_tokens gave f64 of shape .*; one integer"),
        (lambda _model: None, "block_tokens gave None; an output of one integer"),
        (lambda model: model.input("query"), "block_tokens gave f32 of shape"),
    ],
)
def test_a_token_count_that_is_none(block_tokens: BlockTokens, message: str) -> None:
    """The head size of the cache is symbolic: a refusal leaves it so."""
    gqa = replace(WINDOWED, symbolic_head_size=True)
    refuse(read_layers([gqa]), message, block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"branch": "prefill"}, "branch='prefill'; a member of Branch"),
        ({"branch": Branch.GENERATE, "key_layout": "RING"}, "key_layout='RING'; members of KeyLayout"),
        ({"branch": Branch.GENERATE, "key_layout": {"attention": None}}, "members of KeyLayout are needed"),
        ({"branch": Branch.GENERATE, "block_tokens": 3}, "block_tokens=3; a function from the model"),
    ],
)
def test_arguments_that_are_none(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DecomposeGQA(**arguments)


def test_the_error_keeps_its_type_through_a_manager() -> None:
    manager = Manager()
    manager.register_pass(DecomposeGQA(Branch.GENERATE))
    with pytest.raises(DecompositionError, match="has a dynamic length"):
        manager.run_passes(read_layers([replace(STATIC, capacity=None)]))


FRONTEND: dict[str, tuple[GQA, str]] = {
    "softcap": (replace(STATIC, softcap=2.0), "softcap is not supported"),
    "window 0": (replace(STATIC, local_window_size=0), "must be -1 .* or >= 1, got 0"),
    "batch 2": (replace(STATIC, batch=2), "only supported for batch_size == 1"),
    "wide rotary tables": (replace(STATIC, rotary=RotaryTable(channels=18)), "cos_cache"),
    "window without causality": (replace(WINDOWED, causal=False), "local_window_size requires causal=1"),
}


@pytest.mark.parametrize("name", FRONTEND)
def test_what_openvino_refuses_before_any_pass_can(name: str) -> None:
    gqa, message = FRONTEND[name]
    with pytest.raises(RuntimeError, match=message):
        read_layers([gqa])
