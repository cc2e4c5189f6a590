"""Failures that people reported of attention ops in public, as recipes on one lowered op.

Most use a value that is one-hot in its position: an attention row then is the row of probabilities, and what
it sees can be read off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from gqa_data import History, one_hot_history, random_history
from gqa_models import GQA, RotaryTable, TokenCount
from judges import by_ort, by_reference
from lowered_op import POISON, LoweredLayers

from transforms import Branch


def prefill(gqa: GQA, rows: int) -> LoweredLayers:
    return LoweredLayers([replace(gqa, sequence_length=rows, capacity=0)], Branch.PREFILL)


def generate(gqa: GQA, rows: int, capacity: int) -> LoweredLayers:
    layer = replace(gqa, sequence_length=rows, capacity=capacity)
    return LoweredLayers([layer], Branch.GENERATE, num_tokens=TokenCount())


def attention(lowered: LoweredLayers, history: History, stored: int) -> np.ndarray:
    """Real rows of a step that ends the history, [n, H, D]."""
    (gqa,), num_tokens = lowered.layers, history.total - stored
    (step,) = lowered.run([history], stored, num_tokens)
    return step.attention[0, -num_tokens:].reshape(num_tokens, gqa.num_heads, gqa.head_size)


def seen(lowered: LoweredLayers, gqa: GQA, total: int, stored: int) -> list[list[int]]:
    """Positions that each row sees; the heads must agree and the weights add up to 1."""
    weights = attention(lowered, one_hot_history(gqa, total, seed=total), stored)
    np.testing.assert_allclose(weights.sum(axis=2), 1.0, atol=1e-5)
    per_head = [[np.flatnonzero(head).tolist() for head in row] for row in weights]
    assert all(row == [row[0]] * gqa.num_heads for row in per_head)
    return [row[0] for row in per_head]


@pytest.mark.parametrize("window", [1, 4, 12, 40, -1])
def test_a_window_counts_the_current_token(window: int) -> None:
    # microsoft/onnxruntime#25927
    gqa, size = GQA(local_window_size=window), 12 if window == -1 else window
    expected = [list(range(max(0, row - size + 1), row + 1)) for row in range(12)]
    assert seen(prefill(gqa, 12), gqa, 12, 0) == expected
    assert seen(generate(gqa, 12, 4), gqa, 12, 0) == expected


@pytest.mark.parametrize(("window", "expected"), [(4, [7, 8, 9, 10]), (5, [6, 7, 8, 9, 10]), (3, [8, 9, 10])])
def test_a_decode_step_sees_the_window_that_ends_with_it(window: int, expected: list[int]) -> None:
    # microsoft/onnxruntime#25927; openvinotoolkit/openvino#37423: slot distance would pick slots 13 to 16
    gqa = GQA(local_window_size=window, head_size=32)
    assert seen(generate(gqa, 1, 16), gqa, 11, 10) == [expected]


def test_rows_of_a_block_see_windows_of_their_own() -> None:
    # openvinotoolkit/openvino#37423, #37207
    gqa = GQA(local_window_size=4)
    expected = [[7, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 12]]
    assert seen(generate(gqa, 3, 16), gqa, 13, 10) == expected
    assert seen(generate(gqa, 5, 16), gqa, 13, 10) == expected


def test_a_padded_prompt_equals_an_unpadded_one() -> None:
    # openvinotoolkit/openvino#37207
    gqa = GQA(local_window_size=4, rotary=RotaryTable())
    history = random_history(gqa, 10, seed=4)
    padded, exact = (attention(prefill(gqa, rows), history, 0) for rows in (16, 10))
    np.testing.assert_allclose(padded, exact, atol=1e-6)
    free = attention(prefill(replace(gqa, local_window_size=-1), 16), history, 0)
    np.testing.assert_allclose(padded[:4], free[:4], atol=1e-6)
    assert (np.abs(padded[4:] - free[4:]).max(axis=(1, 2)) > 1e-3).all()


SINKS = (-1e4, 0.0, 2.0, 60.0)


def first_row_sums(gqa: GQA, history: History) -> np.ndarray:
    """Sum of the probabilities of row 0, per head, from both branches."""
    sums = [
        attention(lowered, history, 0)[0].sum(axis=1) for lowered in (prefill(gqa, 6), generate(gqa, 6, 3))
    ]
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-6)
    return sums[0]


def test_a_sink_joins_the_denominator_once() -> None:
    # openvinotoolkit/openvino#33416
    history = one_hot_history(GQA(), 6, seed=9)
    key = np.repeat(history.key[0, :, 0], 2, axis=0)
    score = (history.query[0, :, 0] * key).sum(axis=1) / 4
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        sinks = tuple(SINKS[index] for index in order)
        plain = first_row_sums(GQA(head_sink=sinks), history)
        np.testing.assert_allclose(plain, 1 / (1 + np.exp(np.array(sinks) - score)), atol=1e-6)
        both = first_row_sums(GQA(head_sink=sinks, smooth_softmax=True), history)
        np.testing.assert_array_equal(both, plain)
        assert plain[order.index(0)] == 1.0
        assert 0.0 <= plain[order.index(3)] < 1e-20
    flag = first_row_sums(GQA(smooth_softmax=True), history)
    np.testing.assert_allclose(flag, first_row_sums(GQA(head_sink=(0.0,) * 4), history), atol=1e-7)
    np.testing.assert_allclose(first_row_sums(GQA(), history), 1.0, atol=1e-6)


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("float16", [False, True])
def test_rows_that_see_nothing_are_finite(window: int, float16: bool) -> None:
    # openvinotoolkit/openvino#35959
    gqa = GQA(local_window_size=window, float16=float16)
    history = random_history(gqa, 5, seed=2)
    (step,) = prefill(gqa, 8).run([history], 0, 5, poison=-17.0)
    assert np.isfinite(step.attention).all()
    unpadded = attention(prefill(gqa, 5), history, 0).reshape(1, 5, -1)
    np.testing.assert_allclose(step.attention[:, 3:], unpadded, atol=2e-3 if float16 else 1e-6)


@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        ((4, 2), [0, 0, 1, 1]),
        ((6, 2), [0, 0, 0, 1, 1, 1]),
        ((8, 1), [0] * 8),
        ((3, 3), [0, 1, 2]),
        ((6, 3), [0, 0, 1, 1, 2, 2]),
    ],
)
def test_key_heads_are_repeated_and_not_tiled(heads: tuple[int, int], groups: list[int]) -> None:
    # onnx/onnx#7274
    gqa = GQA(num_heads=heads[0], kv_num_heads=heads[1])
    history = random_history(gqa, 7, seed=1)
    history.value[...] = np.arange(heads[1], dtype=np.float32)[None, :, None, None]
    for lowered, stored in ((prefill(gqa, 7), 0), (generate(gqa, 3, 5), 5)):
        np.testing.assert_allclose(attention(lowered, history, stored)[-1, :, 0], groups, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_several_new_tokens_on_a_filled_cache(interleaved: bool) -> None:
    # microsoft/onnxruntime#21523, sonos/tract#2645
    gqa = GQA(num_heads=6, local_window_size=4, rotary=RotaryTable(interleaved=interleaved))
    history = random_history(gqa, 8, seed=21)
    lowered = generate(gqa, 3, 9)
    (block,) = lowered.run([history], 5, 3)
    whole = by_ort(gqa, history, 0)
    np.testing.assert_allclose(block.attention, whole.attention[:, 5:], atol=1e-5)
    np.testing.assert_allclose(block.present_key[:, :, 9:], whole.present_key[:, :, 5:], atol=1e-5)
    single = generate(gqa, 1, 9)
    for row in range(3):
        (alone,) = single.run([history.cut(6 + row)], 5 + row, 1)
        np.testing.assert_allclose(alone.attention[0, 0], block.attention[0, row], atol=1e-5)
        np.testing.assert_allclose(alone.present_key[:, :, -1], block.present_key[:, :, 9 + row], atol=1e-6)


def test_a_padded_prompt_has_no_negative_position() -> None:
    # microsoft/onnxruntime#29002; a table of 5 rows has none for a wrong position
    gqa = GQA(local_window_size=4, rotary=RotaryTable(positions=5))
    history = random_history(gqa, 5, seed=6)
    (padded,) = prefill(gqa, 8).run([history], 0, 5)
    (exact,) = prefill(gqa, 5).run([history], 0, 5)
    assert np.isfinite(padded.attention).all()
    # Angle 0 leaves a padded key as it was given.
    np.testing.assert_array_equal(padded.present_key[:, :, :3], np.float32(POISON))
    np.testing.assert_allclose(padded.attention[:, 3:], exact.attention, atol=1e-6)
    np.testing.assert_allclose(padded.present_key[:, :, 3:], exact.present_key, atol=1e-6)
    (block,) = generate(gqa, 8, 3).run([history], 0, 5)
    np.testing.assert_allclose(block.attention[:, 3:], exact.attention, atol=1e-6)


@pytest.mark.parametrize("chunks", [(12,), (4, 4, 4), (5, 4, 3), (1,) * 12])
def test_early_and_late_rows_of_a_chunk_have_masks_of_their_own(chunks: Sequence[int]) -> None:
    # pytorch/executorch#21857, #21384, #21929
    gqa = GQA(local_window_size=4, head_sink=(0.3, -0.5, 1.0, 2.0), rotary=RotaryTable())
    history = one_hot_history(gqa, 12, seed=3)
    lowered, start, rows = generate(gqa, max(chunks), 12), 0, []
    for length in chunks:
        rows.append(attention(lowered, history.cut(start + length), start))
        start += length
    got = np.concatenate(rows)
    whole = by_reference(gqa, history, 0).attention.reshape(12, 4, 16)
    np.testing.assert_allclose(got, whole, atol=1e-5)
    cached = [int((got[row, 0, :4] > 0).sum()) for row in range(4, 8)]
    assert cached == [3, 2, 1, 0]


def test_layers_keep_their_own_windows() -> None:
    # vllm-project/vllm#51756, ggml-org/llama.cpp#15811, pytorch/executorch#21635, #21901
    windows = (4, -1, 4, 6)
    layers = [GQA(sequence_length=14, capacity=0, local_window_size=window) for window in windows]
    histories = [one_hot_history(gqa, 14, seed=8) for gqa in layers]
    for branch, capacity in ((Branch.PREFILL, 0), (Branch.GENERATE, 3)):
        lowered = LoweredLayers([replace(gqa, capacity=capacity) for gqa in layers], branch)
        before = [step.attention[0, 13] for step in lowered.run(histories, 0, 14)]
        counts = [np.count_nonzero(row.reshape(4, 16), axis=1).tolist() for row in before]
        assert counts == [[size] * 4 for size in (4, 14, 4, 6)]
        changed = [one_hot_history(gqa, 14, seed=8) for gqa in layers]
        for history in changed:
            history.key[:, :, 0] += 1.0
        after = [step.attention[0, 13] for step in lowered.run(changed, 0, 14)]
        differs = [bool(np.abs(a - b).max() > 1e-4) for a, b in zip(before, after, strict=True)]
        assert differs == [False, True, False, False]
