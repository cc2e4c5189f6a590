"""Every cache layout and commit policy on the model files, with rejections, against ONNX Runtime."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from driving import WINDOW, Setup, compiled, feed
from model_files import READABLE
from ort_runner import OrtModel

from npusim import LLMInferRequest, TrimError
from npusim.layout import CommitPolicy

WINDOWED = ("phi3_window8", "gemma3_alternating", "gptoss_attention", "swa_target", "swa_draft")
WINDOWS = {
    "phi3_window8": (8, 8, 8, 8),
    "gemma3_alternating": (8, 8, -1, 8),
    "gptoss_attention": (8, -1, 8, -1),
    "swa_target": (32, -1, 32, -1),
    "swa_draft": (32, -1),
}
LAYOUTS = ("LINEAR", "GATHERED", "ROLLING", "RING")
BLOCK = 4
PROMPT = 23
TOLERANCE = {name: 1e-4 if name.startswith("swa") else 1e-5 for name in WINDOWED}


def capacity_of(name: str) -> int:
    """Two windows and more past the prompt."""
    return PROMPT + 2 * WINDOW[name] + 20


def setup_of(name: str, layout: str, commit: CommitPolicy) -> Setup:
    """Chunks are whole, smaller than the window, larger, and of one token, in turn over the cases."""
    number = (
        WINDOWED.index(name) + LAYOUTS.index(layout) + (layout == "RING" and commit is CommitPolicy.EAGER)
    )
    return Setup(
        prompt=PROMPT,
        response=capacity_of(name) - PROMPT + 1,
        block=BLOCK,
        chunk=(0, 5, 11, 1)[number % 4],
        layout=layout,
        slack=0 if layout in ("LINEAR", "GATHERED") else (3, 0)[number % 2],
        commit=commit,
    )


def rows_of(setup: Setup, window: int) -> int:
    """Slots of a layer, by the definitions."""
    capacity = setup.prompt + setup.response - 1
    if window < 0 or setup.layout in ("LINEAR", "GATHERED"):
        return capacity
    if setup.layout == "ROLLING":
        return window + setup.slack
    return window - 1 + setup.slack + (BLOCK if setup.commit is CommitPolicy.EAGER else 0)


def converse(
    request: LLMInferRequest, ort: OrtModel, tokens: list[int], start: int, tolerance: float
) -> None:
    """The same block to both; ONNX Runtime's buffers hold everything, so its rewind is exact."""
    got = feed(request, tokens, start)
    if start < ort.num_stored_tokens:
        ort.rewind(start)
    np.testing.assert_allclose(got, ort.feed(tokens)[0], rtol=0, atol=tolerance)
    assert request.num_stored_tokens == ort.num_stored_tokens


@pytest.mark.parametrize("commit", CommitPolicy, ids=lambda commit: commit.value)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WINDOWED)
def test_rejections_in_every_layout(name: str, layout: str, commit: CommitPolicy) -> None:
    setup = setup_of(name, layout, commit)
    llm = compiled(name, setup)
    request, ort = llm.create_infer_request(), OrtModel(READABLE[name], max_length=capacity_of(name))
    rows = [rows_of(setup, window) for window in WINDOWS[name]]
    assert [cache.layout.capacity for cache in llm.caches] == rows
    row_nbytes = 2 * llm.spec.layers[0].kv_num_heads * 16 * 4
    assert llm.kv_nbytes == request.kv_nbytes == sum(rows) * row_nbytes
    assert request.kv_nbytes == sum(group.past.nbytes for group in request.kv.groups)
    rng = np.random.default_rng(list(map(ord, name + layout)))
    refused = 0
    for prompt_length in (PROMPT, 1, 9):
        ort.reset()
        converse(request, ort, rng.integers(0, 257, prompt_length).tolist(), 0, TOLERANCE[name])
        last = 0
        while request.num_stored_tokens + BLOCK <= request.capacity:
            rejected = int(rng.integers(0, last + 1))
            start = request.num_stored_tokens - rejected
            if not request.can_trim(start):
                assert (layout, commit) == ("ROLLING", CommitPolicy.EAGER), "the last block can be rejected"
                with pytest.raises(TrimError, match=f"to {start} tokens: layers"):
                    feed(request, [1], start)
                refused += 1
                start = request.num_stored_tokens
            last = int(rng.integers(1, BLOCK + 1))
            tokens = rng.integers(0, 257, last).tolist()
            converse(request, ort, tokens, start, TOLERANCE[name])
    assert (refused > 0) == ((layout, commit) == ("ROLLING", CommitPolicy.EAGER))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WINDOWED)
