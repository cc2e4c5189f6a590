"""Key positions in the graph against npusim.layout, the same arithmetic in integers, slot by slot.

For every capacity and window up to 24 that a layout allows, every number of stored tokens up to two laps and
more of the buffer, blocks of 1 to 24 rows of which any number is real.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from numpy.typing import NDArray

import npusim.layout as integers
from transforms import KeyLayout
from transforms.frames import Frame, Step, past_keys, right_aligned_frame, split_frame
from transforms.opset import i32

SIZES = range(1, 25)

INTEGER_FRAMES = {
    KeyLayout.LINEAR: integers.LinearFrame,
    KeyLayout.ROLLING: integers.RollingFrame,
    KeyLayout.RING: integers.RingFrame,
    KeyLayout.GATHERED: integers.GatheredFrame,
}
LEAST_CAPACITY: dict[KeyLayout, Callable[[int], int]] = {
    KeyLayout.LINEAR: lambda _window: 1,
    KeyLayout.ROLLING: integers.rolling_min_capacity,
    KeyLayout.RING: lambda window: integers.ring_min_capacity(window, integers.CommitPolicy.DEFERRED),
    KeyLayout.GATHERED: lambda _window: 1,
}


@dataclass(frozen=True, kw_only=True)
class FrameGraph:
    """A frame as a model of seqlens_k [1] and, where a block may be partial, num_tokens [1]."""

    model: ov.Model
    results: dict[str, ov.Tensor]

    @classmethod
    def build(cls, make: Callable[[Step], Frame], rows: int, *, partial: bool) -> "FrameGraph":
        """`make` gives the frame of a step of `rows` rows."""
        seqlens_k = ops.parameter([1], ov.Type.i32)
        num_tokens = ops.parameter([1], ov.Type.i32)
        frame = make(
            Step(
                total=ops.add(seqlens_k, i32([1])).output(0),
                num_tokens=num_tokens.output(0) if partial else None,
                sequence_length=rows,
            )
        )
        outputs = {name: output for name, output in vars(frame).items() if output is not None}
        model = ov.Model(list(outputs.values()), [seqlens_k, num_tokens] if partial else [seqlens_k])
        results = {
            name: ov.Tensor(output.get_element_type(), output.get_shape()) for name, output in outputs.items()
        }
        return cls(model=model, results=results)

    def run(self, expected: integers.Frame) -> dict[str, NDArray[np.generic]]:
        """The frame's outputs, flat, at the step of an integer frame."""
        lengths = [expected.total - 1, expected.num_new][: len(self.model.inputs)]
        given = [ov.Tensor(np.array([length], np.int32)) for length in lengths]
        assert self.model.evaluate(list(self.results.values()), given)
        return {name: tensor.data.reshape(-1) for name, tensor in self.results.items()}


def check(graph: FrameGraph, expected: integers.Frame) -> None:
    """What a mask reads of the frame: positions of rows and filled slots, and which are real and filled."""
    found = graph.run(expected)
    rows, slots = range(expected.block_size), range(expected.num_keys)
    filled = np.array([expected.filled(slot) for slot in slots])
    position = np.array([expected.key_position(slot) for slot in slots])
    real = np.array([row >= expected.block_size - expected.num_new for row in rows])
    assert found["query_position"].tolist() == [expected.query_position(row) for row in rows], expected
    assert np.array_equal(found.get("query_real", np.full(len(rows), True)), real), expected
    assert np.array_equal(found["key_filled"], filled), expected
    assert np.array_equal(found["key_position"][filled], position[filled]), expected
    if isinstance(expected, integers.GatheredFrame) and expected.num_past_keys:
        index = [expected.gather_index(slot) for slot in range(expected.num_past_keys)]
        assert found["gather_index"].tolist() == index, expected


def check_laps(layout: KeyLayout, capacity: int, window: int, rows: int, *, partial: bool) -> None:
    """One graph at every number of stored tokens up to two laps of the buffer and more, real rows in turn."""
    graph = FrameGraph.build(
        lambda step: split_frame(step, past_keys(layout, step, capacity, window)), rows, partial=partial
    )
    for stored in range(2 * capacity + 4):
        expected = INTEGER_FRAMES[layout](
            capacity=capacity,
            block_size=rows,
            stored=stored,
            num_new=1 + (window + stored) % rows if partial else rows,
            local_window_size=window,
        )
        check(graph, expected)


@pytest.mark.parametrize("layout", KeyLayout, ids=lambda layout: layout.name)
def test_split_frames_agree_with_the_integers(layout: KeyLayout) -> None:
    blocks = set()
    for window in SIZES:
        for capacity in range(LEAST_CAPACITY[layout](window), 25):
            rows, partial = 1 + (5 * window + capacity) % 24, window % 3 > 0
            check_laps(layout, capacity, window, rows, partial=partial)
            blocks.add((rows, partial))
    assert blocks == set(itertools.product(SIZES, (True, False)))


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "full"])
def test_right_aligned_frames_agree_with_the_integers(partial: bool) -> None:
    for capacity, rows in itertools.product((0, *SIZES), SIZES):
        graph = FrameGraph.build(
            lambda step, keys=capacity + rows: right_aligned_frame(step, keys), rows, partial=partial
        )
        for stored in range(0, capacity + 4, 1 + capacity // 8):
            num_new = 1 + (capacity + stored) % rows if partial else rows
            expected = integers.RightAlignedFrame(
                capacity=capacity, block_size=rows, stored=stored, num_new=num_new
            )
            check(graph, expected)
