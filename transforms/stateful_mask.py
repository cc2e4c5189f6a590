"""Masks of the stateful form: positions come from the inputs, never from slots.

A runtime with a static cache (NPUW) hands the graph inputs of fixed length: the block right-aligned, the
past left-aligned, and between them slots that hold nothing or padding, with attention_mask 0. A slot is
therefore no position. What holds wherever the rows lie: a query's position is its entry of position_ids, a
key's is the number of keys that attention_mask shows before it, and the block's keys come last, in the order
of its rows.
"""

from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Output

from transforms.attention_parts import scalar
from transforms.opset import concat, i64

MASKED = -(2.0**15)
"""The additive mask of a hidden key, in every type.

Exact in float32, bfloat16 and float16, and with a score added still finite in each. NPUW passes tensors
between its subgraphs in float16 whatever the graph computes in: the lowest of float32 or bfloat16 would
become -inf there, and a padded row, of which every key is hidden, NaN.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StatefulStep:
    """What every mask of a model shares; B batch, S rows of the block, K key slots.

    query_position [B, 1, S, 1] and key_position [B, 1, 1, K] are int64; key_filled [B, 1, 1, K] and
    causal [1, 1, S, K] are bool; shape is int64 [4]: B, 1, S, K; num_slots is int64 [1].
    """

    query_position: Output
    key_position: Output
    key_filled: Output
    causal: Output
    shape: Output
    num_slots: Output


def read_step(input_ids: Output, attention_mask: Output, position_ids: Output) -> StatefulStep:
    """The step that input_ids [B, S], attention_mask [B, K] and position_ids [B, S] describe."""
    batch, rows = _lengths(input_ids)
    slots = _lengths(attention_mask)[1]
    shown_before = ops.subtract(ops.cum_sum(attention_mask, i64(1)), i64(1))
    return StatefulStep(
        query_position=ops.unsqueeze(position_ids, i64([1, 3])).output(0),
        key_position=ops.unsqueeze(shown_before, i64([1, 2])).output(0),
        key_filled=ops.unsqueeze(ops.not_equal(attention_mask, i64(0)), i64([1, 2])).output(0),
        causal=_causal(rows, slots),
        shape=concat([batch, i64([1]).output(0), rows, slots], 0),
        num_slots=slots,
    )


def additive_mask(step: StatefulStep, local_window_size: int, element_type: ov.Type) -> Output:
    """[B, 1, S, K]: 0 where a row may see a key, MASKED elsewhere."""
    shown, hidden = scalar(0.0, element_type), scalar(MASKED, element_type)
    if local_window_size < 0:
        visible = ops.bitwise_and(step.causal, step.key_filled)
        return ops.select(visible, shown, hidden).output(0)
    # The chain of ands, the broadcast and the slice of everything are how OpenVINO's conversion to
    # PagedAttention recognises a window (and how large it is). It replaces the mask by one of its own, and a
    # window spelled in any other way is lost without a word.
    oldest_hidden = ops.add(step.query_position, i64(-local_window_size))
    in_window = ops.greater(step.key_position, oldest_hidden)
    always = ops.constant(np.array(True))
    visible = ops.bitwise_and(always, in_window)
    visible = ops.bitwise_and(visible, step.causal)
    visible = ops.bitwise_and(always, visible)
    visible = ops.bitwise_and(visible, step.key_filled)
    mask = ops.select(ops.broadcast(visible, step.shape), shown, hidden)
    return ops.slice(mask, i64([0]), step.num_slots, i64([1]), i64([3])).output(0)


def _causal(rows: Output, slots: Output) -> Output:
    """[1, 1, S, K]: row i owns slot K - S + i and sees no later one."""
    first = ops.subtract(slots, rows)
    own = _range(first, slots, [0, 1, 3])
    slot = _range(i64([0]).output(0), slots, [0, 1, 2])
    return ops.less_equal(slot, own).output(0)


def _range(start: Output, stop: Output, new_axes: list[int]) -> Output:
    """start .. stop - 1 on one axis of four; start and stop are int64 [1]."""
    first, end = (ops.squeeze(bound, i64([0])) for bound in (start, stop))
    return ops.unsqueeze(ops.range(first, end, i64(1), "i64"), i64(new_axes)).output(0)


def _lengths(source: Output) -> tuple[Output, Output]:
    """The two dimensions of an input, int64 [1] each."""
    shape = ops.shape_of(source, "i64")
    first, second = (ops.gather(shape, i64([axis]), i64(0)).output(0) for axis in (0, 1))
    return first, second
