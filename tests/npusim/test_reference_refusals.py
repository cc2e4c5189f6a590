"""The references refuse what they cannot compute, by name and before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from cache_log import Log, cache_config, flat_step
from cell_steps import cells_of, store

from npusim.errors import ConfigError, InputError
from npusim.reference import (
    AttendSpec,
    AttentionHistory,
    AttentionOptions,
    CacheSizing,
    ContiguousReferenceCache,
    FlatStep,
    MaskKind,
    Rotary,
    attend_spec,
    band_spec,
    flatten_step,
)
from npusim.reference.caches import Rows
from npusim.reference.row_store import RowStore

EVERY_KEY = AttendSpec(MaskKind.NONE)


def rows(*shape: int) -> Rows:
    return np.random.default_rng(len(shape)).normal(size=shape)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 3, 0), "window is 0; give -1 for none, or 1 or more"),
        ((1, 3, -2), "window is -2"),
        ((2, 3, 1.5), "window is 1.5; give an integer"),
        ((1, 3, True), "window is True; give an integer"),
        ((2.0, 3, 1), "num_new is 2.0; give an integer"),
        ((3, 2, -1), "3 new rows and 2 keys"),
        ((0, 3, -1), "0 new rows and 3 keys; a step has a row"),
    ],
)
def test_a_band_of_rows_that_see_a_key(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        band_spec(*sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": rows(2, 1, 4)}, r"query has shape \(2, 1, 4\); give \[batch, heads, rows, size\]"),
        ({"key": rows(1, 1, 0, 4), "value": rows(1, 1, 0, 3)}, r"key has shape \(1, 1, 0, 4\)"),
        ({"query": rows(1, 2, 1, 2)}, "query and key must agree in batch and head size"),
        ({"query": rows(2, 2, 1, 4)}, "query and key must agree in batch and head size"),
        ({"value": rows(1, 2, 3, 3)}, "key and value in batch, heads and rows"),
        ({"value": rows(1, 1, 6, 3)}, "key and value in batch, heads and rows"),
        ({"spec": None}, "the spec is a NoneType; give an AttendSpec"),
        ({"scale": np.nan}, "scale is nan; give a finite number"),
        ({"scale": "1"}, "scale is '1'; give a finite number"),
        ({"scale": 10**400}, "; give a finite number"),
        ({"head_sink": np.zeros(5)}, "give a finite logit for each of 2 heads"),
        ({"head_sink": np.zeros(1)}, "give a finite logit for each of 2 heads"),
        ({"head_sink": np.array([0, np.nan])}, "give a finite logit for each of 2 heads"),
        ({"head_sink": [0, 0]}, "head_sink is a list; give a numpy array"),
        ({"out_dtype": np.int32}, "out_dtype is .*int32.*; give np.float16"),
    ],
)
def test_attention_of_what_fits(changes: dict[str, object], message: str) -> None:
    given = {"query": rows(1, 2, 1, 4), "key": rows(1, 1, 3, 4), "value": rows(1, 1, 3, 3), "spec": EVERY_KEY}
    assert attend_spec(**given).shape == (1, 2, 1, 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        attend_spec(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"attention_bias": "abc"}, "attention_bias has type <U3, it must be real numbers"),
        ({"attention_bias": [[1], [1, 2]]}, "attention_bias is no array"),
        ({"attention_bias": 1j}, "attention_bias has type complex128"),
        ({"attention_bias": object()}, "attention_bias has type object"),
        ({"query": [[1], [2, 3]]}, "query is no array"),
        ({"key": [[1], [2, 3]]}, "key is no array"),
        ({"position_ids": [[1], [2, 3]]}, "rotary positions is no array"),
    ],
)
def test_a_history_does_not_grow_by_a_refused_step(step: dict[str, object], message: str) -> None:
    rotary = Rotary(cos=np.ones((8, 2)), sin=np.zeros((8, 2)))
    history = AttentionHistory(AttentionOptions(rotary=rotary))
    given = {"query": rows(1, 2, 1, 4), "key": rows(1, 1, 1, 4), "value": rows(1, 1, 1, 4)}
    history.step(**given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        history.step(**{**given, **step})  # type: ignore[arg-type]
    assert history.length == len(history.positions) == history.present_key.shape[2] == 1


def test_a_history_does_not_grow_by_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Rows:
        raise MemoryError

    history = AttentionHistory(AttentionOptions())
    history.append(rows(1, 1, 2, 4), rows(1, 1, 2, 4))
    with monkeypatch.context() as patched:
        patched.setattr(AttentionHistory, "_softmax", fail)
        with pytest.raises(MemoryError):
            history.step(rows(1, 2, 1, 4), rows(1, 1, 1, 4), rows(1, 1, 1, 4))
    assert history.length == len(history.positions) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "x"}, "scale is 'x': it must be finite"),
        ({"scale": np.array([1.0, 2.0])}, "scale is .*: it must be finite"),
        ({"head_sink": "x"}, "head_sink has type <U1, it must be real numbers"),
        ({"rotary": 5}, "rotary is 5: it must be a Rotary"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        (None, "at least one sequence, and each sequence at least one token; got None"),
        ({0: (np.zeros(0, np.int64), 0)}, "at least one token; sequence 0 has none"),
        ({0: (5, 0)}, r"sequence 0: .* not iterable; give \(tokens, first position\)"),
        ({0: [1]}, "sequence 0: not enough values"),
        ({0: ([2**70], 0)}, "a token of sequence 0 is 1180591620717411303424; at most 2147483647"),
        ({0: ([1, 2], 2**63 - 1)}, "the first position of sequence 0 is 9223372036854775807; at most"),
    ],
)
def test_a_flat_step_of_what_can_be_laid_out(feeds: dict[int, tuple[list[int], int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flatten_step(feeds)


def test_a_flat_step_may_be_of_arrays() -> None:
    step = flatten_step({0: (np.array([7, 8]), np.int64(3))})
    assert (step.tokens.tolist(), step.positions.tolist(), step.last_rows) == ([7, 8], [3, 4], {0: 1})


def flat(tokens: object, positions: object, sequences: object, last_rows: dict[int, int]) -> FlatStep:
    return FlatStep(np.array(tokens), np.array(positions), np.array(sequences), last_rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flat([1, 2], [0, 7], [0, 1], {0: 0}), "last_rows is {0: 0}; .* it is {0: 0, 1: 1}"),
        (lambda: flat([1, 2], [0, 7], [0, 1], {0: 0, 1: 1}), r"sequence 1: positions \[7\] must be \[0\]"),
        (lambda: flat([1, 2], [0, 0], [0, 0], {0: 1}), r"sequence 0: positions \[0, 0\] must be \[0, 1\]"),
        (lambda: flat([1], [0], [-1], {-1: 0}), "sequence -1: .* named by 0 or more"),
        (lambda: flat([1, 2, 3], [0], [0], {0: 0}), r"positions is int64 \(1,\); .* for each token, \[3\]"),
        (lambda: flat([1, 2], [0, 1], [0], {0: 0}), r"sequences is int64 \(1,\)"),
        (lambda: flat([1.0], [0.0], [0.0], {0: 0}), r"tokens is float64 \(1,\); give an integer"),
        (lambda: FlatStep([1], [0], [0], {0: 0}), "tokens is a list; give a numpy array"),  # type: ignore[arg-type]
        (lambda: None, "a step is a NoneType; give what flatten_step returns"),
    ],
)
def test_a_step_names_all_its_sequences(make: Callable[[], FlatStep], message: str) -> None:
    cache = cells_of(num_layers=1, windows=-1)
    with pytest.raises(InputError, match=message):
        cache.begin_step(make())
    store(cache, Log(cache.config, np.random.default_rng(1)), s0=2, s1=1)


@pytest.mark.parametrize("sequence", ["a", None, 0.0, True, -1])
def test_a_sequence_is_named_by_a_number(sequence: int) -> None:
    cache = cells_of()
    for ask in (cache.seq_len, cache.seq_rm, lambda name: cache.seq_cp(name, 5)):
        with pytest.raises(InputError, match=f"sequence is {re.escape(repr(sequence))}; give an integer"):
            ask(sequence)


def test_a_config_is_its_own() -> None:
    windows = [np.uint8(255), -1]
    config = cache_config(num_layers=2, windows=windows, window_slack=np.uint8(7), capacity=np.int16(900))
    windows[0] = 0
    assert [config.window(layer) for layer in range(2)] == [255, -1]
    assert [config.num_slots(layer) for layer in range(2)] == [261, 900], "beyond 8 bits"


# --- steps that fail ---------------------------------------------------------------------------------------


def step_of(cache: ContiguousReferenceCache, first: int, count: int, dtype: type[np.integer]) -> list[Rows]:
    """One whole step of known rows; the key history of each layer."""
    position = np.arange(first, first + count).astype(dtype)
    layers = range(cache.config.num_layers)
    key, value = rows(1, 2, count, 5), rows(1, 2, count, 3)
    return [cache.update_and_fetch(layer, key, value, position)[0] for layer in layers]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64])
def test_positions_may_be_of_any_integer_type(dtype: type[np.integer]) -> None:
    config = cache_config(num_layers=2, windows=(4, -1), capacity=300)
    one, other = ContiguousReferenceCache(config), ContiguousReferenceCache(config)
    for first, count in ((0, 6), (6, 2), (8, 1)):
        given, wide = step_of(one, first, count, dtype), step_of(other, first, count, np.int64)
        assert all(map(np.array_equal, given, wide))
    assert one.length == 9


def test_a_step_that_finds_no_memory_leaves_every_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cache_config(num_layers=2, windows=(4, -1), sizing=CacheSizing.DYNAMIC)
    cache, fresh = ContiguousReferenceCache(config), ContiguousReferenceCache(config)
    for each in (cache, fresh):
        step_of(each, 0, 6, np.int64)

    def full(_store: RowStore, num_rows: int, _size: int) -> Rows:
        raise MemoryError(f"no room for {num_rows} rows")

    with monkeypatch.context() as patched:
        patched.setattr(RowStore, "_zeros", full)
        with pytest.raises(MemoryError, match="no room"):
            step_of(cache, 6, 2, np.int64)
    cache.abandon_step()
    assert cache.length == 6
    assert all(map(np.array_equal, step_of(cache, 6, 1, np.int64), step_of(fresh, 6, 1, np.int64)))


def test_cells_take_positions_of_any_integer_type() -> None:
    cache = cells_of(num_layers=1, windows=4)
    entries = Log(cache.config, np.random.default_rng(2)).new_entries(0, 0, 3)
    step = flat_step(entries)
    small = FlatStep(step.tokens, step.positions.astype(np.uint64), step.sequences, step.last_rows)
    cache.begin_step(small)
    _, _, spec = cache.update_and_fetch(0, rows(1, 2, 3, 5), rows(1, 2, 3, 3), small.positions)
    assert spec.mask is not None
    assert spec.mask.tolist() == np.tri(3, dtype=bool).tolist()
