"""`check_model` on the models of tests/models and on changed copies of them."""

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx_edits import Edit, inside_an_if, with_last_logits_only
from tiny_model import TinyModel, build

from npusim import model_file
from npusim.check import CheckReport, check_model
from npusim.errors import ModelError
from npusim.onnx_attention import Rotary, Sink, read_onnx_attention

TESTS = Path(__file__).parents[1]
MODELS = TESTS / "models"
BUILT_IN = TESTS.parent / "npusim" / "models"


def second_attention(model: ModelProto) -> NodeProto:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"][1]


def edited(edit: Edit) -> bytes:
    """A model of two layers, changed."""
    model = onnx.load_model_from_string(build(TinyModel(windows=(-1, 5))))
    edit(model)
    return model.SerializeToString()


def windows(report: CheckReport) -> list[int]:
    return [checked.layer.local_window_size for checked in report.layers]


def heads(report: CheckReport) -> set[tuple[int, int, int | None]]:
    layers = [checked.layer for checked in report.layers]
    return {(layer.num_heads, layer.kv_num_heads, layer.head_size) for layer in layers}


def changed(tmp_path: Path, name: str, **attributes: int | float | str) -> Path:
    """A copy of a test model with attributes of its second GroupQueryAttention set."""
    model = onnx.load(MODELS / name)
    node = second_attention(model)
    kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    onnx.save(model, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize(
    ("path", "expected_heads", "expected_windows", "sink", "table_length"),
    [
        (MODELS / "llama.onnx", (4, 2, 16), [-1, -1, -1, -1], Sink.NONE, 512),
        (MODELS / "phi3_window8.onnx", (4, 2, 16), [8, 8, 8, 8], Sink.NONE, 512),
        (MODELS / "qwen3.onnx", (4, 2, 16), [-1, -1, -1, -1], Sink.NONE, 512),
        (MODELS / "gemma3_alternating.onnx", (4, 2, 16), [8, 8, -1, 8], Sink.NONE, 512),
        (MODELS / "gptoss_attention.onnx", (4, 2, 16), [8, -1, 8, -1], Sink.HEAD_SINK, 512),
        (BUILT_IN / "swa_target.onnx", (6, 2, 16), [32, -1, 32, -1], Sink.NONE, 1024),
        (BUILT_IN / "swa_draft.onnx", (3, 1, 16), [32, -1], Sink.NONE, 1024),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_layers_of_models_that_run(path, expected_heads, expected_windows, sink, table_length):
    report = check_model(path)
    assert report.runs
    assert not report.refusals
    assert heads(report) == {expected_heads}
    assert windows(report) == expected_windows
    for index, checked in enumerate(report.layers):
        layer = checked.layer
        assert (layer.index, layer.sink, layer.causal, layer.softcap) == (index, sink, True, 0.0)
        assert layer.rotary == Rotary(interleaved=False, rotated_channels=16, table_length=table_length)
        assert not layer.is_partial_rotary
        assert layer.kv_cache_type == "float32"
        assert f"layers.{index}/" in layer.name


def test_the_rolling_flag_is_read_layer_by_layer():
    report = check_model(MODELS / "gemma3_alternating.onnx")
    assert [checked.layer.rolling_cache for checked in report.layers] == [True, True, False, True]


def test_softcap_is_refused_in_every_row_although_openvino_cannot_read_the_file():
    report = check_model(MODELS / "gemma2_softcap.onnx")
    assert not report.runs
    assert windows(report) == [8, -1, 8, -1]
    assert heads(report) == {(4, 2, 16)}
    for checked in report.layers:
        assert checked.refusals == ("softcap=50: only softcap=0 is lowered",)
    assert any("com.microsoft.GroupQueryAttention" in refusal for refusal in report.refusals)


def test_an_op_without_a_rule_refuses_the_model_and_no_layer():
    report = check_model(MODELS / "gptoss_moe.onnx")
    assert not report.runs
    assert report.refusals == ("OpenVINO's ONNX frontend has no rule for com.microsoft.MoE (4 nodes)",)
    assert [checked.refusals for checked in report.layers] == [()] * 4
    assert {checked.layer.sink for checked in report.layers} == {Sink.HEAD_SINK}


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"local_window_size": 0}, "local_window_size=0"),
        ({"local_window_size": 5, "causal": 0}, "local_window_size=5 with causal=0"),
        ({"softcap": 7.5}, "softcap=7.5"),
        ({"num_heads": 5, "kv_num_heads": 2}, "num_heads=5, kv_num_heads=2"),
        ({"smooth_softmax": 5}, "smooth_softmax=5"),
        ({"scale": math.inf}, "scale=inf"),
    ],
)
def test_one_bad_layer_is_named_and_the_others_are_good(tmp_path, attributes, reason):
    report = check_model(changed(tmp_path, "llama.onnx", **attributes))
    assert not report.runs
    refusals = [checked.refusals for checked in report.layers]
    assert [len(reasons) for reasons in refusals] == [0, 1, 0, 0]
    assert refusals[1][0].startswith(reason)


