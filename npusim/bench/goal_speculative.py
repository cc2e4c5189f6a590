"""Goals of speculative decoding: target steps that drafts save, and what the harness costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import as_file, files

import numpy as np
import numpy.typing as npt

import npusim
from npusim import byte_vocabulary
from npusim.bench.goal import GoalRow, GoalSetting, at_most
from npusim.bench.synthetic import build_model, save
from npusim.speculative.target import Target, TokenArray
from npusim.speculative.wrapped import WrappedTarget

NUM_DRAFT_TOKENS = 4
STEPS_GOAL = 0.35
OVERHEAD_GOAL = 0.05
PROMPTS = ("Return a list of the ", "Return a list of the names ", "Return the number of ")


def speculative_goals(setting: GoalSetting) -> list[GoalRow]:
    """Both."""
    return [_steps_per_token(setting), _overhead(setting)]


def _steps_per_token(setting: GoalSetting) -> GoalRow:
    config = _config(max(map(len, PROMPTS)) + 1, setting.sizes.new_tokens)
    models = files("npusim") / "models"
    with as_file(models / "swa_target.onnx") as target, as_file(models / "swa_draft.onnx") as draft:
        compiled = npusim.compile_model(target, config)
        drafter = npusim.DraftModel(npusim.compile_model(draft, config).create_infer_request())
    request = compiled.create_infer_request()
    figures = []
    for prompt in PROMPTS:
        generation = npusim.generate(
            request,
            byte_vocabulary.encode(prompt),
            max_new_tokens=setting.sizes.new_tokens,
            drafter=drafter,
            num_draft_tokens=NUM_DRAFT_TOKENS,
        )
        figures.append(1 / generation.tokens_per_target_step)
    return GoalRow(
        name=f"built-in pair, {NUM_DRAFT_TOKENS} drafts: target steps per token",
        goal=at_most(STEPS_GOAL, "steps"),
        ratio=float(np.median(figures)),
        spread=(min(figures), max(figures)),
        note=f"median, least and most of {len(PROMPTS)} prompts",
    )


def _overhead(setting: GoalSetting) -> GoalRow:
    """Time outside of both models' infer, of a run with a draft model of two layers."""
    sizes = setting.sizes
    paths = [setting.folder / name for name in ("model.onnx", "draft.onnx")]
    for path, layers in zip(paths, (sizes.model.num_layers, 2), strict=True):
        if not path.exists():
            save(build_model(replace(sizes.model, num_layers=layers)), path)
    config = _config(sizes.prompt, sizes.new_tokens)
    target, draft = (
        _TimedRequest(npusim.compile_model(path, config).create_infer_request()) for path in paths
    )
    prompt = np.random.default_rng(3).integers(0, sizes.model.vocab_size, sizes.prompt)
    began = time.perf_counter()
    npusim.generate(
        target,
        prompt,
        max_new_tokens=sizes.new_tokens,
        drafter=npusim.DraftModel(draft),
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )
    whole = time.perf_counter() - began
    return GoalRow(
        name=f"hidden {sizes.model.hidden_size}: share of a speculative run outside both models",
        goal=at_most(OVERHEAD_GOAL, "of the run"),
        ratio=1 - (target.seconds + draft.seconds) / whole,
    )


def _config(prompt_len: int, new_tokens: int) -> dict[str, int]:
    return {
        "NPUW_LLM_MAX_PROMPT_LEN": prompt_len,
        "NPUW_LLM_MIN_RESPONSE_LEN": new_tokens,
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": NUM_DRAFT_TOKENS + 1,
    }


class _TimedRequest(WrappedTarget):
    """A request that adds up the seconds of its infer calls."""

    def __init__(self, request: Target) -> None:
        super().__init__(request)
        self.seconds = 0.0

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, npt.NDArray[np.floating]]:
        began = time.perf_counter()
        outputs = super().infer(inputs, share_outputs=share_outputs)
        self.seconds += time.perf_counter() - began
        return outputs
