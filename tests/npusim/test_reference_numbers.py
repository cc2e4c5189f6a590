"""The references round nothing: what is no integer, no array or no choice is refused."""

from __future__ import annotations

import numpy as np
import pytest
from cache_log import HEAD_SIZE, KV_NUM_HEADS, V_HEAD_SIZE, cache_config

from npusim.errors import ConfigError, InputError, TrimError
from npusim.reference import (
    AttendSpec,
    AttentionHistory,
    AttentionOptions,
    CellReferenceCache,
    ContiguousReferenceCache,
    MaskKind,
    attend_spec,
    flatten_step,
)

KEY = np.zeros((1, KV_NUM_HEADS, 2, HEAD_SIZE))
VALUE = np.zeros((1, KV_NUM_HEADS, 2, V_HEAD_SIZE))
POSITION = np.arange(2)


def contiguous(stored: int = 0) -> ContiguousReferenceCache:
    cache = ContiguousReferenceCache(cache_config(num_layers=1, windows=-1))
    for start in range(0, stored, 2):
        cache.update_and_fetch(0, KEY, VALUE, POSITION + start)
    return cache


def cells(stored: int = 0) -> CellReferenceCache:
    cache = CellReferenceCache(cache_config(num_layers=1, windows=-1))
    for start in range(0, stored, 2):
        cache.begin_step(flatten_step({0: ([1, 2], start)}))
        cache.update_and_fetch(0, KEY, VALUE, POSITION + start)
    return cache


@pytest.mark.parametrize("windows", [4, np.int32(4), (4,), [4], (4, 4, 4, 4)])
def test_one_window_may_be_given_for_all_layers(windows: object) -> None:
    config = cache_config(windows=windows)
    assert [config.window(layer) for layer in range(4)] == [4] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 2.5}, "capacity is 2.5; give an integer of 1 or more"),
        ({"num_layers": 4.0}, "num_layers is 4.0; give an integer"),
        ({"num_layers": True}, "num_layers is True; give an integer"),
        ({"v_head_size": "3"}, "v_head_size is '3'; give an integer"),
        ({"window_slack": None}, "window_slack is None; give an integer"),
        ({"windows": 1.5}, "windows is 1.5; give an integer for all layers or one each"),
        ({"windows": None}, "windows is None; give an integer"),
        ({"windows": "4444"}, "windows is '4444'; give an integer"),
        ({"windows": (1.5,)}, r"windows\[0\] is 1.5; give -1 for none, or 1 or more"),
        ({"windows": 0}, r"windows\[0\] is 0; give -1 for none, or 1 or more"),
        ({"sizing": "static"}, "sizing is 'static'; give CacheSizing.STATIC or CacheSizing.DYNAMIC"),
        ({"dtype": "float32"}, "dtype is float32; give np.float16, np.float32 or np.float64"),
    ],
)
def test_configs_that_would_be_rounded_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_config(**changes)


def test_a_window_of_a_layer_is_an_integer() -> None:
    with pytest.raises(ConfigError, match=r"local_window_size is 1.5: it must be -1"):
        AttentionOptions(local_window_size=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, 1.5, None, "2", True])
@pytest.mark.parametrize("make", [contiguous, cells])
def test_only_a_number_of_tokens_can_be_asked_about(make: type, number: object) -> None:
    with pytest.raises(InputError, match=f"num_tokens is {number!r}; give an integer of 0 or more"):
        make().can_extend(number)
    assert make().can_extend(0)


@pytest.mark.parametrize("number", [1.5, 2.0, None, "2"])
def test_a_rewind_goes_to_an_integer(number: object) -> None:
    cache = contiguous(4)
    assert not cache.can_rewind(number)
    with pytest.raises(TrimError, match=f"rewind to {number}, but stored are 4"):
        cache.rewind(number)
    history = AttentionHistory(AttentionOptions())
    history.append(KEY, VALUE)
    with pytest.raises(TrimError, match=f"cannot trim to {number}: the history has 2 tokens"):
        history.trim(number)
    with pytest.raises(InputError, match=f"a position is {number!r}"):
        history.drop([0, number])
    assert history.length == len(history.positions) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((KEY.tolist(), VALUE, POSITION), "key is a list; give a numpy array"),
        ((KEY, VALUE.tolist(), POSITION), "value is a list; give a numpy array"),
        ((KEY, VALUE, [0, 1]), "position is a list; give a numpy array"),
        ((KEY.astype(str), VALUE, POSITION), "key is <U32; give real numbers"),
        ((KEY + 1j, VALUE, POSITION), "key is complex128; give real numbers"),
    ],
)
def test_rows_are_arrays_of_numbers(rows: tuple[object, object, object], message: str) -> None:
    cache = contiguous()
    with pytest.raises(InputError, match=message):
        cache.update_and_fetch(0, *rows)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"layer is 0.0; the cache has layers"):
        cache.update_and_fetch(0.0, KEY, VALUE, POSITION)  # type: ignore[arg-type]
    assert cache.length == 0


def test_a_mask_and_a_query_are_arrays() -> None:
    with pytest.raises(InputError, match="mask is a list; give a numpy array"):
        AttendSpec(MaskKind.EXPLICIT, [[True]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="query is a list; give a numpy array"):
        attend_spec(KEY.tolist(), KEY, VALUE, AttendSpec(MaskKind.NONE))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({0: ([1.5], 0)}, "a token of sequence 0 is 1.5; give an integer"),
        ({0: ([1], 0.5)}, "the first position of sequence 0 is 0.5"),
        ({0.5: ([1], 0)}, "sequence is 0.5; give an integer of 0 or more"),
        ({"a": ([1], 0)}, "sequence is 'a'; give an integer of 0 or more"),
    ],
)
def test_a_flat_step_is_of_integers(feeds: dict[object, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flatten_step(feeds)  # type: ignore[arg-type]


def test_forks_and_removals_are_of_integers() -> None:
    cache = cells(4)
    with pytest.raises(InputError, match=r"fork of sequence 0 up to 1.5; it has length 4"):
        cache.seq_cp(0, 1, 1.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"sequence 1.5 is no number of 0 or more"):
        cache.seq_cp(0, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TrimError, match=r"removal of 1.5\.\.4 from sequence 0"):
        cache.seq_rm(0, 1.5)  # type: ignore[arg-type]
    assert cache.seq_len(0) == 4
