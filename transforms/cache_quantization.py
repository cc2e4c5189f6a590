"""What a GroupQueryAttention node says about its quantized cache: form of the codes, and scales.

The forms are those that ONNX Runtime's CPU kernel (1.32) has, plus float8, which OpenVINO reads: int8, or two
4-bit codes to a uint8, with one scale for the tensor or one for every channel. Keys and values have the same
form. (OpenVINO's frontend refuses nodes whose two types differ or that lack a scale, and lets pass a uint8
cache of 8-bit codes and an int8 cache of 4-bit ones, for which there is no kernel.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import Output

from transforms.errors import DecompositionError

_FLOATS = (ov.Type.f32, ov.Type.f16, ov.Type.bf16)


class CacheForm(Enum):
    """How codes lie in memory: element type of the cache tensors, bits of a code."""

    INT8 = ("i8", 8)
    INT4 = ("u8", 4)
    FLOAT8 = ("f8e4m3", 8)

    @property
    def element_type(self) -> str:
        """Name of the OpenVINO type."""
        return self.value[0]

    @property
    def bits(self) -> int:
        """kv_cache_bit_width."""
        return self.value[1]


class ScaleKind(Enum):
    """How many scales there are (k_quant_type, v_quant_type)."""

    PER_TENSOR = "PER_TENSOR"
    PER_CHANNEL = "PER_CHANNEL"


@dataclass(frozen=True, kw_only=True)
class CacheQuantization:
    """The codes of one node: k_scale and v_scale float32, one element or KV * D of them by `kind`."""

    form: CacheForm
    kind: ScaleKind
    k_scale: Output = field(repr=False)
    v_scale: Output = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CacheInputs:
    """The inputs of a node that a quantized cache is read from, and the sizes they must agree with."""

    past_key: Output
    past_value: Output
    k_scale: Output | None
    v_scale: Output | None
    kv_num_heads: int
    head_size: int


def stored_channels(form: CacheForm | None, head_size: int) -> int:
    """Elements of a cache tensor that hold the D channels of a row; no form is a float cache."""
    return head_size // 2 if form is CacheForm.INT4 else head_size


def read_quantization(
    name: str, attributes: Mapping[str, object], inputs: CacheInputs
) -> CacheQuantization | None:
    """What a node's attributes and inputs say; None for a float cache.

    Raises DecompositionError for a form that is not lowered and for one that contradicts itself.
    """
    kinds = [str(attributes.get(key, "NONE")) for key in ("k_quant_type", "v_quant_type")]
    bits = int(str(attributes.get("kv_cache_bit_width", 0)))
    if kinds == ["NONE", "NONE"]:
        _check_float(name, bits, inputs)
        return None
    if kinds[0] != kinds[1]:
        raise DecompositionError(
            f"{name}: k_quant_type={kinds[0]}, v_quant_type={kinds[1]}; both must be the same"
        )
    kind, form = _kind_of(name, kinds[0]), _form_of(name, bits, inputs)
    _check_width(name, form, inputs)
    scales = [
        _checked_scale(name, label, scale, kind, inputs)
        for label, scale in (("k_scale", inputs.k_scale), ("v_scale", inputs.v_scale))
    ]
    return CacheQuantization(form=form, kind=kind, k_scale=scales[0], v_scale=scales[1])


def _check_float(name: str, bits: int, inputs: CacheInputs) -> None:
    if bits:
        raise DecompositionError(
            f"{name}: kv_cache_bit_width={bits} without k_quant_type and v_quant_type; "
            "name the types, or use 0"
        )
    for label, past in (("past_key", inputs.past_key), ("past_value", inputs.past_value)):
        if past.get_element_type() not in _FLOATS:
            raise DecompositionError(
                f"{name}: {label} is {past.get_element_type().get_type_name()}, but k_quant_type and "
                "v_quant_type are NONE; a cache of codes needs both types and scales"
            )
    for label, scale in (("k_scale", inputs.k_scale), ("v_scale", inputs.v_scale)):
        if scale is not None:
            raise DecompositionError(
                f"{name}: input {label} is given, but k_quant_type and v_quant_type are NONE; "
                "name the types, or leave it absent"
            )


def _kind_of(name: str, kind: str) -> ScaleKind:
    try:
        return ScaleKind(kind)
    except ValueError:
        allowed = ", ".join(member.value for member in ScaleKind)
        raise DecompositionError(f"{name}: k_quant_type={kind}; lowered are NONE, {allowed}") from None


def _form_of(name: str, bits: int, inputs: CacheInputs) -> CacheForm:
    key_type, value_type = (
        past.get_element_type().get_type_name() for past in (inputs.past_key, inputs.past_value)
    )
    if key_type != value_type:
        raise DecompositionError(f"{name}: past_key is {key_type}, past_value {value_type}; both must be one")
    for form in CacheForm:
        if form.value == (key_type, bits):
            return form
    allowed = ", ".join(f"{form.element_type} with {form.bits}" for form in CacheForm)
    raise DecompositionError(
        f"{name}: a quantized cache of {key_type} with kv_cache_bit_width={bits}; lowered are {allowed}"
    )


def _check_width(name: str, form: CacheForm, inputs: CacheInputs) -> None:
    if form is CacheForm.INT4 and inputs.head_size % 2:
        raise DecompositionError(
            f"{name}: head size {inputs.head_size} with kv_cache_bit_width=4; two codes share a byte, "
            "so it must be even"
        )
    expected = stored_channels(form, inputs.head_size)
    for label, past in (("past_key", inputs.past_key), ("past_value", inputs.past_value)):
        shape = past.get_partial_shape()
        width = shape[3] if shape.rank.is_static and len(shape) == 4 else None
        if width is not None and width.is_static and width.get_length() != expected:
            raise DecompositionError(
                f"{name}: {label} has shape {shape}; a row of head size {inputs.head_size} takes {expected} "
                f"elements of {form.element_type}"
            )


def _checked_scale(
    name: str, label: str, scale: Output | None, kind: ScaleKind, inputs: CacheInputs
) -> Output:
    if scale is None:
        raise DecompositionError(f"{name}: {label} is absent; a quantized cache needs k_scale and v_scale")
    expected = 1 if kind is ScaleKind.PER_TENSOR else inputs.kv_num_heads * inputs.head_size
    shape = scale.get_partial_shape()
    if shape.is_dynamic or math.prod(shape.to_shape()) != expected:
        raise DecompositionError(
            f"{name}: {label} has shape {shape}; {kind.value} needs {expected} element{'s'[: expected > 1]}"
        )
    if scale.get_element_type() != ov.Type.f32:
        raise DecompositionError(f"{name}: {label} is {scale.get_element_type()}; f32 is needed")
    if scale.get_node().get_type_name() == "Constant":
        _check_values(name, label, scale.get_node().get_data())
    return scale


def _check_values(name: str, label: str, values: npt.NDArray[np.float32]) -> None:
    with np.errstate(divide="ignore", over="ignore"):
        usable = np.isfinite(values) & np.isfinite(np.float32(1) / values)
    if not usable.all():
        bad = values[~usable].flat[0]
        raise DecompositionError(f"{name}: {label} contains {bad}; scales and their reciprocals are finite")
