"""Models that cannot run are refused with a ModelError that says why, before anything is compiled."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import pytest
from model_files import READABLE, UNREADABLE
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_edits import Edit, attention, remove_ports, with_attribute, with_last_logits_only
from tiny_llm import TINY, assert_fresh, config_of, feed, text
from tiny_model import TinyModel, build

import npusim
from npusim import ConfigError, ModelError

SMALL = config_of({"prompt": 8, "response": 4, "block": 2, "chunk": 3})  # 11 positions


def without_past(model: ModelProto) -> None:
    for node in attention(model):
        node.input[3] = node.input[4] = ""
    remove_ports(model.graph.input, "past_key_values")


def without_cache(model: ModelProto) -> None:
    without_past(model)
    for node in attention(model):
        del node.output[1:]
    remove_ports(model.graph.output, "present")


def without_a_present(model: ModelProto) -> None:
    remove_ports(model.graph.output, "present.1.value")


def with_constant_past(model: ModelProto) -> None:
    remove_ports(model.graph.input, "past_key_values.2.key")
    rows = np.zeros((1, 1, 4, 16), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(rows, "past_key_values.2.key"))


def without_attention(model: ModelProto) -> None:
    remove_ports(model.graph.input, "past_key_values")
    remove_ports(model.graph.output, "present")
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Gather", ["embedding", "input_ids"], ["hidden"]))
    model.graph.node.append(helper.make_node("MatMul", ["hidden", "head"], ["logits"]))


def renamed(old: str) -> Edit:
    def edit(model: ModelProto) -> None:
        for port in (*model.graph.input, *model.graph.output):
            port.name = "renamed" if port.name == old else port.name
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = ["renamed" if name == old else name for name in names]

    return edit


def of_batch_2(model: ModelProto) -> None:
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.shape.dim[0].dim_value = 2


def with_another_input(model: ModelProto) -> None:
    for ports, name in ((model.graph.input, "pixels"), (model.graph.output, "features")):
        ports.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b"]))
    model.graph.node.append(helper.make_node("Identity", ["pixels"], ["features"]))


def with_int8_cache(model: ModelProto) -> None:
    for port in (*model.graph.input, *model.graph.output):
        if port.name.startswith(("past", "present")):
            port.type.tensor_type.elem_type = TensorProto.INT8


def with_sinks(model: ModelProto) -> None:
    sinks = next(tensor for tensor in model.graph.initializer if tensor.name == "sinks")
    sinks.CopyFrom(numpy_helper.from_array(np.array([0.5, np.inf, 0.1], np.float32), "sinks"))
    attention(model)[1].input[11] = "sinks"


REFUSED: dict[str, tuple[Edit, str]] = {
    "no attention": (
        without_attention,
        "the model has no GroupQueryAttention; give an ONNX file of a builder",
    ),
    "no past": (
        without_past,
        r"attention.0: no past_key and past_value: .* \(and 2 more layers",
    ),
    "no cache": (without_cache, "attention.0: no past_key and past_value: there is no KV cache to manage"),
    "no present": (
        without_a_present,
        r"attention.1: output 2 \(present\) is no model output; export .* cache",
    ),
    "constant past": (
        with_constant_past,
        "attention.2: its past comes from .*, not from a model input; export",
    ),
    "window 0": (
        with_attribute("local_window_size", 0),
        "attention.1: local_window_size=0: a window counts .*",
    ),
    "softcap": (with_attribute("softcap", 30.0), "attention.1: softcap=30: only softcap=0 is lowered$"),
    "not causal": (
        with_attribute("causal", 0),
        "attention.1: local_window_size=5 with causal=0: a window needs",
    ),
    "quantized keys": (
        with_attribute("k_quant_type", "PER_TENSOR"),
        "attention.1: k_quant_type=PER_TENSOR, v_quant_type=NONE; both must be the same",
    ),
    "quantized bits": (
        with_attribute("kv_cache_bit_width", 8),
        "attention.1: kv_cache_bit_width=8 without k_quant_type and v_quant_type; name the types, or use 0",
    ),
    "int8 cache": (
        with_int8_cache,
        "attention.0: past_key is i8, but k_quant_type and v_quant_type are NONE",
    ),
    "heads": (with_attribute("num_heads", 5), "attention.1: .* must not exceed head_size"),
    "batch 2": (of_batch_2, "batch_size == 1 .* got batch_size = 2"),
    "scale": (with_attribute("scale", math.nan), "attention.1: scale=nan; a finite number is needed"),
    "sinks": (with_sinks, "attention.1: head_sink contains inf; its logits must be finite"),
    "smooth softmax": (with_attribute("smooth_softmax", 5), "attention.1: smooth_softmax=5: 1 adds"),
    "another input": (with_another_input, "has an input pixels that npusim cannot fill; known are input_ids"),
    "no input_ids": (renamed("input_ids"), r"no input input_ids; its inputs are \['attention_mask'"),
    "no attention_mask": (renamed("attention_mask"), "no input attention_mask; its inputs are"),
    "no logits": (renamed("logits"), "the model has no output logits"),
    "last logits only": (
        with_last_logits_only,
        r"logits have shape \[1, 1, 17\] for \d tokens; one row per token",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_run(name: str, tmp_path: Path) -> None:
    edit, message = REFUSED[name]
    model = onnx.load_model_from_string(build(TinyModel(windows=(-1, 5, 4))))
    edit(model)
    onnx.save(model, tmp_path / "edited.onnx")
    with pytest.raises(ModelError, match=message):
        npusim.compile_model(tmp_path / "edited.onnx", SMALL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma2_softcap", r"attn/GroupQueryAttention/output_0: softcap=50: .* \(and 3 more layers, see"),
        ("gptoss_moe", r"OpenVINO's ONNX frontend has no rule for com.microsoft.MoE \(4 nodes\)$"),
    ],
)
def test_files_that_the_frontend_refuses(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"{name}.onnx: .*{message}"):
        npusim.compile_model(UNREADABLE[name], SMALL)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.99, 0.99999])
def test_truncated_files(kept: float, tmp_path: Path) -> None:
    whole = READABLE["llama"].read_bytes()
    path = tmp_path / "truncated.onnx"
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ModelError, match=r"truncated\.onnx: (no ONNX model, or a truncated|.* no graph)"):
        npusim.compile_model(path, SMALL)


NO_MODEL = {
    "model.onnx": (b"these are\nnot the bytes of a model\n", "no ONNX model, or a truncated one"),
    "model.txt": (b"these are\nnot the bytes of a model\n", "no ONNX model, or a truncated one"),
    "model.json": (b"{}", "no ONNX model, or a truncated one"),
    "model.png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "no ONNX model, or a truncated one"),
    "model.xml": (b"these are\nnot the bytes of a model\n", "no OpenVINO IR .*; export it again"),
    "other.xml": (b'<?xml version="1.0"?><svg version="1.1"></svg>', "no OpenVINO IR"),
    "cut.xml": (b'<?xml version="1.0"?><net name="a" version="11"><layers>', "OpenVINO cannot read it: ."),
}


@pytest.mark.parametrize("name", NO_MODEL)
def test_files_that_are_no_model(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor do OpenVINO's other frontends write their guesses to the terminal."""
    content, message = NO_MODEL[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}: {message}"):
        npusim.compile_model(tmp_path / name, SMALL)
    assert capfd.readouterr().err == ""


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    for path, message in (
        (tmp_path / "missing.onnx", "no such file; give the path of a model"),
        (str(tmp_path), "is a directory; give the path of a model"),
        (tmp_path / "pipe.onnx", "is no regular file; give"),
        (tmp_path / ("long" * 100), r"cannot be opened \(File name too long\)"),
        (tmp_path / "missing.xml", "no such file"),
    ):
        with pytest.raises(ModelError, match=message):
            npusim.compile_model(path, SMALL)


