"""The tiny model on the simulator: compiled once per configuration, fed with token lists, judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from tiny_model import VOCAB_SIZE, NaiveModel, TinyModel, build

import npusim
from npusim import CompiledLLM, LLMInferRequest
from npusim.static_graph import StaticGraph

TINY = TinyModel(windows=(4, -1, 5), sinks=(2,))
SIZES: dict[str, str | int] = {"prompt": 20, "response": 9, "block": 3, "chunk": 6}  # capacity 28

TOLERANCE = 2e-5
"""Measured: 3e-6 of logits up to 3. The least effect of a wrong key is 0.1."""

Logits = NDArray[np.float32]


def compile_tiny(model: TinyModel, **options: str | int) -> CompiledLLM:
    """Compile with short option names (`config_of`): prompt, response, block, chunk (0: whole), layout, .."""
    return _compile(model, tuple(sorted(options.items())))


@cache
def _compile(model: TinyModel, options: tuple[tuple[str, str | int], ...]) -> CompiledLLM:
    return npusim.compile_model(ov.Core().read_model(build(model)), config_of(dict(options)))


def config_of(options: Mapping[str, str | int]) -> dict[str, str | int]:
    """The configuration that the short names stand for."""
    keys = {
        "prompt": "NPUW_LLM_MAX_PROMPT_LEN",
        "response": "NPUW_LLM_MIN_RESPONSE_LEN",
        "block": "NPUW_LLM_MAX_GENERATION_TOKEN_LEN",
        "chunk": "NPUW_LLM_PREFILL_CHUNK_SIZE",
        "layout": "NPUSIM_KV_LAYOUT",
        "slack": "NPUSIM_KV_SLACK",
        "pyramid": "NPUW_LLM_GENERATE_PYRAMID",
        "precision": "NPUSIM_KV_PRECISION",
    }
    config = {keys.get(name, f"NPUSIM_{name.upper()}"): value for name, value in options.items()}
    if options.get("chunk") == 0:
        config["NPUW_LLM_PREFILL_CHUNK_SIZE"] = options["prompt"]
        config["NPUW_LLM_PREFILL_HINT"] = "STATIC"
    return config


def new_request(model: TinyModel = TINY, **options: str | int) -> LLMInferRequest:
    """A request of its own; options change SIZES."""
    return compile_tiny(model, **{**SIZES, **options}).create_infer_request()


@contextmanager
def failing_at(number: int) -> Iterator[None]:
    """The graphs fail at their `number`th run from now (1 is the next), after writing their outputs."""
    run, calls = StaticGraph.run, []

    def failing(graph: StaticGraph) -> None:
        calls.append(graph)
        run(graph)
        if len(calls) == number:
            raise RuntimeError("the device is gone")

    with patch.object(StaticGraph, "run", failing):
        yield


def text(length: int, seed: int = 1) -> list[int]:
    """Random tokens; texts of different seeds differ from the first token on."""
    rng = np.random.default_rng(seed)
    return [seed % VOCAB_SIZE, *rng.integers(0, VOCAB_SIZE, length - 1).tolist()]


def call(tokens: Sequence[int], start: int) -> dict[str, NDArray[np.int64]]:
    """The inputs of a block at positions start.. ."""
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    return {"input_ids": np.array([tokens], np.int64), "position_ids": positions[None]}


def feed(request: LLMInferRequest, tokens: Sequence[int], start: int) -> Logits:
    """Run a block at positions start..; logits [n, vocab]."""
    return request.infer(call(tokens, start))["logits"][0]


@cache
def _naive(model: TinyModel) -> NaiveModel:
    return NaiveModel(model)


def error_of(model: TinyModel, logits: NDArray[np.floating], tokens: Sequence[int]) -> float:
    """How far logits [n, V] are from those of the last n of `tokens` in a fresh run."""
    rows = logits.reshape(-1, VOCAB_SIZE)
    return float(np.abs(rows - _naive(model).logits(tuple(tokens), len(rows))).max())


def assert_fresh(model: TinyModel, logits: NDArray[np.floating], tokens: Sequence[int]) -> None:
    """Logits [.., n, V] are those of the last n of `tokens` in a run of nothing else."""
    assert error_of(model, logits, tokens) < TOLERANCE


def cache_bytes(request: LLMInferRequest) -> list[bytes]:
    """What is in the KV buffers, to the bit."""
    return [group.past.tobytes() for group in request.kv.groups]
