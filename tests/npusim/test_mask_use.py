"""attention_mask has an entry per slot in a static graph: its sum alone still counts the tokens."""

from __future__ import annotations

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx_edits import Edit, attention, edited, insert, make, with_hidden
from tiny_model import TinyModel, build

from npusim import ModelError
from npusim.model_spec import read_spec

ENTRIES = "is computed from the entries of attention_mask, which are slots in a static graph"
LENGTH = "is computed from the length of attention_mask, which in a static graph counts slots, not tokens"


def with_bias_from_the_mask(model: ModelProto) -> None:
    nodes = [
        make("Cast", "attention_mask", "numbers", to=TensorProto.FLOAT),
        make("Unsqueeze", "numbers axes", "bias"),
    ]
    insert(model, 0, nodes, axes=[1, 2])
    attention(model)[1].input[10] = "bias"


def with_length_of(source: str, *nodes: NodeProto) -> Edit:
    """seqlens_k as some exporters have it: a length less one."""

    def edit(model: ModelProto) -> None:
        shape = [make("Shape", source, "shape"), make("Gather", "shape second", "length")]
        insert(model, 0, [*nodes, *shape], second=[1], ones=[1])
        next(node for node in model.graph.node if list(node.output) == ["last"]).input[0] = "length"

    return edit


def with_factor(*nodes: NodeProto) -> Edit:
    """The embedding times what nodes make of the mask in float32, "numbers"."""
    cast = make("Cast", "attention_mask", "numbers", to=TensorProto.FLOAT)
    return with_hidden(cast, *nodes, make("Mul", "embedded factor", "hidden.0"), first=[0], last_axis=1)


def with_mask_as_output(model: ModelProto) -> None:
    model.graph.node.append(make("Identity", "attention_mask", "mask"))
    model.graph.output.append(helper.make_tensor_value_info("mask", TensorProto.INT64, ["a", "b"]))


REFUSED: dict[str, tuple[Edit, str]] = {
    "a bias": (with_bias_from_the_mask, f"attention_bias of attention.1 {ENTRIES}"),
    "length": (with_length_of("attention_mask"), rf"seqlens_k of attention\.\d {LENGTH}"),
    "length of a copy": (
        with_length_of("copy", make("Identity", "attention_mask", "copy")),
        rf"seqlens_k of attention\.\d {LENGTH}",
    ),
    "length of a product": (
        with_length_of("copy", make("Mul", "attention_mask ones", "copy")),
        rf"copy \(Multiply\) {ENTRIES}",
    ),
    "a mean": (with_factor(make("ReduceMean", "numbers", "factor")), rf"factor \(ReduceMean\) {ENTRIES}"),
    "running sums": (
        with_factor(make("CumSum", "numbers last_axis", "sums"), make("ReduceMax", "sums", "factor")),
        rf"sums \(CumSum\) {ENTRIES}",
    ),
    "a sum over the batch": (
        with_factor(make("ReduceSum", "numbers first", "sums"), make("ReduceMax", "sums", "factor")),
        rf"sums \(ReduceSum\) {ENTRIES}",
    ),
    "an entry": (
        with_factor(make("Gather", "numbers first", "factor", axis=1)),
        rf"factor \(Gather\) {ENTRIES}",
    ),
    "an output": (with_mask_as_output, f"the model output mask {ENTRIES}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_uses_of_the_mask_that_would_count_slots(name: str) -> None:
    edit, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        read_spec(edited(build(TinyModel(windows=(-1, 5))), edit))


def with_largest_position(model: ModelProto) -> None:
    insert(model, 0, [make("ReduceMax", "position_ids", "largest", axes=[1], keepdims=0)])
    next(node for node in model.graph.node if list(node.output) == ["seqlens_k"]).input[0] = "largest"


@pytest.mark.parametrize(
    ("edit", "source"),
    [(with_length_of("input_ids"), "input_ids"), (with_largest_position, "position_ids")],
)
def test_seqlens_k_comes_from_the_mask_alone(edit: Edit, source: str) -> None:
    model = TinyModel(windows=(-1, 5), position_ids=True)
    with pytest.raises(ModelError, match=rf"attention\.0: its seqlens_k is computed from {source}, which"):
        read_spec(edited(build(model), edit))


def test_the_sum_is_free() -> None:
    edit = with_factor(
        make("Unsqueeze", "numbers first", "wide"), make("ReduceSum", "wide", "factor", keepdims=0)
    )
    assert len(read_spec(edited(build(TinyModel(windows=(-1, 5))), edit)).layers) == 2