def test_ir_of_a_model_with_the_op_cannot_be_read_back(tmp_path: Path) -> None:
    ov.save_model(ov.Core().read_model(build(TINY)), tmp_path / "model.xml")
    with pytest.raises(ModelError, match=r"IR with GroupQueryAttention cannot be read back; give the ONNX"):
        npusim.compile_model(tmp_path / "model.xml", SMALL)


def test_chunks_of_a_prompt_that_sees_itself_whole() -> None:
    """With causal=0 the first chunk would have to see tokens that come with the second."""
    proto = onnx.load_model_from_string(build(TinyModel(windows=(-1, -1))))
    with_attribute("causal", 0)(proto)
    model = ov.Core().read_model(proto.SerializeToString())
    with pytest.raises(ConfigError, match=r"attention.1: causal=0 with .*CHUNK_SIZE=3 and prompts of up to"):
        npusim.compile_model(model, SMALL)
    for whole in ({"prompt": 8, "response": 4, "chunk": 0}, {"prompt": 8, "response": 4, "chunk": 8}):
        assert not npusim.compile_model(model, config_of(whole)).spec.layers[1].causal


def test_rotary_tables_must_cover_every_position() -> None:
    """A config of 11 tokens needs 11 rows: positions 0 to 10."""
    with pytest.raises(ConfigError, match=r"LEN=8 and .*LEN=4 need 11 positions, the .* table has 10; lower"):
        npusim.compile_model(ov.Core().read_model(build(TinyModel(windows=(4,), max_positions=10))), SMALL)
    enough = TinyModel(windows=(4,), max_positions=11)
    request = npusim.compile_model(ov.Core().read_model(build(enough)), SMALL).create_infer_request()
    tokens = text(11)
    feed(request, tokens[:8], 0)
    feed(request, tokens[8:9], 8)
    assert_fresh(enough, feed(request, tokens[9:], 9), tokens)


