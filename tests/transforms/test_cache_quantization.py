"""Numbers of quantized caches: ONNX Runtime's codes to the bit, and its attention, in every layout."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from gqa_models import GQA, Quantized, RotaryTable
from quantized_models import codes_of
from quantized_steps import (
    Feeds,
    LoweredOp,
    OrtOp,
    random_block,
    random_scales,
    stack,
)

from transforms import (
    Branch,
    KeyLayout,
)

INT8 = Quantized()
INT8_CHANNELS = Quantized(kind="PER_CHANNEL")
INT4 = Quantized(bits=4)
INT4_CHANNELS = Quantized(bits=4, kind="PER_CHANNEL")
FLOAT8 = Quantized(float8=True)
FLOAT8_CHANNELS = Quantized(float8=True, kind="PER_CHANNEL")
FORMS = {
    "int8": INT8,
    "int8 per channel": INT8_CHANNELS,
    "int4": INT4,
    "int4 per channel": INT4_CHANNELS,
}
FLOAT8_FORMS = {"float8": FLOAT8, "float8 per channel": FLOAT8_CHANNELS}

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
constant_or_not = pytest.mark.parametrize("constant", [True, False], ids=["constant", "given"])


def _prompt(gqa: GQA, values: np.ndarray, scales: Feeds, *, constant: bool = True) -> LoweredOp:
    """A lowered node after a prompt whose keys and values are both `values` [1, S, KV * D]."""
    gqa = replace(gqa, sequence_length=values.shape[1], capacity=0)
    op = LoweredOp(gqa, scales, Branch.PREFILL, scales_are_constant=constant)
    query = np.zeros((1, values.shape[1], gqa.num_heads * gqa.head_size), gqa.dtype)
    op.step({"query": query, "key": values, "value": values})
    return op


def _near_ties(gqa: GQA, scales: Feeds, rng: np.random.Generator) -> np.ndarray:
    """Rows halfway between two codes or one float32 beside it, some beyond the last code: [1, 48, KV * D]."""
    bits = gqa.quantized.bits
    halves = (
        rng.integers(-(2**bits) // 2 - 6, 2**bits // 2 + 6, (1, gqa.kv_num_heads, 48, gqa.head_size)) + 0.5
    )
    scale = scales["k_scale"].reshape(1, -1, 1, scales["k_scale"].size // gqa.kv_num_heads or 1)
    exact = (halves * scale).astype(np.float32)
    beside = np.nextafter(exact, np.where(rng.random(exact.shape) < 0.5, np.inf, -np.inf).astype(np.float32))
    rows = np.where(rng.random(exact.shape) < 0.4, exact, beside)
    return rows.swapaxes(1, 2).reshape(1, 48, -1).astype(gqa.dtype)


@forms
@constant_or_not
def test_the_codes_are_onnx_runtimes_to_the_bit_even_beside_a_tie(form, constant):
    rng = np.random.default_rng(11)
    gqa = GQA(head_size=32, quantized=form)
    scales = random_scales(gqa, rng, largest=3.7)
    scales["v_scale"] = scales["k_scale"]
    values = _near_ties(gqa, scales, rng)
    ort = OrtOp(gqa, scales)
    ort.step({"query": np.zeros((1, 48, 4 * 32), np.float32), "key": values, "value": values})
    op = _prompt(gqa, values, scales, constant=constant)
    np.testing.assert_array_equal(stack(op.key_rows), ort.key)
    np.testing.assert_array_equal(stack(op.value_rows), ort.value)
    # The data would tell: these formulas give other codes.
    codes = codes_of(ort.key, form.bits)
    x = values.reshape(1, 48, 2, 32).swapaxes(1, 2)
    scale = scales["k_scale"].reshape(-1, *scales["k_scale"].shape[1:])
    most = 2 ** (form.bits - 1)
    for other in (
        np.rint(x / scale),
        np.sign(x) * np.floor(np.abs(x * (np.float32(1) / scale)) + 0.5),
        np.trunc(x * (np.float32(1) / scale)),
    ):
        assert (np.clip(other, -most, most - 1) != codes).any()
    assert codes.min() == -most
    assert codes.max() == most - 1


def test_ties_go_to_the_even_code_and_codes_end_at_their_range():
    scales = {"k_scale": np.array([0.25], np.float32), "v_scale": np.array([0.125], np.float32)}
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, -3.5])
    limits = np.array([127.0, 127.5, 500.0, -128.0, -128.5, -129.0, -3e38, 126.5])
    values = (np.concatenate([halves, limits]) * 0.25).astype(np.float32).reshape(1, 1, 16)
    gqa = GQA(num_heads=2, kv_num_heads=1, quantized=INT8)
    op = _prompt(gqa, values, scales)
    expected = [-2, -2, 0, 0, 2, 2, 4, -4, 127, 127, 127, -128, -128, -128, -128, 126]
    assert op.key_rows[0].ravel().tolist() == expected
    # The value scale is half as large: each quotient doubles.
    expected = [-5, -3, -1, 1, 3, 5, 7, -7, 127, 127, 127, -128, -128, -128, -128, 127]
    assert op.value_rows[0].ravel().tolist() == expected


def test_two_codes_share_a_byte_the_even_channel_low_and_eight_added():
    scales = {"k_scale": np.array([0.5], np.float32), "v_scale": np.array([0.5], np.float32)}
    values = np.array([[[-8, -7, 0, 7, 3, -1, 9, -9, 0.5, 1.5, -0.5, 2.5, 1, 0, 0, 1]]], np.float32) * 0.5
    gqa = GQA(num_heads=2, kv_num_heads=1, quantized=INT4)
    op = _prompt(gqa, values, scales)
    assert [f"{byte:02x}" for byte in op.key_rows[0].ravel()] == [
        "10",
        "f8",
        "7b",
        "0f",
        "a8",
        "a8",
        "89",
        "98",
    ]


@pytest.mark.parametrize("form", [*FORMS.values(), *FLOAT8_FORMS.values()], ids=[*FORMS, *FLOAT8_FORMS])
def test_attention_reads_its_own_block_from_codes(form):
    # One key: the output is the value of that row, as the cache will give it back.
    gqa = GQA(num_heads=2, kv_num_heads=1, head_size=16, sequence_length=1, capacity=0, quantized=form)
    rng = np.random.default_rng(3)
    scales = random_scales(gqa, rng, largest=2.0)
    op = LoweredOp(gqa, scales, Branch.PREFILL)
    block = random_block(gqa, 1, rng)
    attention = op.step(block).reshape(2, 16)
    read_back = (_as_floats(op.value_rows[0], form) * scales["v_scale"].reshape(1, 1, -1)).reshape(16)
    np.testing.assert_array_equal(attention, np.stack([read_back, read_back]))
    assert np.abs(read_back - block["value"].ravel()).max() > 1e-4


def _as_floats(stored: np.ndarray, form: Quantized) -> np.ndarray:
    if form.float8:
        return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return codes_of(stored, form.bits).astype(np.float32)


STEPS = {
    # Branch and layout; window; capacity; lengths of the blocks of S = 5 rows (right-aligned: all full).
    "whole prefill": (Branch.PREFILL, KeyLayout.LINEAR, -1, 0, [4]),
    "whole prefill, window": (Branch.PREFILL, KeyLayout.LINEAR, 3, 0, [5]),
    "right-aligned past": (Branch.PREFILL, KeyLayout.LINEAR, 6, 11, [5, 5, 5]),
    "linear": (Branch.GENERATE, KeyLayout.LINEAR, -1, 20, [5, 3, 1, 4, 5]),
    "linear, window": (Branch.GENERATE, KeyLayout.LINEAR, 4, 20, [2, 5, 1, 1, 4]),
    "rolling": (Branch.GENERATE, KeyLayout.ROLLING, 4, 6, [3, 1, 5, 4, 1, 2, 5]),
    "ring": (Branch.GENERATE, KeyLayout.RING, 5, 7, [4, 5, 1, 3, 5]),
    "gathered": (Branch.GENERATE, KeyLayout.GATHERED, 4, 20, [5, 1, 2, 5, 3]),
    "gathered, window 1": (Branch.GENERATE, KeyLayout.GATHERED, 1, 12, [4, 2]),
}


@forms
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_every_branch_and_layout_equals_onnx_runtime(form, case):
    branch, layout, window, capacity, blocks = case
    rng = np.random.default_rng(29)
    gqa = GQA(
        num_heads=6,
        kv_num_heads=2,
        quantized=form,
        local_window_size=window,
        rotary=RotaryTable(),
        head_sink=(0.3, -1.1, 2.0, 0.9, -0.4, 1.7),
    )
    scales = random_scales(gqa, rng, largest=2.8)
    ort = OrtOp(gqa, scales)
    op = LoweredOp(replace(gqa, sequence_length=5, capacity=capacity), scales, branch, layout)
    for length in blocks:
        block = random_block(gqa, length, rng)
        np.testing.assert_allclose(op.step(block), ort.step(block), rtol=0, atol=3e-6)
    # Keys went through a rotation, of which the last bit may differ: at a tie that is one code.
    difference = codes_of(stack(op.key_rows), form.bits) - codes_of(ort.key, form.bits)
    assert np.abs(difference).max() <= 1
    assert np.count_nonzero(difference) <= difference.size // 200
    np.testing.assert_array_equal(stack(op.value_rows), ort.value)


@pytest.mark.parametrize("form", [INT8_CHANNELS, INT4_CHANNELS], ids=["int8", "int4"])
def test_a_rolling_cache_holds_what_onnx_runtimes_window_sized_one_holds(form):
    # ONNX Runtime wants a head size of 32 for 4-bit codes in a window-sized cache.
    rng = np.random.default_rng(41)
    gqa = GQA(head_size=32, quantized=form, local_window_size=4, sliding_window_cache=True, capacity=6)
    scales = random_scales(gqa, rng, largest=2.5)
    ort = OrtOp(gqa, scales)
    op = LoweredOp(replace(gqa, sequence_length=7), scales, Branch.GENERATE, KeyLayout.ROLLING)
    for length in (3, 1, 7, 1, 1, 2, 5, 1):
        block = random_block(gqa, length, rng)
        np.testing.assert_allclose(op.step(block), ort.step(block), rtol=0, atol=3e-6)
        resident = _resident(len(op.key_rows), capacity=6, window=4)
        for rows, buffer in ((op.key_rows, ort.key), (op.value_rows, ort.value)):
            np.testing.assert_array_equal(stack(rows[-resident:]), buffer[:, :, :resident])


def _resident(total: int, *, capacity: int, window: int) -> int:
    """L of the published contract."""
    gap = capacity - window + 1
    return total if total <= capacity else total - gap * -(-(total - capacity) // gap)


@forms
def test_a_float16_model_is_quantized_in_float32(form):
    rng = np.random.default_rng(7)
    gqa = GQA(quantized=form, float16=True)
    scales = random_scales(gqa, rng, largest=3.0)
    scales["v_scale"] = scales["k_scale"]
    values = _near_ties(gqa, scales, rng)
    ort = OrtOp(gqa, scales)
    block = random_block(gqa, 48, rng) | {"key": values, "value": values}
    expected = ort.step(block)
    op = LoweredOp(replace(gqa, sequence_length=48, capacity=0), scales, Branch.PREFILL)
    attention = op.step(block)
    assert attention.dtype == np.float16
    np.testing.assert_array_equal(stack(op.value_rows), ort.value)
    np.testing.assert_allclose(attention, expected, rtol=2e-3, atol=2e-3)


# float8: ml_dtypes is the judge of the codes, numpy of the attention; ONNX Runtime has no kernel.


def test_float8_codes_are_rounded_once_half_to_even_and_clamped():
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    just_above = np.nextafter(ties, np.float32(np.inf))
    # A conversion by way of float16 would see a tie here.
    beyond_float16 = ties * np.float32(1 + 2.0**-13)
    beyond = np.array([447.9, 463.9, 464.0, 464.1, 1e9, 2.0**-10, 2.0**-11, 0.0], np.float32)
    magnitudes = np.concatenate([numbers, ties, just_above, beyond_float16, beyond])
    values = np.concatenate([magnitudes, -magnitudes])
    values = np.pad(values, (0, -len(values) % 16)).reshape(1, -1, 16)
    scales = {"k_scale": np.array([1.0], np.float32), "v_scale": np.array([0.3], np.float32)}
    op = _prompt(GQA(num_heads=1, kv_num_heads=1, quantized=FLOAT8), values, scales)
    for rows, scale in ((op.key_rows, 1.0), (op.value_rows, 0.3)):
        scaled = np.clip(values * (np.float32(1) / np.float32(scale)), -448, 448)
        expected = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        got = _as_floats(stack(rows), FLOAT8)
        np.testing.assert_array_equal(got, expected.reshape(got.shape))


@pytest.mark.parametrize("form", FLOAT8_FORMS.values(), ids=FLOAT8_FORMS.keys())
@pytest.mark.parametrize(
    "layout", [KeyLayout.LINEAR, KeyLayout.RING, KeyLayout.GATHERED], ids=lambda layout: layout.value
)
def test_float8_attention_is_that_of_the_numbers_stored(form, layout):
    rng = np.random.default_rng(13)
    capacity = 6 if layout is KeyLayout.RING else 16
    gqa = GQA(quantized=form, local_window_size=5, sequence_length=3, capacity=capacity)
    scales = random_scales(gqa, rng, largest=2.6)
    op = LoweredOp(gqa, scales, Branch.GENERATE, layout)
    for length in (3, 2, 3, 1, 3, 3):
        block = random_block(gqa, length, rng)
        attention = op.step(block)
        keys, values = (
            np.repeat(_as_floats(stack(rows), form).astype(np.float64) * scales[name], 2, axis=1)
            for rows, name in ((op.key_rows, "k_scale"), (op.value_rows, "v_scale"))
        )
        query = block["query"].reshape(1, length, 4, 16).swapaxes(1, 2).astype(np.float64)
        total = keys.shape[2]
        distance = np.arange(total - length, total)[:, None] - np.arange(total)
        scores = query @ keys.swapaxes(2, 3) / 4 - np.where((distance >= 0) & (distance < 5), 0, np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = (weights @ values).swapaxes(1, 2).reshape(1, length, 64)
        np.testing.assert_allclose(attention, expected, rtol=0, atol=3e-6)
