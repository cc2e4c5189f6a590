"""Outside of attention a row comes from its own token: padding and chunks would change what mixes rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto
from onnx_edits import Edit, edited, insert, make, with_hidden
from tiny_model import HIDDEN_SIZE, TinyModel, build

from npusim import ModelError
from npusim.check import check_model
from npusim.model_spec import read_spec

CONSTANTS = {
    "axis_0": [0],
    "axis_1": [1],
    "axis_2": [2],
    "axis_of_sums": 1,
    "last": [-1],
    "first": [-(2**62)],
    "ten": [10],
    "end": [2**31 - 1],
    "halves": [10, 10],
    "zero": np.float32(0),
    "step": np.float32(0.02),
    "origin": np.int8(0),
    "best": [2],
    "down": [0, 1, 0, 0, -1, 0],
    "heads": [1, -1, 4, 5],
    "merged": [1, -1, HIDDEN_SIZE],
    "flat": [-1, HIDDEN_SIZE],
    "square": np.ones((HIDDEN_SIZE, HIDDEN_SIZE), np.float32),
    "router": np.ones((HIDDEN_SIZE, 3), np.float32),
    "scale": np.ones(HIDDEN_SIZE, np.float32),
    "head_scale": np.ones(5, np.float32),
    "kernel": np.ones((HIDDEN_SIZE, 1, 3), np.float32),
}


def hidden(*nodes: NodeProto) -> Edit:
    return with_hidden(*nodes, **CONSTANTS)


def check(edit: Edit) -> None:
    model = TinyModel(windows=(-1, 5), position_ids=True)
    assert len(read_spec(edited(build(model), edit)).layers) == 2


TURNED = make("Transpose", "embedded", "turned", perm=[0, 2, 1])
SCORES = [TURNED, make("MatMul", "embedded turned", "scores")]
MIXES: dict[str, tuple[list[NodeProto], str]] = {
    "mean": (
        [make("ReduceMean", "embedded", "m", axes=[1]), make("Add", "embedded m", "hidden.0")],
        "m.*ReduceMean",
    ),
    "quantization of all": (
        [
            make("DynamicQuantizeLinear", "embedded", "codes own_scale own_zero"),
            make("DequantizeLinear", "codes own_scale own_zero", "hidden.0"),
        ],
        r"Reduce(Min|Max)\)",
    ),
    "running sum": ([make("CumSum", "embedded axis_of_sums", "hidden.0")], r"hidden.0 \(CumSum\)"),
    "softmax": ([make("Softmax", "embedded", "hidden.0", axis=1)], r"hidden.0 \(Softmax\)"),
    "convolution": (
        [
            TURNED,
            make("Conv", "turned kernel", "made", group=HIDDEN_SIZE, pads=[2, 0]),
            make("Transpose", "made", "hidden.0", perm=[0, 2, 1]),
        ],
        r"GroupConvolution",
    ),
    "shift": ([make("Pad", "embedded down", "hidden.0")], r"hidden.0 \(Pad\)"),
    "reversal": (
        [make("Slice", "embedded last first axis_1 last", "back"), make("Add", "embedded back", "hidden.0")],
        r"back \(Slice\)",
    ),
    "last row": (
        [make("Gather", "embedded last", "row", axis=1), make("Add", "embedded row", "hidden.0")],
        r"row \(Gather\)",
    ),
    "sorted": ([make("TopK", "embedded best", "hidden.0 places", axis=1)], r"\(TopK\)"),
    "attention of its own": (
        [*SCORES, make("Softmax", "scores", "shares"), make("MatMul", "shares embedded", "hidden.0")],
        r"scores \(MatMul\)",
    ),
    "sums of products": (
        [TURNED, make("MatMul", "turned embedded", "sums"), make("MatMul", "embedded sums", "hidden.0")],
        r"sums \(MatMul\)",
    ),
    "sums of all rows before": (
        [
            make("Cast", "position_ids", "numbers", to=TensorProto.FLOAT),
            make("Shape", "numbers", "shape"),
            make("Slice", "shape axis_1 end", "rows"),
            make("Concat", "axis_1 rows rows", "square_shape", axis=0),
            make("ConstantOfShape", "square_shape", "ones_of_tokens"),
            make("MatMul", "ones_of_tokens embedded", "hidden.0"),
        ],
        r"hidden.0 \(MatMul\)",
    ),
    "pairs": (
        [
            make("ReduceMax", "embedded", "column", axes=[2]),
            make("Transpose", "column", "line", perm=[0, 2, 1]),
            make("Sub", "column line", "pairs"),
            make("ReduceMax", "pairs", "most", axes=[2]),
            make("Add", "embedded most", "hidden.0"),
        ],
        r"pairs \(Subtract\)",
    ),
    "positions": (
        [
            make("ReduceMax", "position_ids", "most", axes=[1]),
            make("Cast", "most", "number", to=TensorProto.FLOAT),
            make("Mul", "embedded number", "hidden.0"),
        ],
        r"most \(ReduceMax\)",
    ),
    "an unknown op": ([make("Einsum", "embedded square", "hidden.0", equation="abc,cd->abd")], r"\(Einsum\)"),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_tokens_is_refused(name: str) -> None:
    nodes, message = MIXES[name]
    with pytest.raises(ModelError, match=message):
        check(hidden(*nodes))


KEEPS: dict[str, list[NodeProto]] = {
    "norm": [make("LayerNormalization", "embedded scale scale", "hidden.0", axis=-1)],
    "norm with an axis from the front": [
        make("LayerNormalization", "embedded scale scale", "hidden.0", axis=2)
    ],
    "norm of a head": [
        make("Reshape", "embedded heads", "split"),
        make("SimplifiedLayerNormalization", "split head_scale", "normed", axis=-1),
        make("Reshape", "normed merged", "hidden.0"),
    ],
    "length 1": [make("LpNormalization", "embedded", "hidden.0", axis=-1)],
    "gelu": [make("Gelu", "embedded", "hidden.0")],
    "halves turned": [
        make("Split", "embedded halves", "low high", axis=2),
        make("Neg", "high", "less"),
        make("Concat", "less low", "hidden.0", axis=-1),
    ],
    "slices turned": [
        make("Slice", "embedded axis_0 ten axis_2", "low"),
        make("Slice", "embedded ten end axis_2", "high"),
        make("Concat", "high low", "hidden.0", axis=-1),
    ],
    "rows of two axes": [
        make("Reshape", "embedded flat", "rows"),
        make("Gemm", "rows square scale", "made"),
        make("Reshape", "made merged", "hidden.0"),
    ],
    "experts": [
        make("MatMul", "embedded router", "gates"),
        make("TopK", "gates best", "top chosen", axis=-1),
        make("Softmax", "top", "shares", axis=-1),
        make("Mul", "gates zero", "none"),
        make("ScatterElements", "none chosen shares", "weights", axis=2),
        make("ReduceSum", "weights axis_2", "sum"),
        make("Mul", "embedded sum", "hidden.0"),
    ],
    "quantization by a constant": [
        make("QuantizeLinear", "embedded step origin", "codes"),
        make("DequantizeLinear", "codes step origin", "hidden.0"),
    ],
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_keeps_tokens_apart_is_read(name: str) -> None:
    check(hidden(*KEEPS[name]))


def test_a_norm_behind_attention_may_count_its_axes_from_the_front() -> None:
    """The frontend makes its axes of the shape of the rows, which attention made."""

    def edit(model: ModelProto) -> None:
        (last,) = (node for node in model.graph.node if "logits" in node.output)
        normed = make("LayerNormalization", f"{last.input[0]} scale scale", "normed", axis=2)
        insert(model, list(model.graph.node).index(last), [normed], **CONSTANTS)
        last.input[0] = "normed"

    check(edit)


def test_check_reports_it(tmp_path: Path) -> None:
    model = onnx.load_model_from_string(build(TinyModel(windows=(-1, 5))))
    hidden(make("CumSum", "embedded axis_of_sums", "hidden.0"))(model)
    onnx.save(model, tmp_path / "edited.onnx")
    (refusal,) = check_model(tmp_path / "edited.onnx").refusals
    assert refusal.startswith("hidden.0 (CumSum), which goes into")
