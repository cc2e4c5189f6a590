"""Both directions of a quantized cache in the graph: rows to codes, codes to rows.

A stored number is code * scale. The arithmetic is that of ONNX Runtime's CPU kernel (1.32), in float32
whatever type attention computes in:

    code = clamp(round(x * (1 / scale)))    round half to even; the reciprocal is rounded before it is used

- 8 bits: int8, -128 .. 127. 4 bits: -8 .. 7, stored as code + 8, two to a uint8, the even channel in the low
  half of the byte.
- Attention reads the rows of its own block from their codes too, as every later step will.

ONNX Runtime's CPU has no kernel for float8 (e4m3) caches. Their codes are the float8 numbers themselves,
clamped to +-448 and rounded once.
"""

import math
from typing import assert_never

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Output

from transforms.cache_quantization import CacheForm, ScaleKind
from transforms.gqa_node import GQANode
from transforms.opset import i32, i64, reshape


class CacheCodec:
    """Both directions for the keys or the values of one node; element_type is that of the float rows."""

    def __init__(self, form: CacheForm, scale: Output, element_type: ov.Type) -> None:
        """scale: float32, [1, KV, 1, D] or [1, 1, 1, 1]."""
        self._form = form
        self._scale = scale
        self._element_type = element_type
        self._reciprocal = ops.divide(_f32(1.0), scale).output(0)

    def store(self, rows: Output) -> Output:
        """[1, KV, S, D] float -> as the cache stores it, [1, KV, S, `stored_channels`]."""
        scaled = ops.multiply(_as_type(rows, ov.Type.f32), self._reciprocal)
        match self._form:
            case CacheForm.INT8:
                return ops.convert(_rounded(scaled, -128, 127), "i8").output(0)
            case CacheForm.INT4:
                return _pack(_rounded(scaled, -8, 7))
            case CacheForm.FLOAT8:
                return ops.convert(_rounded_to_float8(scaled), "f8e4m3").output(0)
            case _:
                assert_never(self._form)

    def load(self, stored: Output) -> Output:
        """[1, KV, length, `stored_channels`] as stored -> [1, KV, length, D] of the element type."""
        match self._form:
            case CacheForm.INT8 | CacheForm.FLOAT8:
                codes = ops.convert(stored, "f32").output(0)
            case CacheForm.INT4:
                codes = _unpack(stored)
            case _:
                assert_never(self._form)
        return _as_type(ops.multiply(codes, self._scale).output(0), self._element_type)


def codecs_of(gqa: GQANode) -> tuple[CacheCodec | None, CacheCodec | None]:
    """For the keys and for the values of a node; None twice where its cache is a float one."""
    quantization = gqa.quantization
    if quantization is None:
        return None, None
    heads = gqa.kv_num_heads if quantization.kind is ScaleKind.PER_CHANNEL else 1
    key, value = (
        CacheCodec(quantization.form, reshape(scale, [1, heads, 1, -1]), gqa.element_type)
        for scale in (quantization.k_scale, quantization.v_scale)
    )
    return key, value


def _f32(values: float | list[float]) -> ov.Node:
    return ops.constant(np.asarray(values, np.float32))


def _as_type(source: Output, element_type: ov.Type) -> Output:
    if source.get_element_type() == element_type:
        return source
    return ops.convert(source, element_type.get_type_name()).output(0)


def _rounded(scaled: ov.Node, least: int, most: int) -> Output:
    """Whole numbers in float32."""
    return ops.clamp(ops.round(scaled, "half_to_even"), least, most).output(0)


_PAIRS = np.stack([np.arange(256) % 16 - 8, np.arange(256) // 16 - 8], axis=1).astype(np.float32)
"""The two codes of each byte, [256, 2]. A look-up is four times faster on a CPU than arithmetic."""


def _pack(codes: Output) -> Output:
    """Codes -8 .. 7 [1, KV, S, D] -> bytes [1, KV, S, D / 2]."""
    _, heads, length, head_size = codes.get_shape()
    pairs = reshape(ops.add(codes, _f32(8.0)).output(0), [1, heads, length, head_size // 2, 2])
    return ops.convert(ops.reduce_sum(ops.multiply(pairs, _f32([1.0, 16.0])), i64([4])), "u8").output(0)


def _unpack(stored: Output) -> Output:
    """Bytes [1, KV, length, D / 2] -> codes in float32 [1, KV, length, D]."""
    _, heads, length, width = stored.get_shape()
    pairs = ops.gather(ops.constant(_PAIRS), ops.convert(stored, "i32"), i32(0))
    return reshape(pairs.output(0), [1, heads, length, 2 * width])


_E4M3_LARGEST = 448.0
_E4M3_EXPONENTS = range(-6, 9)
"""Exponents of its normal numbers, each with 3 bits of fraction; below 2 ** -6 the step stays 2 ** -9."""


def _rounded_to_float8(scaled: ov.Node) -> Output:
    """Numbers that e4m3 holds exactly, in float32: clamped, then rounded half to even, once.

    OpenVINO's own conversion goes through float16, which rounds twice. The step is found by a logarithm: at
    a power of two, where that may be off by one, both steps round to the power itself.
    """
    clamped = ops.clamp(scaled, -_E4M3_LARGEST, _E4M3_LARGEST)
    least, most = _E4M3_EXPONENTS[0], _E4M3_EXPONENTS[-1]
    magnitude = ops.maximum(ops.abs(clamped), _f32(2.0**least))
    exponent = ops.floor(ops.multiply(ops.log(magnitude), _f32(1 / math.log(2))))
    index = ops.convert(ops.clamp(ops.subtract(exponent, _f32(least)), 0, most - least), "i32")
    steps = [2.0 ** (exponent - 3) for exponent in _E4M3_EXPONENTS]
    step = ops.gather(_f32(steps), index, i32(0))
    per_step = ops.gather(_f32([1 / step for step in steps]), index, i32(0))
    whole = ops.round(ops.multiply(clamped, per_step), "half_to_even")
    return ops.multiply(whole, step).output(0)