def test_a_models_own_lengths_are_fitted_to_its_tables() -> None:
    model = ov.Core().read_model(build(TINY))
    llm = npusim.compile_model(model, {"NPUW_LLM_MIN_RESPONSE_LEN": 30})
    assert (llm.config.max_prompt_len, llm.config.capacity) == (11, 40)
    with pytest.raises(ConfigError, match="need 128 positions, the model's shortest table has 40"):
        npusim.compile_model(model)


def test_the_callers_model_stays_as_it_was() -> None:
    model = ov.Core().read_model(build(TINY))
    before = [(str(port.get_partial_shape()), port.get_names()) for port in (*model.inputs, *model.outputs)]
    operators = [node.get_type_name() for node in model.get_ordered_ops()]
    tokens = text(10)
    for layout in ("LINEAR", "RING"):
        llm = npusim.compile_model(model, {**SMALL, "NPUSIM_KV_LAYOUT": layout, "NPUSIM_KV_PRECISION": "F32"})
        request = llm.create_infer_request()
        feed(request, tokens[:8], 0)
        assert_fresh(TINY, feed(request, tokens[8:], 8), tokens)
    after = [(str(port.get_partial_shape()), port.get_names()) for port in (*model.inputs, *model.outputs)]
    assert after == before
    assert [node.get_type_name() for node in model.get_ordered_ops()] == operators


def test_lowered_models_are_static_and_free_of_attention_ops() -> None:
    llm = npusim.compile_model(ov.Core().read_model(build(TINY)), SMALL)
    for model, rows in ((llm.prefill_model, 3), (llm.generate_model, 2)):
        assert all(
            output.get_partial_shape().is_static for node in model.get_ops() for output in node.outputs()
        )
        operators = [node.get_type_name() for node in model.get_ops()]
        assert "GroupQueryAttention" not in operators
        assert operators.count("ScaledDotProductAttention") == 3
        presents = [port for port in model.outputs if "present" in port.get_any_name()]
        assert [list(port.shape) for port in presents] == [[1, 1, rows, 16]] * 6
