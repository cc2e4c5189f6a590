"""Quantized caches that are refused, and why."""

import numpy as np
import onnx
import openvino as ov
import openvino.opset13 as ops
import pytest
from gqa_models import GQA, Quantized
from onnx import TensorProto
from quantized_steps import Feeds, build, read, types_of

from transforms import (
    Branch,
    DecomposeGQA,
    DecompositionError,
)
from transforms.cache_quantization import CacheForm, CacheInputs, ScaleKind, read_quantization

INT8 = Quantized()
INT8_CHANNELS = Quantized(kind="PER_CHANNEL")
INT4 = Quantized(bits=4)
INT4_CHANNELS = Quantized(bits=4, kind="PER_CHANNEL")
FLOAT8 = Quantized(float8=True)


def _with_past_kind(kind: int, gqa: GQA, scales: Feeds | None) -> bytes:
    """The node's model with another element type for its caches."""
    model = onnx.load_from_string(build(gqa, scales))
    for port in (*model.graph.input, *model.graph.output):
        if port.name in ("past_key", "past_value", "present_key", "present_value"):
            port.type.tensor_type.elem_type = kind
    data: bytes = model.SerializeToString()
    return data


def _scale(values: list[float]) -> Feeds:
    return {name: np.array(values, np.float32) for name in ("k_scale", "v_scale")}


REFUSED = {
    "uint8 of 8 bits": (
        _with_past_kind(TensorProto.UINT8, GQA(quantized=INT8, sequence_length=3, capacity=5), None),
        r"a quantized cache of u8 with kv_cache_bit_width=8; lowered are i8 with 8, u8 with 4, f8e4m3 with 8",
    ),
    "int8 of 4 bits": (
        _with_past_kind(TensorProto.INT8, GQA(quantized=INT4, sequence_length=3, capacity=5), None),
        r"a quantized cache of i8 with kv_cache_bit_width=4; lowered are",
    ),
    "codes without types": (
        _with_past_kind(TensorProto.INT8, GQA(sequence_length=3, capacity=5), None),
        r"past_key is i8, but k_quant_type and v_quant_type are NONE",
    ),
    "a scale of 0": (
        build(GQA(quantized=INT8, sequence_length=3, capacity=5), _scale([0.0])),
        r"k_scale contains 0.0; scales and their reciprocals are finite",
    ),
    "a scale too small to invert": (
        build(GQA(quantized=INT4, sequence_length=3, capacity=5), _scale([1e-40])),
        r"k_scale contains .*e-41; scales and their reciprocals are finite",
    ),
    "one scale for the channels": (
        build(GQA(quantized=INT8_CHANNELS, sequence_length=3, capacity=5), _scale([0.5])),
        r"k_scale has shape \[1\]; PER_CHANNEL needs 32 elements",
    ),
    "many scales for the tensor": (
        build(GQA(quantized=INT8, sequence_length=3, capacity=5), _scale([0.5] * 32)),
        r"k_scale has shape \[32\]; PER_TENSOR needs 1 element$",
    ),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_form_without_a_kernel_is_refused_by_name_and_the_model_left_alone(model, message):
    read_model = read(model)
    before = types_of(read_model)
    with pytest.raises(DecompositionError, match="attention: " + message):
        DecomposeGQA(Branch.GENERATE).run_on_model(read_model)
    assert types_of(read_model) == before


# What OpenVINO's frontend does not let through, as of 2026.4.1.

ATTRIBUTES = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}


def _input(shape: list[int], kind: str) -> ov.Output:
    return ops.parameter(shape, getattr(ov.Type, kind)).output(0)


def _inputs(
    *,
    key_type: str = "i8",
    value_type: str = "i8",
    channels: int = 16,
    head_size: int = 16,
    scale_type: str = "f32",
    without: str = "",
) -> CacheInputs:
    past_key, past_value = (
        ops.parameter([1, 2, -1, channels], getattr(ov.Type, kind)).output(0)
        for kind in (key_type, value_type)
    )
    k_scale, v_scale = (
        None
        if name == without or without == "both"
        else ops.parameter([1], getattr(ov.Type, scale_type)).output(0)
        for name in ("k_scale", "v_scale")
    )
    return CacheInputs(
        past_key=past_key,
        past_value=past_value,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_num_heads=2,
        head_size=head_size,
    )


@pytest.mark.parametrize(
    ("changed", "inputs", "message"),
    [
        ({"v_quant_type": "NONE"}, {}, "k_quant_type=PER_TENSOR, v_quant_type=NONE; both must be the same"),
        (
            {"k_quant_type": "PER_TOKEN", "v_quant_type": "PER_TOKEN"},
            {},
            "k_quant_type=PER_TOKEN; lowered are NONE, PER_TENSOR, PER_CHANNEL",
        ),
        (
            {"kv_cache_bit_width": 2},
            {},
            "a quantized cache of i8 with kv_cache_bit_width=2; lowered are i8 with 8",
        ),
        ({}, {"value_type": "u8"}, "past_key is i8, past_value u8; both must be one"),
        ({}, {"without": "v_scale"}, "v_scale is absent; a quantized cache needs k_scale and v_scale"),
        ({}, {"scale_type": "f16"}, "k_scale is .*float16.*; f32 is needed"),
        (
            {},
            {"channels": 8},
            r"past_key has shape \[1,2,\?,8\]; a row of head size 16 takes 16 elements",
        ),
        (
            {"kv_cache_bit_width": 4},
            {"key_type": "u8", "value_type": "u8"},
            r"past_key has shape \[1,2,\?,16\]; a row of head size 16 takes 8 elements of u8",
        ),
        (
            {"kv_cache_bit_width": 4},
            {"key_type": "u8", "value_type": "u8", "head_size": 15},
            "head size 15 with kv_cache_bit_width=4; two codes share a byte",
        ),
        (
            {"k_quant_type": "NONE", "v_quant_type": "NONE"},
            {"key_type": "f32", "value_type": "f32", "without": "both"},
            "kv_cache_bit_width=8 without k_quant_type and v_quant_type",
        ),
        (
            {"k_quant_type": "NONE", "v_quant_type": "NONE", "kv_cache_bit_width": 0},
            {"key_type": "f32", "value_type": "f32", "without": "k_scale"},
            "input v_scale is given, but k_quant_type and v_quant_type are NONE",
        ),
    ],
)
def test_a_contradiction_is_refused_by_name(changed, inputs, message):
    with pytest.raises(DecompositionError, match="layer3: " + message):
        read_quantization("layer3", ATTRIBUTES | changed, _inputs(**inputs))


def test_what_does_not_contradict_itself_is_read():
    found = read_quantization("layer3", ATTRIBUTES, _inputs())
    assert found is not None
    assert (found.form, found.kind) == (CacheForm.INT8, ScaleKind.PER_TENSOR)
