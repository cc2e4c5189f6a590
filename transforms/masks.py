"""From positions to the additive mask: one predicate, one select."""

import openvino as ov
import openvino.opset13 as ops
from openvino import Output

from transforms.frames import Frame
from transforms.opset import i32

# A row of nothing but -inf (a padded row) comes out of the softmax as NaN, so no masked score may become
# -inf. float32 and bfloat16 use bfloat16's lowest: a device that runs a float32 graph in bfloat16 rounds
# float32's lowest to -inf. float16 uses half of its lowest: a score of -17 plus the lowest itself is -inf.
_BF16_LOWEST = -(2.0**127) * (2 - 2.0**-7)
_MASKED = {ov.Type.f16: -32752.0, ov.Type.bf16: _BF16_LOWEST, ov.Type.f32: _BF16_LOWEST}


def visible(frame: Frame, *, local_window_size: int, causal: bool) -> Output:
    """Which key each row may see, bool [S, K]: real & filled & k <= q & q - k < W.

    The last two terms fall away with causal=0 and with local_window_size=-1. To a single row no key is later:
    a filled slot of the past holds a position before it, and the block is itself.
    """
    rows = frame.query_position.get_partial_shape()[0].get_length()
    terms = [frame.key_filled]
    if frame.query_real is not None:
        terms.append(frame.query_real)
    if causal and rows > 1:
        terms.append(ops.less_equal(frame.key_position, frame.query_position).output(0))
    if local_window_size > 0:
        distance = ops.subtract(frame.query_position, frame.key_position)
        terms.append(ops.less(distance, i32(local_window_size)).output(0))
    result = terms[0]
    for term in terms[1:]:
        result = ops.logical_and(result, term).output(0)
    return result


def additive_mask(visible_keys: Output, element_type: ov.Type, bias: Output | None) -> Output:
    """[1, 1 or H, S, K]: the bias (0 without one) where visible, a finite lowest value elsewhere."""
    plane = ops.unsqueeze(visible_keys, i32([0, 1]))
    masked = ops.constant(_MASKED[element_type], dtype=element_type)
    shown = bias if bias is not None else ops.constant(0.0, dtype=element_type).output(0)
    return ops.select(plane, shown, masked).output(0)


def bias_by_slot(attention_bias: Output, frame: Frame) -> Output:
    """attention_bias [1, 1 or H, S, total], indexed by key position, gathered to slots: [1, ., S, K].

    Positions outside the table are clamped: no visible key has one.
    """
    total = attention_bias.get_partial_shape()[3].get_length()
    clamped = ops.minimum(ops.maximum(frame.key_position, i32(0)), i32(total - 1))
    return ops.gather(attention_bias, ops.squeeze(clamped, i32([0])), i32(3)).output(0)
