"""What the law of the cache is tried on: models, layouts, commit policies, prefill forms."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
from model_files import READABLE
from numpy.typing import NDArray
from ort_runner import OrtModel
from slot_log import Buffer
from tiny_llm import compile_tiny, config_of, error_of
from tiny_model import HEAD_SIZE, KV_NUM_HEADS, VOCAB_SIZE, TinyModel

import npusim
from npusim import CompiledLLM
from npusim.layout import CommitPolicy

MAX_PROMPT_LEN = 9
CAPACITY = 14
BLOCK = 3  # also the number of query heads: a shape in which CPU fusions have gone wrong

UNIFORM_NONE, ONE, THREE, BEYOND = (-1, -1), (1, 1), (3, 3), (20,)
MIXED = (4, -1, 4, 6)
LAYOUTS = ("LINEAR", "GATHERED", "ROLLING", "RING")

FILES = {"gemma3_alternating": (8, 8, -1, 8), "gptoss_attention": (8, -1, 8, -1)}
"""Model files by name, with the windows of their layers; each has 2 KV heads of 16 and 259 tokens."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled model, a file or the tiny one with these windows: prefill_chunk 0 is whole prefill."""

    windows: tuple[int, ...]
    file: str | None = None
    layout: str
    commit: CommitPolicy
    prefill_chunk: int
    slack: int = 0
    sanitize: bool = False
    execution: str = "FAST"
    pyramid_base: int = 0  # 0: one generate graph

    def __str__(self) -> str:
        prefill = f"chunks-of-{self.prefill_chunk}" if self.prefill_chunk else "whole"
        sanitized = "-sanitized" if self.sanitize else ""
        pyramid = f"-pyramid-{self.pyramid_base}" if self.pyramid_base else ""
        run = f"{self.commit.value}-{self.execution}{sanitized}{pyramid}"
        return f"{self.group}-{self.layout}+{self.slack}-{prefill}-{run}"

    @property
    def group(self) -> str:
        return self.file or "windows_" + "_".join(str(window) for window in self.windows)

    @property
    def tiny(self) -> TinyModel:
        return TinyModel(windows=self.windows, sinks=(1, 2))

    @property
    def vocab_size(self) -> int:
        return 259 if self.file else VOCAB_SIZE

    @property
    def nbytes(self) -> int:
        """Of all buffers: keys and values in float32."""
        kv_width = 2 * 16 if self.file else KV_NUM_HEADS * HEAD_SIZE
        return sum(buffer.rows for buffer in self.buffers) * 2 * kv_width * 4

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(self._buffer(window) for window in self.windows)

    def _buffer(self, window: int) -> Buffer:
        linear = Buffer(kind="linear", rows=CAPACITY, window=window)
        if window < 0 or self.layout in ("LINEAR", "GATHERED"):
            return linear
        rows = window + self.slack
        if self.layout == "RING":
            block = 0 if self.commit is CommitPolicy.DEFERRED else BLOCK
            rows = max(1, window - 1 + block) + self.slack
        return linear if rows >= CAPACITY else Buffer(kind=self.layout.lower(), rows=rows, window=window)


def cases() -> list[Case]:
    """Every layout that differs for these windows, both policies, whole and chunked prefill, both forms."""
    found: list[Case] = []
    for windows in (UNIFORM_NONE, ONE, THREE, BEYOND):
        for number, layout in enumerate(("LINEAR",) if windows == UNIFORM_NONE else LAYOUTS):
            base = Case(
                windows=windows, layout=layout, commit=CommitPolicy.EAGER, prefill_chunk=4 * (number % 2)
            )
            found += _both_policies(replace(base, slack=2 if layout == "ROLLING" else 0))
    mixed = Case(windows=MIXED, layout="LINEAR", commit=CommitPolicy.EAGER, prefill_chunk=4)
    for layout in LAYOUTS:
        slack = {"ROLLING": 2, "RING": 1}.get(layout, 0)
        chunked = replace(mixed, layout=layout, slack=slack)
        found += _both_policies(chunked)
        found += _both_policies(replace(chunked, prefill_chunk=0, execution="DEVICE"))
        sanitized = replace(mixed, layout=layout, prefill_chunk=5, sanitize=True)
        deferred = replace(sanitized, commit=CommitPolicy.DEFERRED, pyramid_base=2)
        found += [sanitized, deferred, replace(mixed, layout=layout, prefill_chunk=5, pyramid_base=1)]
    return [*found, replace(mixed, layout="ROLLING", prefill_chunk=5), *_file_cases()]


def _file_cases() -> list[Case]:
    """Every layout and policy; what one file prefills whole, the other does in chunks."""
    found: list[Case] = []
    for (number, (file, windows)), (place, layout) in product(enumerate(FILES.items()), enumerate(LAYOUTS)):
        case = Case(
            file=file,
            windows=windows,
            layout=layout,
            commit=CommitPolicy.EAGER,
            prefill_chunk=4 * ((number + place) % 2),
            slack=2 if layout == "ROLLING" else 0,
        )
        found += _both_policies(case)
    return found


def _both_policies(case: Case) -> list[Case]:
    return [replace(case, commit=commit) for commit in CommitPolicy]


@cache
def compiled(case: Case) -> CompiledLLM:
    """Graphs are shared by the commit policies, where these do not change the size of a buffer."""
    twin = replace(case, commit=CommitPolicy.EAGER)
    if case != twin and case.buffers == twin.buffers:
        shared = copy(compiled(twin))
        shared.config = replace(shared.config, commit=case.commit)
        return shared
    options: dict[str, str | int] = {
        "prompt": MAX_PROMPT_LEN,
        "response": CAPACITY - MAX_PROMPT_LEN + 1,
        "block": BLOCK,
        "chunk": case.prefill_chunk,
        "layout": case.layout,
        "slack": case.slack,
        "commit": case.commit.value,
        "sanitize": "YES" if case.sanitize else "NO",
        "execution": case.execution,
        "pyramid": "YES" if case.pyramid_base else "NO",
        "pyramid_base": case.pyramid_base or 1024,
    }
    if case.file:
        return npusim.compile_model(READABLE[case.file], config_of(options))
    return compile_tiny(case.tiny, **options)


def error_of_case(case: Case, logits: NDArray[np.floating], tokens: tuple[int, ...]) -> float:
    """How far logits [1, n, V] are from those of the last n of `tokens` in a fresh run of all of them."""
    if not case.file:
        return error_of(case.tiny, logits, tokens)
    return float(np.abs(logits[0] - _file_logits(case.file, tokens)[-logits.shape[1] :]).max())


@cache
def _onnxruntime(file: str) -> OrtModel:
    return OrtModel(READABLE[file], max_length=CAPACITY)


@cache
def _file_logits(file: str, tokens: tuple[int, ...]) -> NDArray[np.floating]:
    model = _onnxruntime(file)
    model.reset()
    return model.feed(tokens)[0]
