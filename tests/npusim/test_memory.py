"""Lengths that this machine cannot hold are refused before anything is lowered or allocated."""

import openvino as ov
import pytest
from tiny_llm import config_of
from tiny_model import HEAD_SIZE, KV_NUM_HEADS, TinyModel, build

import npusim.memory
from npusim import ConfigError

ROW = 2 * KV_NUM_HEADS * HEAD_SIZE * 4
SIZES = {"prompt": 20, "response": 9, "block": 3}  # capacity 28


def compile_with(options: dict[str, str | int], window: int) -> None:
    model = ov.Core().read_model(build(TinyModel(windows=(window,))))
    npusim.compile_model(model, config_of({**SIZES, **options}))


@pytest.mark.parametrize(
    ("window", "options", "cache_bytes", "mask_elements"),
    [
        (-1, {"chunk": 6}, 28 * ROW, 6 * (28 + 6)),
        (-1, {"chunk": 6, "precision": "F16"}, 14 * ROW, 6 * (28 + 6)),
        (-1, {"chunk": 0}, 28 * ROW, 20 * 20),  # the whole prompt has no past
        (-1, {"chunk": 0, "block": 19}, 28 * ROW, 19 * (28 + 19)),
        (4, {"chunk": 6, "layout": "RING"}, 6 * ROW, 6 * (6 + 6)),
        (4, {"chunk": 6, "layout": "GATHERED"}, 28 * ROW, 6 * (3 + 6)),
    ],
)
def test_a_cache_and_a_mask_must_fit_into_memory(
    window: int,
    options: dict[str, str | int],
    cache_bytes: int,
    mask_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask_bytes = 4 * mask_elements + 2 * 8 * 28  # attention_mask counts slots, in both graphs
    needed = cache_bytes + mask_bytes
    monkeypatch.setattr(npusim.memory, "physical_memory", lambda: needed)
    compile_with(options, window)
    monkeypatch.setattr(npusim.memory, "physical_memory", lambda: needed - 1)
    message = (
        rf"28 tokens needs {cache_bytes:,} bytes of KV cache and {mask_bytes:,} bytes for "
        rf"attention masks, the machine has {needed - 1:,} bytes of memory; lower NPUW_LLM_MAX_PROMPT_LEN"
    )
    with pytest.raises(ConfigError, match=message):
        compile_with(options, window)


def test_a_system_that_does_not_tell_its_memory_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (npusim.memory.physical_memory() or 2**30) >= 2**30
    monkeypatch.delattr(npusim.memory.os, "sysconf")
    assert npusim.memory.physical_memory() is None
    compile_with({"chunk": 6}, -1)