def test_smooth_softmax_and_interleaved_rotary_are_read(tmp_path):
    report = check_model(changed(tmp_path, "llama.onnx", smooth_softmax=1, rotary_interleaved=1))
    assert report.runs
    assert [checked.layer.sink for checked in report.layers] == [
        Sink.NONE,
        Sink.SMOOTH_SOFTMAX,
        Sink.NONE,
        Sink.NONE,
    ]
    rotary = report.layers[1].layer.rotary
    assert rotary is not None
    assert rotary.interleaved


def test_head_sink_wins_over_the_flag(tmp_path):
    report = check_model(changed(tmp_path, "gptoss_attention.onnx", smooth_softmax=1))
    assert {checked.layer.sink for checked in report.layers} == {Sink.HEAD_SINK}


def test_a_layer_without_rotary_has_none(tmp_path):
    report = check_model(changed(tmp_path, "llama.onnx", do_rotary=0))
    assert [checked.layer.rotary is None for checked in report.layers] == [False, True, False, False]


def test_partial_rotary_is_seen(tmp_path):
    model = onnx.load(MODELS / "llama.onnx")
    for tensor in model.graph.initializer:
        if tensor.name in ("cos_cache", "sin_cache"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:80, :3], tensor.name))
    onnx.save(model, tmp_path / "partial.onnx")
    layer = check_model(tmp_path / "partial.onnx").layers[2].layer
    assert layer.rotary == Rotary(interleaved=False, rotated_channels=6, table_length=80)
    assert layer.is_partial_rotary


@pytest.mark.parametrize(
    ("elem_type", "bit_width", "schemes", "expected"),
    [
        (onnx.TensorProto.INT8, 8, ("PER_CHANNEL", "PER_CHANNEL"), "int8 per_channel"),
        (onnx.TensorProto.UINT8, 4, ("PER_TENSOR", "PER_CHANNEL"), "uint8 (4-bit) per_tensor/per_channel"),
        (onnx.TensorProto.FLOAT16, 0, ("NONE", "NONE"), "float16"),
    ],
)
def test_the_cache_type_names_the_quantization(tmp_path, elem_type, bit_width, schemes, expected):
    path = changed(
        tmp_path,
        "llama.onnx",
        kv_cache_bit_width=bit_width,
        k_quant_type=schemes[0],
        v_quant_type=schemes[1],
    )
    model = onnx.load(path)
    for value in model.graph.input:
        if value.name.startswith("past_key_values.1."):
            value.type.tensor_type.elem_type = elem_type
    onnx.save(model, path)
    types = [layer.kv_cache_type for layer in read_onnx_attention(path).layers]
    assert types == ["float32", expected, "float32", "float32"]


def test_what_the_frontend_loses_is_refused(monkeypatch):
    """Older frontends drop windows and sinks without a word: stand in for one by changing what is read."""
    real = read_onnx_attention(MODELS / "llama.onnx")
    other = read_onnx_attention(MODELS / "gptoss_attention.onnx")
    monkeypatch.setattr(model_file, "read_onnx_attention", lambda _: other)
    assert [layer.name for layer in real.layers] == [layer.name for layer in other.layers]
    report = check_model(MODELS / "llama.onnx")
    assert not report.runs
    assert not report.refusals
    assert [checked.refusals[0] for checked in report.layers] == [
        "OpenVINO's frontend reads local_window_size=-1, the file says 8",
        "OpenVINO's frontend lost the attention sink (head_sink) of the file",
    ] * 2


