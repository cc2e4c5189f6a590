"""Generate graphs of several capacities: the smallest that suffices runs, and the numbers stay."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_llm import TINY, TOLERANCE, assert_fresh, cache_bytes, failing_at, feed, new_request, text
from tiny_model import TinyModel

from npusim import ConfigError, LLMInferRequest
from npusim.config import LLMConfig

CAPACITIES = (11, 14, 20, 28)  # prompts of 3, 6 and 12 besides the response of 9, and all of it
BLOCK = 3
MIXED = TinyModel(windows=(4, -1, 4, 13), sinks=(2,))


def pyramid_request(model: TinyModel = TINY, **options: str | int) -> LLMInferRequest:
    return new_request(model, pyramid="YES", pyramid_base=3, **options)


def arranged_for(request: LLMInferRequest) -> int:
    """Slots of the layer without a window."""
    (full,) = (group for group in request.kv.groups if group.layout.local_window_size < 0)
    return full.layout.capacity


def expected(start: int) -> int:
    """The smallest graph with room for a whole block, or the largest."""
    return next((size for size in CAPACITIES if start + BLOCK <= size), CAPACITIES[-1])


def config_of(**values: str | int) -> LLMConfig:
    return LLMConfig.from_mapping({"NPUW_LLM_GENERATE_PYRAMID": "YES", **values})


def test_the_sizes_are_those_of_npuw() -> None:
    config = config_of(NPUW_LLM_MAX_PROMPT_LEN=5000, NPUW_LLM_MIN_RESPONSE_LEN=65)
    assert config.generate_capacities == (1088, 2112, 4160, 5064)
    whole = config_of(NPUW_LLM_MAX_PROMPT_LEN=4096, NPUW_LLM_MIN_RESPONSE_LEN=129)
    assert whole.generate_capacities == (1152, 2176, 4224)
    assert config_of(NPUW_LLM_MAX_PROMPT_LEN=1024).generate_capacities == (1151,)


def test_a_size_below_the_block_is_left_out() -> None:
    config = config_of(
        NPUW_LLM_MAX_PROMPT_LEN=30,
        NPUW_LLM_MIN_RESPONSE_LEN=1,
        NPUW_LLM_MAX_GENERATION_TOKEN_LEN=9,
        NPUSIM_PYRAMID_BASE=2,
    )
    assert config.generate_capacities == (16, 30)


def test_without_the_key_there_is_one_size() -> None:
    assert LLMConfig.from_mapping({"NPUW_LLM_MAX_PROMPT_LEN": 9000}).generate_capacities == (9127,)


def test_the_least_base() -> None:
    with pytest.raises(ConfigError, match="NPUSIM_PYRAMID_BASE=0; at least 1 is needed"):
        config_of(NPUSIM_PYRAMID_BASE=0)


@pytest.mark.parametrize(
    ("layout", "commit"),
    [
        ("LINEAR", "EAGER"),
        ("LINEAR", "DEFERRED"),
        ("GATHERED", "EAGER"),
        ("ROLLING", "DEFERRED"),
        ("RING", "EAGER"),
    ],
)
@pytest.mark.parametrize("prompt", [2, 9, 17])
def test_every_boundary_in_single_tokens(prompt: int, layout: str, commit: str) -> None:
    """The graph by the rule, the logits of a fresh run, the same rows as with one graph."""
    request = pyramid_request(MIXED, layout=layout, commit=commit)
    plain = new_request(MIXED, layout=layout, commit=commit)
    tokens = text(28, seed=prompt)
    for each in (request, plain):
        feed(each, tokens[:prompt], 0)
    for start in range(prompt, 28):
        logits = feed(request, tokens[start : start + 1], start)
        assert arranged_for(request) == expected(start)
        assert_fresh(MIXED, logits, tokens[: start + 1])
        np.testing.assert_allclose(logits, feed(plain, tokens[start : start + 1], start), atol=2 * TOLERANCE)
        assert_same_rows(request, plain)


def assert_same_rows(request: LLMInferRequest, plain: LLMInferRequest) -> None:
    """What is stored, slot by slot; rounding aside, as the two may run different forms of attention."""
    committed = request.kv.num_committed_tokens
    assert committed == plain.kv.num_committed_tokens
    for one, other in zip(request.kv.groups, plain.kv.groups, strict=True):
        slots = [one.layout.slot_of(position, committed) for position in one.layout.resident(committed)]
        np.testing.assert_allclose(one.past[:, :, slots], other.past[:, :, slots], atol=1e-5)


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_rejections_at_every_boundary(back: int, commit: str) -> None:
    """Blocks of three of which some are taken back, so that a boundary lies at every place in a block."""
    request, tokens = pyramid_request(commit=commit), text(28)
    feed(request, tokens[:6], 0)
    wrong = text(28, seed=5)
    start = 6
    while start + BLOCK <= 28:
        draft = tokens[start : start + BLOCK - back] + wrong[:back]
        assert_fresh(TINY, feed(request, draft, start), tokens[:start] + draft)
        start += max(BLOCK - back, 0)
        if back == BLOCK:
            assert_fresh(TINY, feed(request, tokens[start : start + 1], start), tokens[: start + 1])
            start += 1


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
@pytest.mark.parametrize("target", [2, 8, 9, 11, 12, 17, 18, 24])
def test_trims_back_over_boundaries(target: int, commit: str) -> None:
    """Both by `trim` and by the first position of a step; the step after it is on the smaller graph."""
    tokens = text(28)
    for by_position in (False, True):
        request = pyramid_request(commit=commit)
        feed(request, tokens[:20], 0)
        feed(request, tokens[20:23], 20)
        feed(request, tokens[23:25], 23)
        assert arranged_for(request) == 28
        if not by_position:
            request.trim(target)
        other = text(4, seed=target + 3)[1:]
        assert_fresh(TINY, feed(request, other[:1], target), tokens[:target] + other[:1])
        assert_fresh(TINY, feed(request, other[1:], target + 1), tokens[:target] + other)
        assert arranged_for(request) == expected(target + 1)


@pytest.mark.parametrize("chunk", [0, 6, 20])
def test_a_new_conversation_after_a_long_one(chunk: int) -> None:
    request = pyramid_request(chunk=chunk)
    for length, seed in ((20, 2), (2, 3), (12, 4), (5, 6)):
        tokens = text(length + 6, seed=seed)
        assert_fresh(TINY, feed(request, tokens[:length], 0), tokens[:length])
        for start in range(length, length + 6, BLOCK):
            logits = feed(request, tokens[start : start + BLOCK], start)
            assert_fresh(TINY, logits, tokens[: start + BLOCK])
            assert arranged_for(request) == expected(start)


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_a_failed_step_that_would_change_the_graph(commit: str) -> None:
    """Going on in the larger graph, dropping to the smaller, and starting anew."""
    tokens = text(20)
    for start in (12, 3, 0):
        request = pyramid_request(commit=commit)
        feed(request, tokens[:10], 0)
        feed(request, tokens[10:12], 10)
        with failing_at(1), pytest.raises(RuntimeError, match="the device is gone"):
            feed(request, text(2, seed=8), start)
        assert request.num_stored_tokens == 12
        assert_fresh(TINY, feed(request, tokens[12:15], 12), tokens[:15])


def test_window_sized_buffers_are_the_same_for_all_graphs() -> None:
    request = pyramid_request(MIXED, layout="RING")
    feed(request, text(4), 0)
    before = {group.layers: group for group in request.kv.groups}
    feed(request, text(3, seed=2), 4)
    for group in request.kv.groups:
        assert (before[group.layers] is group) == (group.layout.local_window_size > 0)
        assert np.shares_memory(before[group.layers].past, group.past)


def test_the_memory_is_that_of_one_graph() -> None:
    for layout in ("LINEAR", "RING"):
        request, plain = pyramid_request(MIXED, layout=layout), new_request(MIXED, layout=layout)
        assert request.kv_nbytes == plain.kv_nbytes
        feed(request, text(4), 0)
        feed(request, text(3, seed=2), 4)
        assert arranged_for(request) == 11
        assert request.kv_nbytes == plain.kv_nbytes


def test_reset_leaves_nothing_of_any_graph() -> None:
    request, tokens = pyramid_request(), text(15)
    feed(request, tokens[:2], 0)
    for start in range(2, 15):
        feed(request, tokens[start : start + 1], start)
    assert arranged_for(request) == 20
    request.reset_state()
    for capacity in CAPACITIES:
        request.kv.arrange(capacity)
        assert not any(group.past.any() for group in request.kv.groups)


@pytest.mark.parametrize("layout", ["LINEAR", "GATHERED", "RING"])
def test_the_sanitizer_watches_the_graph_that_runs(layout: str) -> None:
    request, tokens = pyramid_request(layout=layout, sanitize="YES"), text(28)
    plain = pyramid_request(layout=layout)
    for each in (request, plain):
        feed(each, tokens[:4], 0)
    for start in (4, 7, 9, 10, 13, 15, 18, 8 if layout != "RING" else 19):
        logits = feed(request, tokens[start : start + BLOCK], start)
        np.testing.assert_array_equal(logits, feed(plain, tokens[start : start + BLOCK], start))
    assert cache_bytes(request) == cache_bytes(plain)
