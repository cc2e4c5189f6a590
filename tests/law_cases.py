"""What the law of the cache is tried on: windows, layouts, commit policies, prefill forms."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from slot_log import Buffer
from tiny_llm import compile_tiny
from tiny_model import TinyModel

from npusim import CompiledLLM
from npusim.layout import CommitPolicy

MAX_PROMPT_LEN = 9
CAPACITY = 14
BLOCK = 3  # also the number of query heads: a shape in which CPU fusions have gone wrong

UNIFORM_NONE, ONE, THREE, BEYOND = (-1, -1), (1, 1), (3, 3), (20,)
MIXED = (4, -1, 4, 6)
LAYOUTS = ("LINEAR", "GATHERED", "ROLLING", "RING")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled model: prefill_chunk 0 is whole prefill."""

    windows: tuple[int, ...]
    layout: str
    commit: CommitPolicy
    prefill_chunk: int
    slack: int = 0
    sanitize: bool = False
    execution: str = "FAST"
    pyramid_base: int = 0  # 0: one generate graph

    def __str__(self) -> str:
        windows = "_".join(str(window) for window in self.windows)
        prefill = f"chunks-of-{self.prefill_chunk}" if self.prefill_chunk else "whole"
        sanitized = "-sanitized" if self.sanitize else ""
        pyramid = f"-pyramid-{self.pyramid_base}" if self.pyramid_base else ""
        run = f"{self.commit.value}-{self.execution}{sanitized}{pyramid}"
        return f"windows_{windows}-{self.layout}+{self.slack}-{prefill}-{run}"

    @property
    def group(self) -> str:
        return "windows_" + "_".join(str(window) for window in self.windows)

    @property
    def model(self) -> TinyModel:
        return TinyModel(windows=self.windows, sinks=(1, 2))

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
    return [*found, replace(mixed, layout="ROLLING", prefill_chunk=5)]


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
    return compile_tiny(
        case.model,
        prompt=MAX_PROMPT_LEN,
        response=CAPACITY - MAX_PROMPT_LEN + 1,
        block=BLOCK,
        chunk=case.prefill_chunk,
        layout=case.layout,
        slack=case.slack,
        commit=case.commit.value,
        sanitize="YES" if case.sanitize else "NO",
        execution=case.execution,
        pyramid="YES" if case.pyramid_base else "NO",
        pyramid_base=case.pyramid_base or 1024,
    )
