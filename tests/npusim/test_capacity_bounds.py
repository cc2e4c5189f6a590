"""The least capacity of a windowed buffer holds in a running model, and one slot fewer does not."""

from __future__ import annotations

import openvino as ov
import pytest
from tiny_llm import config_of, error_of, feed, text
from tiny_model import TinyModel, build

import npusim
import npusim.cache_plan
from npusim import ConfigError, LLMInferRequest, TrimError
from npusim.kv_manager import KVManager

BLOCK = 4
WINDOWS = (2, 3, 5)
RING_BOUND = npusim.cache_plan.ring_min_capacity


def model_of(window: int) -> TinyModel:
    return TinyModel(windows=(window,))


def new_request(window: int, layout: str, commit: str) -> LLMInferRequest:
    """Not the cached one: a bound may be patched."""
    sizes = {"prompt": 20, "response": 9, "block": BLOCK, "chunk": 6, "layout": layout, "commit": commit}
    model = ov.Core().read_model(build(model_of(window)))
    return npusim.compile_model(model, config_of(sizes)).create_infer_request()


def reject_whole_blocks(request: LLMInferRequest, window: int) -> float:
    """At every offset in the ring: a block, all of it rejected, another in its place. The largest error."""
    worst = 0.0
    for stored in range(6, 6 + window + BLOCK):
        tokens = text(stored + BLOCK, seed=stored)
        feed(request, tokens[:6], 0)
        for position in range(6, stored):
            feed(request, [tokens[position]], position)
        feed(request, text(BLOCK, seed=3), stored)
        worst = max(worst, error_of(model_of(window), feed(request, tokens[stored:], stored), tokens))
    return worst


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
@pytest.mark.parametrize("window", WINDOWS)
def test_at_the_bound_every_rejection_of_the_last_block_is_exact(window: int, commit: str) -> None:
    request = new_request(window, "RING", commit)
    rows = window - 1 + (BLOCK if commit == "EAGER" else 0)
    assert [group.layout.capacity for group in request.kv.groups] == [rows]
    assert reject_whole_blocks(request, window) < 2e-5


@pytest.mark.parametrize("window", WINDOWS)
def test_one_slot_fewer_cannot_reject_a_whole_block(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, as the oldest key of the window is gone; unchecked, the answer is another one."""

    def one_fewer(window: int, commit: npusim.layout.CommitPolicy, *, block_size: int) -> int:
        return RING_BOUND(window, commit, block_size=block_size) - 1

    monkeypatch.setattr(npusim.cache_plan, "ring_min_capacity", one_fewer)
    request = new_request(window, "RING", "EAGER")
    with pytest.raises(TrimError, match=r"layers \[0\] have overwritten or evicted rows"):
        reject_whole_blocks(request, window)
    # one row of the block kept is as much as it can do
    stored = request.num_stored_tokens - BLOCK
    assert request.can_trim(stored + 1)
    monkeypatch.setattr(KVManager, "_layers_that_cannot_trim", lambda _self, _num_tokens: [])
    assert reject_whole_blocks(request, window) > 0.1


@pytest.mark.parametrize(
    ("layout", "bound", "message"),
    [
        ("RING", "ring_min_capacity", r"ring layout: capacity 3 is below the least of 4 \(C >= W - 1"),
        ("ROLLING", "rolling_min_capacity", r"rolling layout: capacity 4 is below the least of 5 \(C >= W"),
    ],
)
def test_a_buffer_that_cannot_hold_the_window_is_refused_when_compiled(
    layout: str, bound: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = getattr(npusim.cache_plan, bound)
    monkeypatch.setattr(npusim.cache_plan, bound, lambda *args, **sizes: least(*args, **sizes) - 1)
    with pytest.raises(ConfigError, match=message):
        new_request(5, layout, "DEFERRED")
