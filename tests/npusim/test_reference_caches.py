"""The contiguous reference cache, its configuration, and the oracle `attend_spec`."""

import re

import numpy as np
import pytest
from cache_log import HEAD_SIZE, NUM_HEADS, SCALE, Log, cache_config, feed, layer_rows, peek
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.errors import ConfigError, InputError
from npusim.reference.caches import (
    AttendSpec,
    CacheSizing,
    MaskKind,
    Rows,
    attend_spec,
    band_spec,
)
from npusim.reference.contiguous import ContiguousReferenceCache


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- conversations against the log ------------------------------------------------------------------------


def converse(cache: ContiguousReferenceCache, log: Log, count: int) -> None:
    """A step of random rows; every output must be the log's."""
    entries = log.new_entries(0, cache.length, count)
    log.entries += entries
    position = np.array([entry.position for entry in entries])
    for layer in range(cache.config.num_layers):
        query = log.rng.normal(size=(1, NUM_HEADS, count, HEAD_SIZE))
        history = cache.update_and_fetch(layer, *layer_rows(entries, layer), position)
        output = attend_spec(query, *history, scale=SCALE, out_dtype=np.float64)
        expected = [log.attention(layer, entry, query[0, :, row]) for row, entry in enumerate(entries)]
        np.testing.assert_allclose(output[0].swapaxes(0, 1), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizing", CacheSizing)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=2, max_size=8),
    slack=st.integers(0, 3),
)
def test_any_conversation_equals_the_log(
    sizing: CacheSizing, steps: list[tuple[int, int]], slack: int
) -> None:
    config = cache_config(sizing=sizing, window_slack=slack)
    cache, log = ContiguousReferenceCache(config), Log(config, rng())
    for count, rejected in steps:
        if not cache.can_extend(count):
            continue
        converse(cache, log, count)
        target = max(0, cache.length - rejected)
        if cache.can_rewind(target):
            assert cache.rewind(target) == log.length(0) - target
            log.drop(0, target)
        assert cache.length == log.length(0)


@pytest.mark.parametrize("chunks", [[12], [4, 4, 4], [5, 4, 3], [1] * 12])
def test_any_chunking_leaves_the_same_rows(chunks: list[int]) -> None:
    cache = ContiguousReferenceCache(cache_config())
    for chunk in chunks:
        feed(cache, chunk)
    assert peek(cache, 0) == [9, 10, 11, -1]
    assert peek(cache, 1) == [*range(12), -1]
    assert peek(cache, 3) == [7, 8, 9, 10, 11, -1]


def test_batch_rows_are_kept_apart() -> None:
    config = cache_config(num_layers=1, windows=(4,), batch_size=3)
    cache = ContiguousReferenceCache(config)
    key, value = rng().normal(size=(3, 2, 7, 5)), rng(8).normal(size=(3, 2, 7, 3))
    cache.update_and_fetch(0, key[:, :, :6], value[:, :, :6], np.arange(6))
    keys, values, _ = cache.update_and_fetch(0, key[:, :, 6:], value[:, :, 6:], np.array([6]))
    assert np.array_equal(keys, key[:, :, 3:])
    assert np.array_equal(values, value[:, :, 3:])


# --- who sees what ----------------------------------------------------------------------------------------


def test_last_row_sees_its_own_layers_window() -> None:
    """Windows 4, none, 4, 6 over 14 tokens: 4, 14, 4, 6 keys, and three specs, not four."""
    config = cache_config(capacity=14)
    cache = ContiguousReferenceCache(config)
    specs = feed(cache, 14)
    masks = [np.tri(14, dtype=np.bool_) if spec.mask is None else spec.mask for spec in specs]
    assert [int(mask[-1].sum()) for mask in masks] == [4, 14, 4, 6]
    assert specs[0] is specs[2]
    assert len({id(spec) for spec in specs}) == 3
    assert specs[1].kind is MaskKind.CAUSAL


def test_a_new_step_has_specs_of_its_own() -> None:
    cache = ContiguousReferenceCache(cache_config())
    first, second = feed(cache, 5), feed(cache, 3)
    assert first[0] is not second[0]
    assert [second[layer].mask.shape for layer in range(4) if second[layer].mask is not None] == [
        (3, 6),
        (3, 8),
        (3, 6),
        (3, 8),
    ]


def test_kinds_of_specs() -> None:
    assert band_spec(2, 2, 3).kind is MaskKind.CAUSAL
    assert band_spec(1, 3, 3).kind is MaskKind.NONE
    assert band_spec(3, 3, 3).kind is MaskKind.CAUSAL
    assert band_spec(1, 9, -1).kind is MaskKind.NONE
    beyond = band_spec(1, 4, 3).mask
    assert beyond is not None
    assert beyond.tolist() == [[False, True, True, True]]
    block = band_spec(4, 8, 3).mask
    assert block is not None
    assert [np.flatnonzero(row).tolist() for row in block] == [[2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7]]
    full = band_spec(2, 5, -1).mask
    assert full is not None
    assert full.tolist() == [[True] * 4 + [False], [True] * 5]


def test_a_spec_does_not_share_the_mask_it_was_given() -> None:
    mask = np.ones((2, 3), np.bool_)
    spec = AttendSpec.explicit(mask)
    mask[0, 0] = False
    assert spec.mask is not None
    assert spec.mask.all()


def test_a_shared_mask_cannot_be_written_to() -> None:
    mask = feed(ContiguousReferenceCache(cache_config()), 9)[0].mask
    assert mask is not None
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0] = False


# --- the oracle -------------------------------------------------------------------------------------------


