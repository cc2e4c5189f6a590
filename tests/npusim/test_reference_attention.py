"""npusim.reference against a naive loop and against ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gqa_data import History, one_hot_history, random_history
from gqa_models import GQA, Bias, RotaryTable
from judges import by_naive, by_ort, by_reference, reference_options

from npusim.errors import TrimError
from npusim.reference import AttentionHistory, AttentionOptions, attend

HEADS = {"4/2": (4, 2), "6/2": (6, 2), "8/1": (8, 1), "3/3": (3, 3)}
PARTIAL = RotaryTable(channels=16, positions=50)
VARIANTS = {
    "plain": GQA(),
    "scale": GQA(scale=0.37),
    "sink": GQA(head_sink=(0.4, -1.7, 2.2, 3.1, -0.3, 5.0, 0.9, 1.6)),
    "smooth": GQA(smooth_softmax=True),
    "sink and smooth": GQA(head_sink=(2.4, -1.1, 0.2, 1.1, -2.3, 4.0, 0.7, 1.9), smooth_softmax=True),
    "half": GQA(rotary=RotaryTable()),
    "interleaved": GQA(rotary=RotaryTable(interleaved=True)),
    "partial half": GQA(head_size=32, rotary=PARTIAL),
    "partial interleaved": GQA(head_size=32, rotary=replace(PARTIAL, interleaved=True)),
    "positions half": GQA(rotary=RotaryTable(), position_ids=True),
    "positions interleaved": GQA(rotary=RotaryTable(interleaved=True, as_inputs=True), position_ids=True),
    "shared bias": GQA(bias=Bias.SHARED),
    "bias per head": GQA(bias=Bias.PER_HEAD, head_sink=(0.1, 0.7, -0.6, 1.3, 2.0, -1.0, 0.5, 0.8)),
    "window-sized": GQA(local_window_size=4, sliding_window_cache=True, rotary=RotaryTable()),
}
STORED = (0, 1, 3, 8, 2, 6, 11)


def with_heads(gqa: GQA, heads: str) -> GQA:
    num_heads, kv_num_heads = HEADS[heads]
    sink = None if gqa.head_sink is None else gqa.head_sink[:num_heads]
    return replace(gqa, num_heads=num_heads, kv_num_heads=kv_num_heads, head_sink=sink)


def agree(gqa: GQA, history: History, stored: int, tolerance: float, missing: tuple[int, ...] = ()) -> None:
    reference = by_reference(gqa, history, stored, missing=missing)
    naive = by_naive(gqa, history, stored, missing=missing)
    ort = by_ort(gqa, history, stored, missing=missing)
    np.testing.assert_allclose(reference.attention, naive.attention, atol=1e-12)
    np.testing.assert_allclose(reference.present_key, naive.present_key, atol=1e-12)
    np.testing.assert_array_equal(reference.present_value, naive.present_value)
    np.testing.assert_allclose(ort.attention, reference.attention, atol=tolerance)
    # ONNX Runtime keeps the missing rows and, window-sized, rows past T.
    kept = [row for row in range(history.total) if row not in missing]
    np.testing.assert_allclose(ort.present_key[:, :, kept], reference.present_key, atol=tolerance)
    np.testing.assert_array_equal(ort.present_value[:, :, kept], reference.present_value)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_naive_and_onnxruntime_agree(variant: str, heads: str) -> None:
    gqa = with_heads(VARIANTS[variant], heads)
    case = 0
    for rows in (1, 2, 3, 4, 5, gqa.num_heads):
        for window in (-1, 1, 2, 3, 5, "total", 100):
            stored = STORED[case % len(STORED)]
            case += 1
            history = random_history(gqa, stored + rows, seed=case)
            size = history.total if window == "total" else int(window)
            if gqa.sliding_window_cache and size == -1:
                size = gqa.local_window_size
            agree(replace(gqa, local_window_size=size), history, stored, 1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("stored", [0, 1, 4])
def test_without_causality_every_row_sees_the_whole_block(heads: str, stored: int) -> None:
    gqa = with_heads(GQA(causal=False, rotary=RotaryTable(), scale=0.21), heads)
    for rows in (1, 3, gqa.num_heads):
        agree(gqa, random_history(gqa, stored + rows, seed=rows), stored, 1e-5)


@pytest.mark.parametrize("variant", ["plain", "sink", "half", "partial interleaved", "bias per head"])
@pytest.mark.parametrize("window", [-1, 2])
def test_half_precision_agrees_with_onnxruntime(variant: str, window: int) -> None:
    gqa = replace(with_heads(VARIANTS[variant], "6/2"), float16=True, local_window_size=window)
    for stored, rows in ((0, 5), (7, 1), (4, 3)):
        # Values of a few units, rounded to 11 bits at each of some steps.
        agree(gqa, random_history(gqa, stored + rows, seed=stored), stored, 6e-3)


@pytest.mark.parametrize("variant", ["plain", "half", "positions half", "bias per head", "smooth"])
@pytest.mark.parametrize("window", [-1, 1, 4, 7])
def test_rows_that_were_never_stored_are_not_seen(variant: str, window: int) -> None:
    gqa = replace(with_heads(VARIANTS[variant], "4/2"), local_window_size=window)
    for stored, rows in ((6, 1), (8, 4), (11, 3)):
        history = random_history(gqa, stored + rows, seed=rows)
        agree(gqa, history, stored, 1e-5, missing=tuple(range(5, stored)))


def probabilities(gqa: GQA, total: int, stored: int) -> np.ndarray:
    """[rows, H, D] of which the first `total` columns are positions."""
    history = one_hot_history(gqa, total, seed=11)
    attention = by_reference(gqa, history, stored).attention
    return attention.reshape(total - stored, gqa.num_heads, gqa.head_size)


@pytest.mark.parametrize("window", [1, 4, 12, 40, -1])
def test_a_window_counts_the_query_itself(window: int) -> None:
    seen = probabilities(GQA(local_window_size=window), 12, 0) > 0
    size = 12 if window == -1 else window
    for row in range(12):
        expected = [row - size < position <= row for position in range(12)]
        assert seen[row, :, :12].tolist() == [expected] * 4


def test_a_decode_step_sees_the_window_of_its_position() -> None:
    seen = probabilities(GQA(local_window_size=4), 11, 10)[0] > 0
    assert [np.flatnonzero(head).tolist() for head in seen] == [[7, 8, 9, 10]] * 4


def test_a_sink_takes_its_share_of_each_row_once() -> None:
    sink = (-1e4, 0.0, 2.0, 60.0)
    shares = {}
    for name, gqa in {
        "sink": GQA(head_sink=sink),
        "both": GQA(head_sink=sink, smooth_softmax=True),
        "flag": GQA(smooth_softmax=True),
        "zero": GQA(head_sink=(0.0,) * 4),
    }.items():
        shares[name] = probabilities(gqa, 6, 0)[0].sum(axis=1)
    history = one_hot_history(GQA(), 6, seed=11)
    keys = np.repeat(history.key[0, :, 0], 2, axis=0)
    score = (history.query[0, :, 0].astype(np.float64) * keys).sum(axis=1) / 4
    np.testing.assert_allclose(shares["sink"], 1 / (1 + np.exp(np.array(sink) - score)), atol=1e-12)
    np.testing.assert_array_equal(shares["both"], shares["sink"])
    np.testing.assert_array_equal(shares["flag"], shares["zero"])
    assert shares["sink"][0] == pytest.approx(1.0)
    assert 0 < shares["sink"][3] < 1e-20


def test_a_sink_past_the_range_of_exp_leaves_zero() -> None:
    with np.errstate(over="raise"):
        assert probabilities(GQA(head_sink=(900.0,) * 4), 3, 0).sum() == 0.0


@pytest.mark.parametrize(("heads", "expected"), [("4/2", [0, 0, 1, 1]), ("6/2", [0, 0, 0, 1, 1, 1])])
def test_a_query_head_reads_the_key_head_of_its_group(heads: str, expected: list[int]) -> None:
    gqa = with_heads(GQA(), heads)
    history = random_history(gqa, 3, seed=0)
    value = np.broadcast_to(np.arange(2.0)[None, :, None, None], history.value.shape)
    attention = attend(history.query[:, :, 2:], history.key, value, AttentionOptions())
    np.testing.assert_allclose(attention.reshape(gqa.num_heads, -1)[:, 0], expected, atol=1e-12)


@pytest.mark.parametrize("variant", ["plain", "positions half", "bias per head", "sink"])
def test_one_call_chunks_and_single_tokens_are_the_same(variant: str) -> None:
    gqa = replace(with_heads(VARIANTS[variant], "6/2"), local_window_size=4)
    history = random_history(gqa, 11, seed=5)
    whole = attend(
        history.query,
        history.key,
        history.value,
        reference_options(gqa),
        position_ids=history.position_ids,
        attention_bias=history.bias,
    )
    for chunks in ((5, 4, 2), (1,) * 11, (8, 3)):
        told, start, parts = AttentionHistory(reference_options(gqa)), 0, []
        for length in chunks:
            rows = slice(start, start + length)
            parts.append(
                told.step(
                    history.query[:, :, rows],
                    history.key[:, :, rows],
                    history.value[:, :, rows],
                    position_ids=None if history.position_ids is None else history.position_ids[rows],
                    attention_bias=None if history.bias is None else history.bias[:, :, rows],
                )
            )
            start += length
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-12)


def test_the_last_rows_of_a_history_are_asked_alone() -> None:
    gqa = GQA(rotary=RotaryTable(), position_ids=True, local_window_size=3)
    history = random_history(gqa, 9, seed=5)
    options, angles = reference_options(gqa), history.position_ids
    whole = attend(history.query, history.key, history.value, options, position_ids=angles)
    last = attend(history.query[:, :, 7:], history.key, history.value, options, position_ids=angles)
    np.testing.assert_allclose(last, whole[:, 7:], atol=1e-12)


def test_a_trimmed_history_is_a_shorter_one() -> None:
    gqa = GQA(rotary=RotaryTable(), local_window_size=4)
    history = random_history(gqa, 9, seed=2)
    told = AttentionHistory(reference_options(gqa))
    told.append(history.key[:, :, :7], history.value[:, :, :7])
    assert told.trim(5) == 2
    assert told.length == 5
    assert told.positions.tolist() == [0, 1, 2, 3, 4]
    rows = slice(5, 9)
    got = told.step(history.query[:, :, rows], history.key[:, :, rows], history.value[:, :, rows])
    np.testing.assert_allclose(got, by_naive(gqa, history, 5).attention, atol=1e-12)
    assert told.trim(9) == 0
    with pytest.raises(TrimError, match="cannot trim to 10: the history has 9 tokens"):
        told.trim(10)
    with pytest.raises(TrimError, match="cannot trim to -1"):
        told.trim(-1)


def test_garbage_in_an_unseen_row_stays_there() -> None:
    gqa = GQA(local_window_size=2)
    history = random_history(gqa, 6, seed=8)
    clean = by_reference(gqa, history, 5).attention
    history.key[:, :, 3] = np.nan
    history.value[:, :, 3] = np.inf
    np.testing.assert_array_equal(by_reference(gqa, history, 5).attention, clean)


def test_what_a_history_hands_out_is_not_its_own() -> None:
    history = random_history(GQA(), 4, seed=8)
    told = AttentionHistory(AttentionOptions())
    told.append(history.key, history.value)
    for rows in (told.present_key, told.present_value, told.positions):
        rows[...] = 7
    np.testing.assert_array_equal(told.present_key, history.key)
    np.testing.assert_array_equal(told.present_value, history.value)
    assert told.positions.tolist() == [0, 1, 2, 3]


def test_values_may_have_another_head_size() -> None:
    gqa = GQA()
    history = random_history(gqa, 5, seed=1)
    narrow = attend(history.query, history.key, history.value[..., :6], AttentionOptions())
    full = attend(history.query, history.key, history.value, AttentionOptions())
    assert narrow.shape == (1, 5, 24)
    np.testing.assert_allclose(narrow.reshape(1, 5, 4, 6), full.reshape(1, 5, 4, 16)[..., :6], atol=1e-12)
