"""Run the model files on the simulator and on ONNX Runtime, token lists in, arrays out."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from model_files import READABLE
from numpy.typing import NDArray
from ort_runner import OrtModel

import npusim
from npusim import CompiledLLM, LLMInferRequest
from npusim.layout import CommitPolicy

LogitRows = NDArray[np.float32]  # [n, vocab_size]

WINDOW = {
    "llama": 32,  # none has one: as long as that of the others
    "qwen3": 32,
    "phi3_window8": 8,
    "gemma3_alternating": 8,
    "gptoss_attention": 8,
    "swa_target": 32,
    "swa_draft": 32,
}
BEGIN = 257


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model file is compiled; chunk 0 is whole prefill."""

    prompt: int
    response: int
    block: int
    chunk: int = 0
    layout: str = "LINEAR"
    slack: int = 0
    commit: CommitPolicy = CommitPolicy.EAGER
    precision: str = "MODEL"
    execution: str = "FAST"

    def config(self) -> dict[str, str | int]:
        """As a user would write it."""
        return {
            "NPUW_LLM_MAX_PROMPT_LEN": self.prompt,
            "NPUW_LLM_MIN_RESPONSE_LEN": self.response,
            "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": self.block,
            "NPUW_LLM_PREFILL_HINT": "DYNAMIC" if self.chunk else "STATIC",
            "NPUW_LLM_PREFILL_CHUNK_SIZE": self.chunk or self.prompt,
            "NPUSIM_KV_LAYOUT": self.layout,
            "NPUSIM_KV_SLACK": self.slack,
            "NPUSIM_COMMIT": self.commit.value,
            "NPUSIM_KV_PRECISION": self.precision,
            "NPUSIM_EXECUTION": self.execution,
        }


@cache
def compiled(name: str, setup: Setup) -> CompiledLLM:
    """A compiled model file; where the graphs are those of EAGER commit, they are not compiled again."""
    if setup.commit is CommitPolicy.DEFERRED and setup.layout != "RING":
        shared = copy(compiled(name, replace(setup, commit=CommitPolicy.EAGER)))
        shared.config = replace(shared.config, commit=setup.commit)
        return shared
    return npusim.compile_model(READABLE[name], setup.config())


def feed(request: LLMInferRequest, tokens: list[int], start: int) -> LogitRows:
    """Run tokens at positions start..; logits [n, vocab]."""
    positions = np.arange(start, start + len(tokens), dtype=np.int64)[None]
    inputs = {"input_ids": np.array([tokens], np.int64), "position_ids": positions}
    return request.infer(inputs)["logits"][0]


@dataclass(frozen=True, eq=False)
class Text:
    """tokens: a prompt and its greedy continuation by ONNX Runtime; logits [len(tokens), vocab]."""

    tokens: list[int]
    logits: LogitRows


@cache
def ort_text(name: str, prompt_length: int, length: int) -> Text:
    """A prompt of random bytes, continued to `length` tokens by ONNX Runtime on the original file."""
    model = OrtModel(READABLE[name], max_length=length)
    tokens = [BEGIN, *np.random.default_rng(prompt_length).integers(0, 256, prompt_length - 1).tolist()]
    rows = [model.feed(tokens)[0]]
    while len(tokens) < length:
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(model.feed(tokens[-1:])[0])
    return Text(tokens, np.concatenate(rows))


def ort_logits(name: str, tokens: list[int]) -> LogitRows:
    """Logits [n, vocab] of a fresh run over these tokens."""
    return OrtModel(READABLE[name], max_length=len(tokens)).feed(tokens)[0]