def test_attend_follows_scale_and_sink_by_hand() -> None:
    query, key = np.full((1, 1, 1, 4), 0.5), np.zeros((1, 1, 2, 4))
    key[0, 0, 1] = 1.0  # scores 0 and 2 * scale
    value = np.array([[[[1.0, 0.0], [0.0, 1.0]]]])
    plain = attend_spec(query, key, value, AttendSpec(MaskKind.NONE), scale=0.3, out_dtype=np.float64)
    total = 1 + np.exp(0.6)
    np.testing.assert_allclose(plain[0, 0, 0], [1 / total, np.exp(0.6) / total], rtol=1e-12)
    default = attend_spec(query, key, value, AttendSpec(MaskKind.NONE), out_dtype=np.float64)
    np.testing.assert_allclose(default[0, 0, 0, 0], 1 / (1 + np.exp(1.0)), rtol=1e-12)
    sink = attend_spec(
        query,
        key,
        value,
        AttendSpec(MaskKind.NONE),
        scale=0.3,
        head_sink=np.array([2.0]),
        out_dtype=np.float64,
    )
    np.testing.assert_allclose(sink.sum(), total / (total + np.exp(2.0)), rtol=1e-12)
    with np.errstate(over="raise"):
        high = attend_spec(query, key, value, AttendSpec(MaskKind.NONE), head_sink=np.array([800.0]))
    assert np.array_equal(high, np.zeros((1, 1, 1, 2)))


def test_attend_keeps_what_is_not_seen_out_of_the_arithmetic() -> None:
    query, key, value = (
        rng().normal(size=(1, 2, 1, 4)),
        np.full((1, 1, 3, 4), np.nan),
        np.full((1, 1, 3, 2), np.inf),
    )
    key[0, 0, 1], value[0, 0, 1] = 3.0, 9.0
    spec = AttendSpec.explicit(np.array([[False, True, False]]))
    assert np.array_equal(attend_spec(query, key, value, spec), np.full((1, 2, 1, 2), 9.0))


@pytest.mark.parametrize("out_dtype", [np.float16, np.float32, np.float64])
def test_attend_answers_in_the_type_asked_for(out_dtype: type[np.floating]) -> None:
    rows = rng().normal(size=(1, 1, 2, 4)).astype(np.float16)
    output = attend_spec(rows, rows, rows, AttendSpec(MaskKind.CAUSAL), out_dtype=out_dtype)
    exact = attend_spec(*[rows.astype(np.float64)] * 3, AttendSpec(MaskKind.CAUSAL), out_dtype=np.float64)
    assert output.dtype == out_dtype
    assert np.array_equal(output, exact.astype(out_dtype))


def test_attend_reads_kv_heads_in_groups() -> None:
    key, query = np.zeros((1, 2, 3, 4)), np.zeros((1, 6, 1, 4))
    value = np.broadcast_to(np.array([10.0, 20.0])[None, :, None, None], (1, 2, 3, 1))
    output = attend_spec(query, key, value, AttendSpec(MaskKind.NONE))
    assert output[0, :, 0, 0].tolist() == [10, 10, 10, 20, 20, 20]


def test_specs_that_do_not_fit_are_refused() -> None:
    def attend(rows: int, keys: int, spec: AttendSpec, heads: int = 2) -> Rows:
        key = np.zeros((1, 2, keys, 4))
        return attend_spec(np.zeros((1, heads, rows, 4)), key, key, spec)

    with pytest.raises(InputError, match="CAUSAL with 2 queries and 5 keys would hide history"):
        attend(2, 5, AttendSpec(MaskKind.CAUSAL))
    with pytest.raises(InputError, match=re.escape("mask has shape (2, 4), the step needs (2, 5)")):
        attend(2, 5, AttendSpec.explicit(np.ones((2, 4), np.bool_)))
    with pytest.raises(InputError, match=re.escape("query rows [1] see no key")):
        attend(2, 2, AttendSpec.explicit(np.array([[True, True], [False, False]])))
    with pytest.raises(InputError, match="3 query heads are no multiple of 2"):
        attend(1, 1, AttendSpec(MaskKind.NONE), heads=3)
    with pytest.raises(InputError, match="EXPLICIT with no mask"):
        AttendSpec(MaskKind.EXPLICIT)
    with pytest.raises(InputError, match="CAUSAL with a mask"):
        AttendSpec(MaskKind.CAUSAL, np.ones((1, 1), np.bool_))
    with pytest.raises(InputError, match=re.escape("mask is float64 (1, 1); it must be bool")):
        AttendSpec(MaskKind.EXPLICIT, np.ones((1, 1)))  # type: ignore[arg-type]


# --- configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; give an integer of 1 or more"),
        ({"kv_num_heads": 0}, "kv_num_heads is 0"),
        ({"head_size": -1}, "head_size is -1"),
        ({"v_head_size": 0}, "v_head_size is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"window_slack": -1}, "window_slack is -1; give an integer of 0 or more"),
        ({"windows": (4, -1)}, "windows has 2 entries for 4 layers"),
        ({"windows": ()}, "windows has 0 entries for 4 layers"),
        ({"windows": (4, -1, 0, 4)}, r"windows\[2\] is 0"),
        ({"windows": (-2,)}, r"windows\[0\] is -2"),
        ({"dtype": np.int8}, "dtype is .*int8"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_config(**changes)


def test_config_answers_per_layer() -> None:
    config = cache_config(window_slack=2)
    assert [config.window(layer) for layer in range(4)] == [4, -1, 4, 6]
    assert [config.num_slots(layer) for layer in range(4)] == [5, 13, 5, 7]
    assert [cache_config(windows=(w,)).num_slots(3) for w in (1, 2, 14, 99)] == [1, 1, 13, 13]
    assert cache_config(v_head_size=None).value_size == HEAD_SIZE
