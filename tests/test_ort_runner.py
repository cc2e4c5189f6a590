"""The ONNX Runtime oracle: that it agrees with itself, and the behaviour that its use rests on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gqa_models
import numpy as np
import ort_runner
import pytest
from gqa_data import op_rows, random_history
from gqa_models import GQA, Bias, RotaryTable
from model_files import READABLE, UNREADABLE
from ort_runner import OrtModel

ALL_MODELS = {**READABLE, **UNREADABLE}
# Logits of the trained pair reach 26, those of the others 0.8.
TOLERANCE = {"swa_target": 1e-4, "swa_draft": 1e-4}


def tokens(count: int, seed: int = 3) -> list[int]:
    """Bytes after the begin token."""
    return [257, *np.random.default_rng(seed).integers(0, 256, count - 1).tolist()]


@pytest.mark.parametrize("name", ALL_MODELS)
def test_whole_chunked_and_single_token_runs_agree(name: str) -> None:
    model, ids = OrtModel(ALL_MODELS[name], max_length=72), tokens(70)
    whole = model.feed(ids)
    assert whole.shape == (1, 70, 259)
    for sizes in ((7,) * 10, (1,) * 70, (1, 5, 14, 3, 37, 10)):
        model.reset()
        parts, start = [], 0
        for size in sizes:
            parts.append(model.feed(ids[start : start + size]))
            start += size
        assert model.num_stored_tokens == 70
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize("name", ALL_MODELS)
def test_a_rewound_run_equals_a_fresh_one(name: str) -> None:
    model = OrtModel(ALL_MODELS[name], max_length=60)
    kept, wrong, right = tokens(40), tokens(9, seed=4), tokens(12, seed=5)
    fresh = model.feed([*kept, *right])[:, 40:]
    model.reset()
    model.feed(kept)
    model.feed(wrong)
    model.rewind(40)
    np.testing.assert_allclose(model.feed(right), fresh, atol=TOLERANCE.get(name, 1e-5))
    assert model.num_stored_tokens == 52


@pytest.mark.parametrize("name", ["gemma3_alternating", "gptoss_attention", "swa_target", "gemma2_softcap"])
def test_window_sized_buffers_give_the_same_logits(name: str) -> None:
    window = 32 if name == "swa_target" else 8
    ids = tokens(70)
    whole = OrtModel(ALL_MODELS[name], max_length=70).feed(ids)
    for rows in (window, window + 3):
        model = OrtModel(ALL_MODELS[name], max_length=70, sliding_rows=rows)
        parts = [model.feed(ids[:13]), *(model.feed([token]) for token in ids[13:60]), model.feed(ids[60:])]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=TOLERANCE.get(name, 1e-5))
        shapes = {buffer.shape[2] for buffer in model.past.values()}
        assert shapes == {rows, 70}


def test_a_window_sized_buffer_refuses_a_rewind_after_it_has_evicted() -> None:
    model = OrtModel(READABLE["gemma3_alternating"], max_length=30, sliding_rows=9)
    model.feed(tokens(9))
    model.rewind(7)
    model.feed(tokens(3))
    with pytest.raises(ValueError, match="9 rows have evicted some tokens"):
        model.rewind(8)
    model.reset()
    model.feed(tokens(2))
    model.rewind(1)


def test_calls_that_cannot_be_answered_are_refused() -> None:
    model = OrtModel(READABLE["llama"], max_length=6)
    model.feed(tokens(4))
    with pytest.raises(ValueError, match="3 tokens after 4: max_length is 6"):
        model.feed([1, 2, 3])
    with pytest.raises(ValueError, match="0 tokens after 4"):
        model.feed([])
    with pytest.raises(ValueError, match="cannot rewind to 5: 4 tokens are stored"):
        model.rewind(5)
    assert model.feed([1, 2]).shape == (1, 2, 259)


def test_a_single_op_run_stores_rotated_keys_and_plain_values() -> None:
    gqa = GQA(rotary=RotaryTable())
    history = random_history(gqa, 5, seed=1)
    run = ort_runner.run_op(gqa, history, 3)
    assert run.attention.shape == (1, 2, 64)
    np.testing.assert_array_equal(run.present_value, history.value)
    # Angle 0 leaves the first key alone.
    np.testing.assert_array_equal(run.present_key[:, :, 0], history.key[:, :, 0])
    assert np.abs(run.present_key[:, :, 1:] - history.key[:, :, 1:]).max(axis=(0, 1, 3)).min() > 0.1


def test_missing_rows_have_no_weight() -> None:
    history = random_history(GQA(), 7, seed=1)
    run = ort_runner.run_op(GQA(), history, 5, missing=(2, 4))
    history.key[:, :, [2, 4]] = 9.0
    history.value[:, :, [2, 4]] = 500.0
    changed = ort_runner.run_op(GQA(), history, 5, missing=(2, 4))
    np.testing.assert_array_equal(run.attention, changed.attention)


def refusal(model: bytes, feeds: dict[str, np.ndarray]) -> str:
    with pytest.raises(Exception, match="GroupQueryAttention") as caught:
        ort_runner.session(model).run(None, feeds)
    return str(caught.value)


def op_feeds(gqa: GQA, stored: int, rows: int, buffer: int) -> dict[str, np.ndarray]:
    history = random_history(gqa, stored + rows, seed=2)
    past = np.zeros((1, gqa.kv_num_heads, buffer, gqa.head_size), gqa.dtype)
    past[:, :, :stored] = history.key[:, :, :stored]
    return {
        "query": op_rows(history.query[:, :, stored:]),
        "key": op_rows(history.key[:, :, stored:]),
        "value": op_rows(history.value[:, :, stored:]),
        "past_key": past,
        "past_value": past,
        "seqlens_k": np.array([stored + rows - 1], np.int32),
        "total_sequence_length": np.array(stored + rows, np.int32),
    }


@pytest.mark.parametrize(("buffer", "present"), [(3, 5), (5, 5), (9, 9)])
def test_present_grows_only_from_a_past_without_slack(buffer: int, present: int) -> None:
    results = ort_runner.session(gqa_models.build(GQA())).run(None, op_feeds(GQA(), 3, 2, buffer))
    assert results[1].shape == (1, 2, present, 16)


def test_a_past_with_too_little_slack_is_refused() -> None:
    message = refusal(gqa_models.build(GQA()), op_feeds(GQA(), 3, 2, 4))
    assert "total_sequence_length must equal past_sequence_length + kv_sequence_length" in message


@pytest.mark.parametrize("buffer", [0, 3])
def test_a_buffer_shorter_than_its_window_is_refused(buffer: int) -> None:
    gqa = GQA(local_window_size=4, sliding_window_cache=True)
    message = refusal(gqa_models.build(gqa), op_feeds(gqa, 0, 2, buffer))
    assert f"capacity ({buffer}) must be at least local_window_size (4)" in message


def test_a_rolling_buffer_keeps_rows_in_order_and_evicts_in_steps() -> None:
    gqa = GQA(local_window_size=4, sliding_window_cache=True)
    op = ort_runner.session(gqa_models.build(gqa))
    past = np.zeros((1, 2, 6, 16), np.float32)
    resident = []
    for stored in range(14):
        feeds = op_feeds(gqa, 0, 1, 0)
        feeds["key"] = np.full((1, 1, 32), stored + 1, np.float32)
        feeds["seqlens_k"] = np.array([stored], np.int32)
        feeds["total_sequence_length"] = np.array(stored + 1, np.int32)
        _, past, _ = op.run(None, {**feeds, "past_key": past, "past_value": past})
        rows = past[0, 0, :, 0].tolist()
        length = rows.index(stored + 1) + 1
        assert rows[:length] == list(range(stored + 2 - length, stored + 2))
        resident.append(length)
    assert resident == [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5]


def test_a_bias_has_as_many_columns_as_tokens() -> None:
    gqa = GQA(bias=Bias.SHARED)
    feeds = {**op_feeds(gqa, 3, 2, 9), "attention_bias": np.zeros((1, 1, 2, 9), np.float32)}
    assert "attention_bias dimension 3 must be equal to" in refusal(gqa_models.build(gqa), feeds)


def test_a_first_prompt_reads_only_the_first_position_id() -> None:
    gqa = GQA(rotary=RotaryTable(), position_ids=True)
    op = ort_runner.session(gqa_models.build(gqa))
    feeds = op_feeds(gqa, 0, 3, 0)
    free = op.run(None, {**feeds, "position_ids": np.array([[7, 2, 30]])})
    counted = op.run(None, {**feeds, "position_ids": np.array([[7, 8, 9]])})
    np.testing.assert_array_equal(free[1], counted[1])
    later = op_feeds(gqa, 3, 3, 3)
    free = op.run(None, {**later, "position_ids": np.array([[7, 2, 30]])})
    counted = op.run(None, {**later, "position_ids": np.array([[7, 8, 9]])})
    assert np.abs(free[1] - counted[1])[:, :, 4:].max() > 0.1


@pytest.mark.parametrize(
    ("gqa", "message"),
    [
        (GQA(rotary=RotaryTable(channels=8), head_size=24), "head_size shall be a multiple of 16"),
        (GQA(rotary=RotaryTable(channels=8)), "a multiple of 8"),
    ],
)
def test_rotary_sizes_that_are_not_supported_are_refused(gqa: GQA, message: str) -> None:
    assert message in refusal(gqa_models.build(gqa), op_feeds(gqa, 0, 2, 0))


def test_a_first_prompt_without_causality_cannot_have_free_positions() -> None:
    gqa = GQA(rotary=RotaryTable(), position_ids=True, causal=False)
    with pytest.raises(ValueError, match="the first prompt cannot be split"):
        ort_runner.run_op(gqa, random_history(gqa, 4, seed=0), 0)


def test_a_model_file_is_only_read(tmp_path: Path) -> None:
    copy = tmp_path / "model.onnx"
    copy.write_bytes(READABLE["llama"].read_bytes())
    copy.chmod(0o400)
    OrtModel(copy, max_length=4).feed([1])
    assert copy.read_bytes() == READABLE["llama"].read_bytes()


def test_softcap_reaches_onnxruntime() -> None:
    history = random_history(GQA(), 6, seed=1)
    plain = ort_runner.run_op(GQA(), history, 0)
    capped = ort_runner.run_op(replace(GQA(), softcap=0.5), history, 0)
    assert np.abs(plain.attention - capped.attention).max() > 1e-2
