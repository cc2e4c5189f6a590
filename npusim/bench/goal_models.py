"""Goals of whole models: against other runtimes, host share, flat in context, start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from npusim.bench.conversation import Conversation, NpusimSteps, Runtime, start, unavailable_reason
from npusim.bench.goal import GoalRow, GoalSetting, at_least, at_most, row_of_ratio
from npusim.bench.synthetic import ModelShape, build_model, save
from npusim.bench.timing import interleave, ratio_of
from npusim.errors import ModelError

RUNTIME_GOALS = {Runtime.NPUW: 2.0, Runtime.ORT: 0.95}
HOST_GOAL = 0.03
FLAT_GOAL = 1.15
SECONDS_GOAL = 30.0
MEMORY_GOAL = 3.0


def model_goals(setting: GoalSetting) -> list[GoalRow]:
    """A whole model on each runtime, step by step, and the host's share of npusim's step."""
    sizes = setting.sizes
    path = _saved(sizes.model, setting.folder / "model.onnx")
    conversation = Conversation(path=path, context=sizes.prompt, num_steps=sizes.num_steps)
    reasons = {runtime: unavailable_reason(runtime) for runtime in RUNTIME_GOALS}
    fast = NpusimSteps(conversation)
    others = {r: start(r, conversation) for r, reason in reasons.items() if reason is None}
    candidates = {Runtime.FAST.value: fast, **{runtime.value: steps for runtime, steps in others.items()}}
    samples = interleave(candidates, sizes.plan)
    rows = []
    for runtime, goal in RUNTIME_GOALS.items():
        name = f"{_model_name(sizes.model)}, prompt {sizes.prompt}: {runtime.value} / npusim, time per token"
        reason = reasons[runtime]
        if reason is not None:
            rows.append(GoalRow(name=name, goal=at_least(goal), ratio=None, note=reason))
            continue
        ratio = ratio_of(samples[runtime.value], samples[Runtime.FAST.value])
        rows.append(row_of_ratio(name, at_least(goal), ratio))
    return [*rows, _host_share(setting, fast)]


def _host_share(setting: GoalSetting, steps: NpusimSteps) -> GoalRow:
    shares = np.array(steps.host_shares)
    low, high = np.percentile(shares, (10, 90))
    return GoalRow(
        name=f"{_model_name(setting.sizes.model)}: host share of a generate step",
        goal=at_most(HOST_GOAL, "of the step"),
        ratio=float(np.median(shares)),
        spread=(float(low), float(high)),
    )


def flat_goals(setting: GoalSetting) -> list[GoalRow]:
    """Step time of windowed layers at long contexts against that at a short one."""
    sizes = setting.sizes
    attention = replace(sizes.model.attention, local_window_size=sizes.window)
    path = _saved(replace(sizes.model, attention=attention), setting.folder / "windowed.onnx")
    short, *longer = sizes.flat_contexts
    rows = []
    for layout in ("RING", "GATHERED"):
        steps = {
            str(context): NpusimSteps(_windowed(path, context, layout, sizes.num_steps), prefill=False)
            for context in sizes.flat_contexts
        }
        samples = interleave(steps, sizes.plan)
        rows += [
            row_of_ratio(
                f"all layers W={sizes.window}, {layout.lower()}: step at context {context} / {short}",
                at_most(FLAT_GOAL),
                ratio_of(samples[str(context)], samples[str(short)]),
            )
            for context in longer
        ]
    return rows


def start_goals(setting: GoalSetting) -> list[GoalRow]:
    """Seconds and memory from a file to the first token, in a process of its own."""
    shape = setting.sizes.large_model
    path = _saved(shape, setting.folder / "large.onnx")
    model_bytes = sum(file.stat().st_size for file in setting.folder.glob("large.onnx*"))
    command = [sys.executable, "-m", "npusim.bench.first_token", str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        reason = finished.stderr.strip().splitlines()[-1:]
        raise ModelError(f"the process that loads {path.name} failed: {''.join(reason)}")
    measured = json.loads(finished.stdout)
    name = f"{_model_name(shape)} ({model_bytes / 2**20:.0f} MiB): compile and first token, "
    return [
        GoalRow(name=name + "seconds", goal=at_most(SECONDS_GOAL, "s"), ratio=measured["seconds"]),
        GoalRow(
            name=name + "peak memory / model size",
            goal=at_most(MEMORY_GOAL),
            ratio=measured["peak_bytes"] / model_bytes,
        ),
    ]


def _windowed(path: Path, context: int, layout: str, num_steps: int) -> Conversation:
    """A small prefill graph, as it is never run."""
    conversation = Conversation(path=path, context=context, num_steps=num_steps)
    return conversation.with_settings(NPUSIM_KV_LAYOUT=layout, NPUW_LLM_PREFILL_CHUNK_SIZE=8)


def _saved(shape: ModelShape, path: Path) -> Path:
    if not path.exists():
        save(build_model(shape), path)
    return path


def _model_name(shape: ModelShape) -> str:
    heads = f"{shape.attention.num_heads}/{shape.attention.kv_num_heads} heads"
    return f"hidden {shape.hidden_size}, {shape.num_layers} layers, {heads}"
