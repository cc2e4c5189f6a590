"""Key positions in the graph: which absolute position lies in which slot, for each frame.

Every mask is written in token positions. This file is the only one that knows how slots map to them.
S rows of the block, C slots of the past, n real rows (right-aligned), T tokens after the step, P = T - n
before it. Row i of the block is the query of position T - S + i.
"""

from dataclasses import dataclass

import openvino.opset13 as ops
from openvino import Output

from transforms.key_layout import KeyLayout
from transforms.opset import concat, i32, row


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Positions of queries and keys as int32 outputs of the graph.

    query_position [S, 1]; query_real bool [S, 1] or None where every row is real; key_position [1, K];
    key_filled bool [1, K]; gather_index int32 [W - 1] where the past is gathered first, else None.
    """

    query_position: Output
    query_real: Output | None
    key_position: Output
    key_filled: Output
    gather_index: Output | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The lengths of one step as int32 outputs [1]; num_tokens is None where the block is always full."""

    total: Output
    num_tokens: Output | None
    sequence_length: int

    @property
    def stored(self) -> Output:
        """P: the tokens stored before the step."""
        taken = self.num_tokens if self.num_tokens is not None else i32([self.sequence_length]).output(0)
        return ops.subtract(self.total, taken).output(0)

    def block_positions(self) -> Output:
        """Positions of the block's rows, [1, S]."""
        rows = row(-self.sequence_length, 0)
        return ops.add(rows, self.total).output(0)

    def block_is_real(self) -> Output | None:
        """Which rows of the block are real, bool [1, S]; None where all are."""
        if self.num_tokens is None:
            return None
        rows_from_end = row(self.sequence_length, 0, -1)
        return ops.less_equal(rows_from_end, self.num_tokens).output(0)


@dataclass(frozen=True, kw_only=True)
class PastKeys:
    """Positions and filled flags of the past slots, [1, slots]; slots may be 0 (then both are None)."""

    position: Output | None
    filled: Output | None
    gather_index: Output | None = None


def right_aligned_frame(step: Step, key_length: int) -> Frame:
    """Past and block as one right-aligned run of key_length slots: slot h holds position T - K + h."""
    block = step.block_positions()
    key_position = ops.add(row(-key_length, 0), step.total).output(0)
    real = step.block_is_real()
    return Frame(
        query_position=_as_column(block),
        query_real=None if real is None else _as_column(real),
        key_position=key_position,
        key_filled=ops.greater_equal(key_position, i32(0)).output(0),
    )


def split_frame(step: Step, past: PastKeys) -> Frame:
    """Past slots by their layout, then the block at its fixed slots behind them."""
    block = step.block_positions()
    real = step.block_is_real()
    block_filled = real
    if block_filled is None:
        block_filled = ops.constant([[True] * step.sequence_length], dtype=bool).output(0)
    positions = [block] if past.position is None else [past.position, block]
    filled = [block_filled] if past.filled is None else [past.filled, block_filled]
    return Frame(
        query_position=_as_column(block),
        query_real=None if real is None else _as_column(real),
        key_position=concat(positions, 1),
        key_filled=concat(filled, 1),
        gather_index=past.gather_index,
    )


def past_keys(layout: KeyLayout, step: Step, capacity: int, local_window_size: int) -> PastKeys:
    """The past of a GENERATE branch: closed-form arithmetic from P, C and W."""
    if capacity == 0:
        return PastKeys(position=None, filled=None)
    match layout:
        case KeyLayout.LINEAR:
            return _linear_past(step, capacity)
        case KeyLayout.ROLLING:
            return _rolling_past(step, capacity, local_window_size)
        case KeyLayout.RING:
            return _ring_past(step, capacity)
        case KeyLayout.GATHERED:
            return _gathered_past(step, capacity, local_window_size)


def _linear_past(step: Step, capacity: int) -> PastKeys:
    """Slot h holds position h; filled for h < min(P, C), of which h < C is the shape itself."""
    slots = _slots(capacity)
    return PastKeys(position=slots, filled=ops.less(slots, step.stored).output(0))


def _rolling_past(step: Step, capacity: int, window: int) -> PastKeys:
    """Slot h holds P - L + h for h < L(P), L = P - gap * ceil(max(P - C, 0) / gap), gap = C - W + 1."""
    gap = capacity - window + 1
    stored = step.stored
    excess = ops.maximum(ops.subtract(stored, i32(capacity)), i32(0))
    evictions = ops.divide(ops.add(excess, i32(gap - 1)), i32(gap))
    evicted = ops.multiply(evictions, i32(gap))
    slots = _slots(capacity)
    resident = ops.subtract(stored, evicted)
    return PastKeys(position=ops.add(slots, evicted).output(0), filled=ops.less(slots, resident).output(0))


def _ring_past(step: Step, capacity: int) -> PastKeys:
    """Slot h holds the largest a <= P - 1 with a mod C = h, which is at least P - C by construction."""
    newest = ops.subtract(step.stored, i32(1))
    age = ops.floor_mod(ops.subtract(newest, _slots(capacity)), i32(capacity))
    position = ops.subtract(newest, age).output(0)
    return PastKeys(position=position, filled=ops.greater_equal(position, i32(0)).output(0))


def _gathered_past(step: Step, capacity: int, window: int) -> PastKeys:
    """The W - 1 newest rows of a linear past: key j holds position P - (W - 1) + j."""
    length = window - 1
    if length == 0:
        return PastKeys(position=None, filled=None)
    position = ops.add(row(-length, 0), step.stored).output(0)
    # Past rows beyond the capacity were never stored, so a position >= C is as empty as a negative one.
    stored_rows = ops.less(position, i32(capacity))
    filled = ops.logical_and(ops.greater_equal(position, i32(0)), stored_rows).output(0)
    clamped = ops.minimum(ops.maximum(position, i32(0)), i32(capacity - 1))
    index = ops.squeeze(clamped, i32([0])).output(0)
    return PastKeys(position=position, filled=filled, gather_index=index)


def _slots(capacity: int) -> Output:
    return row(0, capacity).output(0)


def _as_column(values: Output) -> Output:
    """[1, S] -> [S, 1]."""
    return ops.transpose(values, i32([1, 0])).output(0)
