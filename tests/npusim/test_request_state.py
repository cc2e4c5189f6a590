"""What a request keeps: trims, capacity, padding, resets, failures."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_llm import (
    TINY,
    assert_fresh,
    cache_bytes,
    failing_at,
    feed,
    new_request,
    text,
)
from tiny_model import HEAD_SIZE, KV_NUM_HEADS, TinyModel

from npusim import CapacityError, LLMInferRequest, TrimError


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("layout", ["LINEAR", "GATHERED"])
@pytest.mark.parametrize("back", [0, 1, 2, 3, 8, 22])
def test_a_step_trims_by_its_first_position(block: int, layout: str, back: int) -> None:
    request, tokens = new_request(block=block, layout=layout), text(23)
    feed(request, tokens[:20], 0)
    for start in range(20, 23, block):
        feed(request, tokens[start : start + block], start)
    assert request.num_stored_tokens == 23
    start = 23 - back
    for group in request.kv.groups:
        group.past[:, :, start:] = 1e3  # what is trimmed is never read again
    following = text(4, seed=back + 2)[1 : 1 + min(block, 3)]
    assert_fresh(TINY, feed(request, following, start), tokens[:start] + following)
    assert request.num_stored_tokens == start + len(following)


def test_rows_lie_in_the_slots_of_their_positions() -> None:
    request, tokens = new_request(prompt=12, response=5), text(13)
    feed(request, tokens[:10], 0)
    feed(request, tokens[10:], 10)
    (windowed, full, other) = request.kv.groups
    shape = (2, KV_NUM_HEADS, 16, HEAD_SIZE)
    assert [group.past.shape for group in (windowed, full, other)] == [shape] * 3
    embedding, qkv = TINY.weights().embedding, TINY.weights().qkv[0]
    values = (embedding[tokens] @ qkv)[:, -HEAD_SIZE:]
    np.testing.assert_allclose(windowed.value(0)[0, 0, :13], values, atol=1e-5)
    for group in request.kv.groups:
        assert not group.past[:, :, 13:].any()
        assert np.abs(group.past[:, :, :13]).max(axis=(0, 1, 3)).min() > 0.1


def test_trim_is_all_or_nothing_over_layers() -> None:
    model = TinyModel(windows=(4, -1, 4, -1))
    request = new_request(model, block=4, layout="RING")
    assert sorted(group.layout.capacity for group in request.kv.groups) == [7, 28]
    tokens = text(16)
    feed(request, tokens[:14], 0)
    before = cache_bytes(request)
    assert [m for m in range(15) if request.can_trim(m)] == [0, 10, 11, 12, 13, 14]
    with pytest.raises(TrimError, match=r"trim from 14 to 8 tokens: layers \[0, 2\] .* NPUSIM_COMMIT"):
        request.trim(8)
    assert (request.num_stored_tokens, cache_bytes(request)) == (14, before)
    assert request.trim(12) == 2
    assert request.num_stored_tokens == 12
    assert_fresh(model, feed(request, tokens[13:16], 12), tokens[:12] + tokens[13:])


@pytest.mark.parametrize("num_tokens", [-1, 8])
def test_a_trim_outside_the_conversation_is_refused(num_tokens: int) -> None:
    request = new_request()
    feed(request, text(7), 0)
    assert not request.can_trim(num_tokens)
    with pytest.raises(TrimError, match=f"trim to {num_tokens} tokens, but 7 are stored; give .* 0 to 7"):
        request.trim(num_tokens)
    assert request.num_stored_tokens == 7
    assert request.trim(7) == 0
    assert request.trim(0) == 7


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
@pytest.mark.parametrize("layout", ["LINEAR", "GATHERED", "ROLLING", "RING"])
def test_the_capacity_boundary(layout: str, commit: str) -> None:
    """Prompt 8, response 4: four tokens come out, the last of which need not be stored."""
    request = new_request(prompt=8, response=4, block=3, chunk=5, layout=layout, commit=commit)
    assert request.capacity == 11
    for length in (7, 8):
        tokens = text(length, seed=length)
        logits, generated = feed(request, tokens, 0), 1
        while request.num_stored_tokens < 11:
            tokens.append(int(logits[-1].argmax()))
            logits = feed(request, tokens[-1:], len(tokens) - 1)
            assert_fresh(TINY, logits, tokens)
            generated += 1
        assert generated == 4 + (8 - length)
        with pytest.raises(CapacityError, match=r"cache full: 1 tokens at position 11 need 12 slots, .* 11;"):
            feed(request, [3], 11)
        assert request.num_stored_tokens == 11
        if request.can_trim(10):
            assert_fresh(TINY, feed(request, tokens[10:], 10), tokens)
        else:  # ONNX Runtime's contract: without slack every step evicts
            assert (layout, commit) == ("ROLLING", "EAGER")
    with pytest.raises(CapacityError, match=r"a prompt of 9 tokens; NPUW_LLM_MAX_PROMPT_LEN is 8"):
        feed(request, text(9), 0)
    with pytest.raises(CapacityError, match=r"2 tokens at position 10 need 12 slots, the capacity is 11"):
        feed(request, [3, 4], 10)
    assert request.num_stored_tokens == 11


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_padding_is_neither_stored_nor_counted(commit: str) -> None:
    """The last chunk of a prompt and a partial block have padding rows."""
    ring = TinyModel(windows=(4,))
    request = new_request(ring, prompt=13, response=8, block=1, chunk=8, layout="RING", commit=commit)
    assert request.kv.groups[0].layout.capacity == {"EAGER": 4, "DEFERRED": 3}[commit]
    tokens = text(14)
    assert_fresh(ring, feed(request, tokens[:13], 0), tokens[:13])
    assert_fresh(ring, feed(request, tokens[13:], 13), tokens)

    flat = new_request(prompt=18, response=3, block=3, chunk=8, commit=commit)
    tokens = text(20)
    assert_fresh(TINY, feed(flat, tokens[:18], 0), tokens[:18])
    assert (flat.num_stored_tokens, flat.capacity) == (18, 20)
    assert not any(group.past[:, :, 18:].any() for group in flat.kv.groups)
    assert_fresh(TINY, feed(flat, tokens[18:], 18), tokens)


def test_a_partial_block_is_measured_by_its_real_tokens() -> None:
    request, tokens = new_request(prompt=12, response=5, block=4), text(16)
    assert request.capacity == 16
    feed(request, tokens[:12], 0)
    feed(request, tokens[12:14], 12)
    assert_fresh(TINY, feed(request, tokens[14:16], 14), tokens)  # ends at 16, its graph block at 18
    request.trim(15)
    before = cache_bytes(request)
    with pytest.raises(CapacityError, match="need 17 slots, the capacity is 16"):
        feed(request, tokens[:2], 15)
    assert (request.num_stored_tokens, cache_bytes(request)) == (15, before)


@pytest.mark.parametrize("layout", ["LINEAR", "ROLLING", "RING"])
@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_nothing_survives_into_the_next_conversation(layout: str, commit: str) -> None:
    options = {"layout": layout, "commit": commit}

    def conversation(request: LLMInferRequest, tokens: list[int], prompt: int) -> list[np.ndarray]:
        rows = [feed(request, tokens[:prompt], 0)]
        return [*rows, *(feed(request, tokens[at : at + 1], at) for at in range(prompt, len(tokens)))]

    a, b, longer = (text(12), 9), (text(5, seed=2), 5), (text(25, seed=3), 18)
    expected = {
        len(tokens): conversation(new_request(**options), tokens, at) for tokens, at in (a, b, longer)
    }
    request = new_request(**options)
    for tokens, at in (a, b, a, longer, a, longer):
        for got, fresh in zip(conversation(request, tokens, at), expected[len(tokens)], strict=True):
            assert np.array_equal(got, fresh)  # to the bit: no input buffer keeps anything either
        request.reset_state()
        assert not any(group.past.any() for group in request.kv.groups)
    with failing_at(2), pytest.raises(RuntimeError, match="the device is gone"):
        feed(request, longer[0][:18], 0)
    request.reset_state()
    for got, fresh in zip(conversation(request, *a), expected[12], strict=True):
        assert np.array_equal(got, fresh)


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_a_failing_step_leaves_the_last_completed_one(commit: str) -> None:
    request, tokens = new_request(commit=commit), text(13)
    feed(request, tokens[:9], 0)
    feed(request, tokens[9:11], 9)
    for start, block in ((11, tokens[11:13]), (10, [5]), (9, [5, 6])):
        with failing_at(1), pytest.raises(RuntimeError, match="the device is gone"):
            feed(request, block, start)
        assert request.num_stored_tokens == 11
    assert_fresh(TINY, feed(request, tokens[11:13], 11), tokens)
    with failing_at(1), pytest.raises(RuntimeError, match="the device is gone"):
        feed(request, text(6, seed=4), 0)
    assert request.num_stored_tokens == 13
    assert_fresh(TINY, feed(request, [2], 13), [*tokens, 2])


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_a_prefill_that_fails_in_its_second_chunk_keeps_the_first(commit: str) -> None:
    request, old, tokens = new_request(commit=commit), text(9), text(15, seed=5)
    feed(request, old, 0)
    with failing_at(2), pytest.raises(RuntimeError, match="the device is gone"):
        feed(request, tokens, 0)
    assert request.num_stored_tokens == 6
    assert_fresh(TINY, feed(request, tokens[6:9], 6), tokens[:9])


def test_deferred_rows_are_written_only_when_accepted() -> None:
    request, tokens = new_request(commit="DEFERRED"), text(12)
    feed(request, tokens[:6], 0)
    feed(request, tokens[6:9], 6)
    assert (request.num_stored_tokens, request.kv.num_committed_tokens) == (9, 6)
    assert not any(group.past[:, :, 6:].any() for group in request.kv.groups)
    assert_fresh(TINY, feed(request, tokens[10:12], 7), tokens[:7] + tokens[10:])
    assert (request.num_stored_tokens, request.kv.num_committed_tokens) == (9, 7)
    assert not any(group.past[:, :, 7:].any() for group in request.kv.groups)
    assert request.trim(8) == 1
    assert_fresh(TINY, feed(request, [4], 8), [*tokens[:7], tokens[10], 4])


class Interrupted(np.ndarray):
    """An input of a graph; after so many writes to any of them the call is interrupted."""

    writes_left = 0

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        Interrupted.writes_left -= 1
        if Interrupted.writes_left == 0:
            raise MemoryError


@pytest.mark.parametrize("writes", range(1, 9))
@pytest.mark.parametrize(("back", "length"), [(0, 1), (0, 2), (0, 4), (3, 2)])
def test_an_interrupt_while_a_graph_is_loaded_leaves_no_mask_behind(
    back: int, length: int, writes: int
) -> None:
    model, stored = TinyModel(windows=(4, -1), position_ids=True), text(14)
    request = new_request(model, block=4)
    feed(request, stored[:12], 0)
    feed(request, stored[12:], 12)
    (graph,) = request._generates.values()
    for name in ("_input_ids", "_attention_mask", "_position_ids"):
        setattr(graph, name, getattr(graph, name).view(Interrupted))
    Interrupted.writes_left = writes
    try:
        feed(request, [7] * length, 14 - back)
        stored = stored[: 14 - back] + [7] * length  # fewer writes than that
    except MemoryError:
        assert request.num_stored_tokens == 14
    Interrupted.writes_left = 0
    for following in (text(3, seed=writes), text(1, seed=9), text(4, seed=5)):
        assert_fresh(model, feed(request, following, len(stored)), stored + following)
        stored += following