def test_deep_trims_are_exact_or_refused(name: str, layout: str) -> None:
    setup = setup_of(name, layout, CommitPolicy.EAGER)
    request = compiled(name, setup).create_infer_request()
    ort = OrtModel(READABLE[name], max_length=capacity_of(name))
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, 257, capacity_of(name)).tolist()
    outcomes = set()
    for stored in (WINDOW[name], 17, 2 * WINDOW[name] + 5):
        for num_tokens in range(0, stored, 3):
            request.reset_state()
            ort.reset()
            converse(request, ort, tokens[: min(stored, PROMPT)], 0, TOLERANCE[name])
            for start in range(request.num_stored_tokens, stored, BLOCK):
                converse(request, ort, tokens[start : min(start + BLOCK, stored)], start, TOLERANCE[name])
            outcomes.add(request.can_trim(num_tokens))
            if request.can_trim(num_tokens):
                assert request.trim(num_tokens) == stored - num_tokens
                converse(request, ort, [7, 3], num_tokens, TOLERANCE[name])
            else:
                with pytest.raises(TrimError, match=f"from {stored} to {num_tokens} tokens: layers"):
                    request.trim(num_tokens)
                converse(request, ort, [7, 3], stored, TOLERANCE[name])
    assert outcomes == ({True} if layout in ("LINEAR", "GATHERED") else {True, False})


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("name", ["gemma3_alternating", "gptoss_attention", "swa_target", "swa_draft"])
def test_rolling_rows_are_those_of_onnx_runtimes_windowed_cache(name: str, slack: int) -> None:
    rows, length = WINDOW[name] + slack, capacity_of(name)
    setup = Setup(
        prompt=PROMPT, response=length - PROMPT + 1, block=BLOCK, chunk=5, layout="ROLLING", slack=slack
    )
    llm = compiled(name, setup)
    request = llm.create_infer_request()
    ort = OrtModel(READABLE[name], max_length=length, sliding_rows=rows)
    rng, sizes = np.random.default_rng(4), itertools.cycle((1, 4, 3, 1, 2))
    total, size = 0, PROMPT
    while total + size <= length:
        converse(request, ort, rng.integers(0, 257, size).tolist(), total, TOLERANCE[name])
        total += size
        resident = total
        while resident > rows:
            resident -= rows - WINDOW[name] + 1
        for spec in llm.spec.layers:
            if WINDOWS[name][spec.index] < 0:
                continue
            group = next(group for group in request.kv.groups if spec.index in group.layers)
            buffers = {spec.past_key: group.key(spec.index), spec.past_value: group.value(spec.index)}
            for port, buffer in buffers.items():
                expected = ort.past[port]
                assert buffer.shape == expected.shape == (1, spec.kv_num_heads, rows, spec.head_size)
                np.testing.assert_allclose(
                    buffer[:, :, :resident], expected[:, :, :resident], rtol=0, atol=3 * TOLERANCE[name]
                )
        size = next(sizes)
    assert request.kv.rows_moved > 0


def test_rings_move_no_row_and_rolling_buffers_one_window_per_gap() -> None:
    moved = {}
    for layout in LAYOUTS:
        setup = setup_of("phi3_window8", layout, CommitPolicy.EAGER)
        request = compiled("phi3_window8", setup).create_infer_request()
        feed(request, list(range(1, 12)), 0)
        at_prompt = request.kv.rows_moved
        for position in range(11, 35):
            feed(request, [position], position)
        moved[layout] = request.kv.rows_moved - at_prompt
    gap = setup_of("phi3_window8", "ROLLING", CommitPolicy.EAGER).slack + 1
    assert moved["LINEAR"] == moved["GATHERED"] == moved["RING"] == 0
    assert moved["ROLLING"] == 4 * (24 // gap) * (WINDOW["phi3_window8"] - 1)
