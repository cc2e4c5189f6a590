"""What the attention of npusim.reference refuses, and that it then changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from gqa_data import random_history
from gqa_models import GQA

from npusim.errors import ConfigError, InputError
from npusim.reference import AttentionHistory, AttentionOptions, Rotary, attend, rotate


def test_a_refused_step_changes_nothing() -> None:
    history = random_history(GQA(), 6, seed=1)
    told = AttentionHistory(AttentionOptions(head_sink=[1.0, 2.0, 3.0, 4.0]))
    told.append(history.key[:, :, :4], history.value[:, :, :4])
    before = told.present_key
    with pytest.raises(InputError, match="head_sink has 4 logits, the query 2 heads"):
        told.step(history.query[:, :2, 4:], history.key[:, :, 4:], history.value[:, :, 4:])
    assert told.length == 4
    np.testing.assert_array_equal(told.present_key, before)
    with pytest.raises(InputError, match=r"value is \(1, 2, 2, 5\), but rows before it \(1, 2, 4, 16\)"):
        told.append(history.key[:, :, 4:], history.value[:, :, 4:, :5])
    np.testing.assert_array_equal(told.present_key, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_window_size": 0}, "local_window_size is 0"),
        ({"local_window_size": -2}, "local_window_size is -2"),
        ({"local_window_size": 3, "causal": False}, "3 with causal=0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"head_sink": [1.0, float("inf")]}, "one finite logit for each query head"),
        ({"head_sink": [[1.0]]}, "one finite logit for each query head"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionOptions(**options)


@pytest.mark.parametrize(("cos", "sin"), [((4, 2), (4, 3)), ((4,), (4,)), ((0, 2), (0, 2))])
def test_rotary_tables_that_do_not_match_are_refused(cos: tuple[int, ...], sin: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="two equal, non-empty tables"):
        Rotary(cos=np.ones(cos), sin=np.ones(sin))


TABLE = Rotary(cos=np.ones((9, 3)), sin=np.zeros((9, 3)))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 9], "rotary positions 0 to 9: the tables hold 0 to 8"),
        ([-1, 3], "rotary positions -1 to 3"),
        ([0, 1, 2], "one integer for each of the 2 rows"),
        ([0.0, 1.0], "one integer for each of the 2 rows"),
    ],
)
def test_rotary_positions_that_cannot_be_are_refused(positions: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rotate(np.ones((1, 2, 2, 7)), TABLE, positions)


def test_a_head_narrower_than_the_rotary_tables_is_refused() -> None:
    with pytest.raises(InputError, match="rotate 6 channels, the head size is only 5"):
        rotate(np.ones((1, 2, 2, 5)), TABLE, [0, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": np.ones((1, 5, 3, 16))}, "query heads must be a multiple of key heads"),
        ({"query": np.ones((1, 4, 3, 8))}, "head sizes equal"),
        ({"query": np.ones((1, 4, 8, 16))}, "query has 8 rows, the history only 7 tokens"),
        ({"query": np.ones((2, 4, 3, 16))}, r"query has shape \(2, 4, 3, 16\)"),
        ({"key": np.ones((1, 2, 7, 16), np.complex64)}, "key has type complex64"),
        ({"value": np.ones((1, 2, 6, 16))}, "must agree in batch, heads and rows"),
        ({"value": np.ones((1, 2, 0, 16))}, "no dimension 0"),
        ({"attention_bias": np.ones((1, 2, 3, 7))}, r"attention_bias has shape \(1, 2, 3, 7\)"),
        ({"attention_bias": np.ones((1, 4, 3, 6))}, "at least 7"),
        ({"attention_bias": np.full((1, 4, 3, 7), -np.inf)}, "position 4 sees no key"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, np.ndarray], message: str) -> None:
    arrays = {"query": np.ones((1, 4, 3, 16)), "key": np.ones((1, 2, 7, 16)), "value": np.ones((1, 2, 7, 16))}
    with pytest.raises(InputError, match=message):
        attend(**{**arrays, **changes}, options=AttentionOptions())


def test_a_query_without_any_key_is_refused() -> None:
    told = AttentionHistory(AttentionOptions(local_window_size=2))
    with pytest.raises(InputError, match="the history is empty"):
        told.attend(np.ones((1, 4, 1, 16)))
    told.append(np.ones((1, 2, 5, 16)), np.ones((1, 2, 5, 16)))
    told.drop([3, 4])
    with pytest.raises(InputError, match="the query at position 4 sees no key"):
        told.attend(np.ones((1, 4, 1, 16)))


def test_query_and_key_of_a_step_must_have_the_same_rows() -> None:
    told = AttentionHistory(AttentionOptions())
    with pytest.raises(InputError, match="must have the same rows"):
        told.step(np.ones((1, 4, 1, 16)), np.ones((1, 2, 2, 16)), np.ones((1, 2, 2, 16)))
