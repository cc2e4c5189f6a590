"""NPUW's rounding of lengths: pure rules, and the installed NPUW where there is one."""

import importlib.util
from pathlib import Path

import pytest

from npusim import npuw
from npusim.config import LLMConfig
from npusim.errors import ConfigError
from npusim.npuw_profile import npuw_lengths, round_up

_GRID = Path(__file__).parents[2] / "tools" / "npuw_grid.py"


@pytest.mark.parametrize(
    ("prompt", "response", "block", "capacity"),
    [
        (16, 16, 1, 127),
        (16, 16, 2, 120),
        (16, 16, 8, 120),
        (16, 16, 9, 112),
        (64, 65, 1, 191),
        (65, 64, 1, 191),
        (200, 64, 8, 312),
    ],
)
def test_capacity(prompt: int, response: int, block: int, capacity: int) -> None:
    lengths = npuw_lengths(max_prompt_len=prompt, min_response_len=response, max_generation_token_len=block)
    assert lengths.capacity == capacity
    assert lengths.max_prompt_len == lengths.chunk_size == round_up(prompt, 64)
    assert lengths.max_generation_tokens == (1 if block == 1 else round_up(block, 8))
    assert not lengths.chunked


def test_a_chunk_below_the_prompt_rounds_the_prompt() -> None:
    lengths = npuw_lengths(max_prompt_len=300, min_response_len=64, prefill_chunk_size=256)
    assert (lengths.max_prompt_len, lengths.chunk_size, lengths.capacity) == (512, 256, 575)
    assert lengths.chunked
    whole = npuw_lengths(max_prompt_len=300, min_response_len=64, prefill_chunk_size=256, whole_prefill=True)
    assert (whole.max_prompt_len, whole.chunk_size) == (320, 320)
    none = npuw_lengths(max_prompt_len=300, min_response_len=64, prefill_chunk_size=0)
    assert (none.max_prompt_len, none.chunk_size) == (320, 320)


def test_a_chunk_that_covers_the_prompt_may_have_any_length() -> None:
    assert npuw_lengths(max_prompt_len=60, min_response_len=9, prefill_chunk_size=66).chunk_size == 64


def test_rows_of_a_prompt() -> None:
    lengths = npuw_lengths(
        max_prompt_len=128, min_response_len=64, max_generation_token_len=5, prefill_chunk_size=16
    )
    assert [lengths.prefill_rows(n) for n in (1, 7, 8, 9, 16, 17, 18, 32, 33)] == [1, 7, 8, 8, 8, 1, 2, 8, 1]


def test_lengths_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="CHUNK_SIZE=24; NPUW takes powers of two"):
        npuw_lengths(max_prompt_len=64, min_response_len=64, prefill_chunk_size=24)
    with pytest.raises(ConfigError, match="MIN_RESPONSE_LEN=0; at least 1"):
        npuw_lengths(max_prompt_len=64, min_response_len=0)
    with pytest.raises(ConfigError, match="leaves no room in the 128 slots"):
        npuw_lengths(max_prompt_len=3, min_response_len=3, max_generation_token_len=122)


_UNAVAILABLE = npuw.unavailable_reason()


@pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))
def test_the_installed_npuw_agrees() -> None:
    """A corner of the grid of tools/npuw_grid.py, which compares prompt, block, rows and capacity."""
    spec = importlib.util.spec_from_file_location("npuw_grid", _GRID)
    assert spec is not None
    assert spec.loader is not None
    grid = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grid)
    points = [
        grid.Point(prompt=16, response=65, block=1),
        grid.Point(prompt=65, response=16, block=3),
        grid.Point(prompt=100, response=64, block=9, chunk=32),
        grid.Point(prompt=129, response=64, block=8, chunk=128),
    ]
    for point in points:
        assert grid.measure(point) == grid.predict(point), point


@pytest.mark.parametrize("positions", [1024, 1000, 513, 200])
@pytest.mark.parametrize("response", [{}, {"NPUW_LLM_MIN_RESPONSE_LEN": 70}])
def test_lengths_left_open_fit_the_model_after_rounding(positions: int, response: dict[str, int]) -> None:
    config = LLMConfig.from_mapping({"NPUSIM_PROFILE": "NPUW", **response}).fitted(positions)
    assert config.max_prompt_len is not None
    assert config.max_prompt_len % 64 == 0
    assert positions - 64 < config.capacity <= positions