def test_files_that_are_no_language_model_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        check_model(tmp_path / "absent.onnx")
    (tmp_path / "cut.onnx").write_bytes((MODELS / "llama.onnx").read_bytes()[:100_000])
    with pytest.raises(ModelError, match="no ONNX model, or a truncated one"):
        check_model(tmp_path / "cut.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="holds no graph"):
        check_model(tmp_path / "empty.onnx")
    text = '<ir_version: 9, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "relu.onnx")
    with pytest.raises(ModelError, match="no GroupQueryAttention op among 1 ops"):
        check_model(tmp_path / "relu.onnx")


def test_without_its_external_weights_a_model_is_refused_but_has_its_rows(tmp_path):
    model = onnx.load(MODELS / "gemma3_alternating.onnx")
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert check_model(path).runs
    (tmp_path / "weights.bin").unlink()
    report = check_model(path)
    assert windows(report) == [8, 8, -1, 8]
    assert "weights.bin" in report.refusals[0]
    assert not report.runs


def test_a_layer_that_only_openvino_refuses_is_named(tmp_path):
    path = changed(tmp_path, "llama.onnx", kv_cache_bit_width=8, k_quant_type="PER_TENSOR")
    refusals = [checked.refusals for checked in check_model(path).layers]
    assert [len(reasons) for reasons in refusals] == [0, 1, 0, 0]
    assert "quantized KV cache element type" in refusals[1][0]


def test_a_model_with_an_input_that_nobody_fills_is_refused_as_a_whole(tmp_path):
    model = onnx.load(MODELS / "llama.onnx")
    extra = helper.make_tensor_value_info("token_type_ids", onnx.TensorProto.INT64, ["batch_size", 1])
    model.graph.input.append(extra)
    onnx.save(model, tmp_path / "extra.onnx")
    report = check_model(tmp_path / "extra.onnx")
    assert [checked.refusals for checked in report.layers] == [()] * 4
    assert "token_type_ids" in report.refusals[0]
    assert not report.runs


def with_three_sinks(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "sinks"))
    second_attention(model).input.extend([""] * (12 - len(second_attention(model).input)))
    second_attention(model).input[11] = "sinks"


def with_four_positions(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 4), np.int64), "positions"))
    second_attention(model).input.extend([""] * (12 - len(second_attention(model).input)))
    second_attention(model).input[9] = "positions"


def with_two_rows_of_bias(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, 2, 9), np.float32), "bias"))
    second_attention(model).input.extend([""] * (12 - len(second_attention(model).input)))
    second_attention(model).input[10] = "bias"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (with_three_sinks, "head_sink has shape [3]; 4 elements"),
        (with_four_positions, "position_ids has shape [1,4]; 2 elements"),
        (with_two_rows_of_bias, "attention_bias has 2 rows, the block has 1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_as_the_lowering_does(tmp_path, edit, reason):
    model = onnx.load(MODELS / "llama.onnx")
    edit(model)
    onnx.save(model, tmp_path / "edited.onnx")
    refusals = [checked.refusals for checked in check_model(tmp_path / "edited.onnx").layers]
    assert [len(reasons) for reasons in refusals] == [0, 1, 0, 0]
    assert refusals[1][0].startswith(reason)


def test_a_model_with_the_last_logits_alone_is_refused_as_a_whole(tmp_path):
    (tmp_path / "last.onnx").write_bytes(edited(with_last_logits_only))
    report = check_model(tmp_path / "last.onnx")
    assert [checked.refusals for checked in report.layers] == [()] * 2
    assert report.refusals[0].startswith("logits have shape [1, 1, 17] for 2 tokens")


def test_attention_inside_control_flow_is_named(tmp_path):
    (tmp_path / "if.onnx").write_bytes(edited(inside_an_if))
    with pytest.raises(ModelError, match=r"attention\.1: this GroupQueryAttention is inside the body of"):
        check_model(tmp_path / "if.onnx")
