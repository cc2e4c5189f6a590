"""Tables that ids and positions look up bound them, and nothing else may look one up."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto
from onnx_edits import Edit, attention, edited, insert, make, unchanged, with_hidden
from tiny_model import HIDDEN_SIZE, VOCAB_SIZE, TinyModel, build

from npusim import ModelError
from npusim.model_spec import ModelSpec, read_spec

ROWS = 23
TABLE = np.zeros((ROWS, HIDDEN_SIZE), np.float32)
UNKNOWN = "so how far it reaches is unknown; look up input_ids or position_ids themselves"


def read(edit: Edit) -> ModelSpec:
    """The rotary tables have 40 rows, the embedding has 17."""
    return read_spec(edited(build(TinyModel(windows=(-1, 5), position_ids=True)), edit))


def with_positions(*nodes: NodeProto, table: str = "table") -> Edit:
    """Learned embeddings of 23 positions, looked up by "rows"."""
    constants = {"table": TABLE, "two": [2], "zero": [0], "axis_1": 1, "zero_0": 0, "one_0": 1}
    look_up = make("Gather", f"{table} rows", "learned")
    return with_hidden(*nodes, look_up, make("Add", "embedded learned", "hidden.0"), **constants)


def with_rows_of_the_embedding(*nodes: NodeProto, rows: int = 15, axis: int = 0) -> Edit:
    """A second embedding, looked up by "ids"."""
    table = TABLE[:rows] if axis == 0 else TABLE[:rows].T.copy()
    turn = make("Transpose", "found", "second", perm=[0, 1, 2] if axis == 0 else [1, 2, 0])
    look_up = make("Gather", "table ids", "found", axis=axis)
    end = make("Add", "embedded second", "hidden.0")
    return with_hidden(*nodes, look_up, turn, end, table=table, zero=[0], shape=[1, -1])


def with_positions_of_the_op(*nodes: NodeProto) -> Edit:
    def edit(model: ModelProto) -> None:
        insert(model, 0, nodes, two=[2])
        attention(model)[1].input[9] = "turned"

    return edit


def with_bias_of(columns: int) -> Edit:
    """A bias [1, 1, S, columns] by position."""

    def edit(model: ModelProto) -> None:
        nodes = [make("Gather", "slopes position_ids", "found"), make("Unsqueeze", "found second", "bias")]
        insert(model, 0, nodes, slopes=np.zeros((64, columns), np.float32), second=[1])
        attention(model)[0].input[10] = "bias"

    return edit


CAST = make("Cast", "position_ids", "rows", to=TensorProto.INT32)
POSITIONS: dict[str, tuple[Edit, int]] = {
    "no table": (unchanged, 40),
    "themselves": (with_positions(CAST), 23),
    "a copy": (with_positions(make("Identity", "position_ids", "rows")), 23),
    "plus 2": (with_positions(make("Add", "position_ids two", "rows")), 21),
    "minus 2": (with_positions(make("Sub", "position_ids two", "rows")), 25),
    "in the op, plus 2": (with_positions_of_the_op(make("Add", "position_ids two", "turned")), 38),
    "columns of a bias": (with_bias_of(19), 19),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_tables_limit_the_positions(name: str) -> None:
    edit, positions = POSITIONS[name]
    assert read(edit).max_positions == positions


TOTAL = [
    make("ReduceSum", "attention_mask", "total_tokens", keepdims=0),
    make("Shape", "input_ids", "ids_shape"),
    make("Gather", "ids_shape axis_1", "length"),
    make("Range", "zero_0 length one_0", "range"),
    make("Add", "range total_tokens", "rows_1"),
    make("Unsqueeze", "rows_1 zero", "rows"),
]
REFUSED: dict[str, tuple[Edit, str]] = {
    "the larger of two": (
        with_positions(make("Max", "position_ids zero", "rows")),
        rf"learned \(Gather\) .* what rows \(Maximum\) makes of position_ids, {UNKNOWN}",
    ),
    "a product in float": (
        with_positions(
            make("Cast", "position_ids", "numbers", to=TensorProto.FLOAT),
            make("Sqrt", "numbers", "root"),
            make("Cast", "root", "rows", to=TensorProto.INT64),
        ),
        rf"learned \(Gather\) .* makes of position_ids, {UNKNOWN}",
    ),
    "the sum of the mask": (
        with_positions(*TOTAL),
        rf"learned \(Gather\) .* what rows_1 \(Add\) makes of the sum of attention_mask, {UNKNOWN}",
    ),
    "a narrow type": (
        with_positions(make("Cast", "position_ids", "rows", to=TensorProto.INT8)),
        rf"learned \(Gather\) .* what rows \(Convert\) makes of position_ids, {UNKNOWN}",
    ),
    "a product in the op": (
        with_positions_of_the_op(make("Mul", "position_ids two", "turned")),
        r"attention.1: its rotary position_ids are computed by turned \(Multiply\)",
    ),
    "larger ids": (
        with_rows_of_the_embedding(make("Max", "input_ids zero", "ids")),
        rf"found \(Gather\) .* what ids \(Maximum\) makes of input_ids, {UNKNOWN}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tables_that_something_else_looks_up(name: str) -> None:
    edit, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        read(edit)


COPIES = {"Identity": "input_ids", "Reshape": "input_ids shape", "Add": "input_ids zero"}


@pytest.mark.parametrize("op", COPIES)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_shortest_table_limits_the_ids(op: str, axis: int) -> None:
    copy = make(op, COPIES[op], "ids")
    assert read(with_rows_of_the_embedding(copy, axis=axis)).num_embeddings == 15
    assert read(with_rows_of_the_embedding(copy, rows=ROWS, axis=axis)).num_embeddings == VOCAB_SIZE


def with_one_hot(model: ModelProto) -> None:
    nodes = [make("OneHot", "input_ids depth values", "hot"), make("MatMul", "hot embedding", "hidden.0")]
    del model.graph.node[0]
    insert(model, 0, nodes, depth=VOCAB_SIZE, values=np.array([0, 1], np.float32))


def test_ids_that_look_no_table_up() -> None:
    with pytest.raises(ModelError, match=r"input_ids look up no table of embeddings \(Gather\), so how many"):
        read(with_one_hot)


def test_computed_rotary_positions_are_free() -> None:
    """Angles outside of the op, of any position; and experts that are chosen by what becomes of them."""
    nodes = [
        make("Cast", "position_ids", "numbers", to=TensorProto.FLOAT),
        make("Unsqueeze", "numbers last_axis", "column"),
        make("MatMul", "column frequencies", "angles"),
        make("Cos", "angles", "turned"),
        make("ArgMax", "turned", "chosen", axis=-1, keepdims=0),
        make("Gather", "experts chosen", "added"),
        make("Add", "embedded added", "hidden.0"),
    ]
    edit = with_hidden(
        *nodes, last_axis=[2], frequencies=np.ones((1, HIDDEN_SIZE), np.float32), experts=TABLE
    )
    assert read(edit).max_positions == 40
