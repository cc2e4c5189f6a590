"""`npusim demo`: the built-in pair of models, each step held against the same file run natively."""

import argparse
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import openvino as ov
from rich.table import Table

import npusim
from npusim import byte_vocabulary, speculative
from npusim.cli.compiling import GenerationSizes, compile_models
from npusim.cli.config_help import config_keys
from npusim.cli.output import (
    Advance,
    Json,
    finite,
    new_table,
    plain,
    print_fields,
    print_json,
    progress,
    stdout,
)
from npusim.cli.parsers import (
    DEFAULT_NUM_DRAFT,
    Subparsers,
    add_command,
    add_config_option,
    add_max_new_tokens_option,
    at_least,
    parse_config,
    utf8_text,
)
from npusim.native import NativeModel
from npusim.parity import ParityTarget, StepParity

TOLERANCE = 1e-4
"""Greatest absolute logits difference that is a match: float32 sums in another order, logits up to 30."""

ROUNDED_CACHE_TOLERANCE = 2e-2
"""The same for a cache that rounds its rows. A window off by one differs by 0.1 somewhere in a run."""

DEFAULT_PROMPT = "Return a list of the "
DIFFERENCES_PER_ROW = 8

DESCRIPTION = """\
Run the built-in pair of models (trained on docstrings, a token is a byte;
layers with a window of 32 and full ones in turn) on the simulated NPU: once
token by token, once with the small model drafting for the large one. Beside
each call OpenVINO's CPU plugin runs the same file natively: dynamic shapes, a
cache that grows, no slots. Printed are the text, the parity of every call,
acceptance and KV memory."""

EPILOG = f"""\
A call, the prefill or a step of one block, matches when no logit differs by
more than {TOLERANCE:g}, or by {ROUNDED_CACHE_TOLERANCE:g} where the cache rounds
(NPUSIM_KV_PRECISION=F16). The prompt of 22 tokens and the first new ones cross
the window of 32: where a mask written in slot distance goes wrong.

{config_keys()}

examples:
  npusim demo
  npusim demo --prompt "Raise an error if " --max-new-tokens 100
  npusim demo -c NPUW_LLM_PREFILL_CHUNK_SIZE=5
  npusim demo --json | jq .worst_difference

exit code: 0 if every call matches and drafting changes no token, 1 if not"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One generation with its parity record."""

    generation: speculative.Generation
    parity: tuple[StepParity, ...]
    kv_nbytes: int

    @property
    def worst(self) -> float:
        """The greatest logits difference of all steps."""
        return max(step.max_abs_difference for step in self.parity)


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Both generations from one prompt."""

    prompt: str
    tolerance: float
    plain: Part
    drafted: Part

    @property
    def worst(self) -> float:
        """The greatest logits difference of both."""
        return max(self.plain.worst, self.drafted.worst)

    @property
    def is_lossless(self) -> bool:
        """Whether drafting changed no token."""
        return self.plain.generation.tokens == self.drafted.generation.tokens

    @property
    def matches(self) -> bool:
        """Whether the demo shows what it promises."""
        return self.is_lossless and self.worst <= self.tolerance


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "demo", "the built-in models, each step compared with the native run", DESCRIPTION, EPILOG
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        type=utf8_text,
        default=DEFAULT_PROMPT,
        help=f'default: "{DEFAULT_PROMPT}"',
    )
    add_max_new_tokens_option(parser)
    parser.add_argument(
        "--num-draft",
        metavar="N",
        type=at_least(1),
        default=DEFAULT_NUM_DRAFT,
        help=f"tokens to guess per step (default {DEFAULT_NUM_DRAFT})",
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run both parts and print; 1 if anything differs."""
    models = files("npusim") / "models"
    with as_file(models / "swa_target.onnx") as target, as_file(models / "swa_draft.onnx") as draft:
        result = _run(options, target, draft)
    if options.json:
        print_json(_result_json(result))
    else:
        _print_result(result)
    return 0 if result.matches else 1


def _run(options: argparse.Namespace, target_path: Path, draft_path: Path) -> DemoResult:
    sizes = GenerationSizes(
        prompt_len=len(byte_vocabulary.encode(options.prompt)),
        max_new_tokens=options.max_new_tokens,
        block_len=options.num_draft + 1,
    )
    compiled = compile_models([target_path, draft_path], parse_config(options.config), sizes)
    target, draft = compiled.models
    with progress("compiling for the native run", None):
        reference = NativeModel(target_path)
    with progress("generating", 2 * options.max_new_tokens) as advance:
        plain_part = _generate(options, target.create_infer_request(), reference, None, advance)
        reference.reset()
        drafter = speculative.DraftModel(draft.create_infer_request())
        drafted = _generate(options, target.create_infer_request(), reference, drafter, advance)
    return DemoResult(
        prompt=options.prompt,
        tolerance=_tolerance(target),
        plain=plain_part,
        drafted=drafted,
    )


def _tolerance(compiled: npusim.CompiledLLM) -> float:
    is_exact = all(cache.cache_type == ov.Type.f32 for cache in compiled.caches)
    return TOLERANCE if is_exact else ROUNDED_CACHE_TOLERANCE


def _generate(
    options: argparse.Namespace,
    request: npusim.LLMInferRequest,
    reference: NativeModel,
    drafter: speculative.DraftModel | None,
    advance: Advance,
) -> Part:
    watched = ParityTarget(request, reference)
    generation = speculative.generate(
        watched,
        byte_vocabulary.encode(options.prompt),
        max_new_tokens=options.max_new_tokens,
        drafter=drafter,
        num_draft_tokens=options.num_draft,
        eos_token_id=byte_vocabulary.END_TOKEN,
        on_step=lambda step: advance(step.emitted),
    )
    return Part(generation=generation, parity=tuple(watched.steps), kv_nbytes=request.kv_nbytes)


def _print_result(result: DemoResult) -> None:
    console = stdout()
    text = byte_vocabulary.decode(result.plain.generation.tokens)
    print_fields(console, {"prompt": result.prompt, "continuation": text})
    console.print()
    console.print(_difference_table("token by token", result.plain, result.tolerance))
    console.print()
    console.print(_difference_table("with drafts", result.drafted, result.tolerance))
    console.print()
    console.print(_summary_table(result))
    console.print()
    console.print(plain(_verdict(result)), soft_wrap=True)


def _difference_table(title: str, part: Part, tolerance: float) -> Table:
    """The difference of each call, several to a row; a row begins with the position of its first call."""
    table = new_table(f"{title}: largest logits difference of each call to the native run")
    table.add_column("position", justify="right", no_wrap=True)
    for _ in range(DIFFERENCES_PER_ROW):
        table.add_column(justify="right", no_wrap=True)
    for start in range(0, len(part.parity), DIFFERENCES_PER_ROW):
        steps = part.parity[start : start + DIFFERENCES_PER_ROW]
        table.add_row(str(steps[0].position), *(_difference(step, tolerance) for step in steps))
    return table


def _difference(step: StepParity, tolerance: float) -> str:
    text = f"{step.max_abs_difference:.1e}"
    return text if step.max_abs_difference <= tolerance else f"[bold red]{text}[/bold red]"


def _summary_table(result: DemoResult) -> Table:
    table = new_table()
    for heading in ("", "tokens", "steps", "accepted", "tokens/step", "worst", "KV bytes"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, part in (("token by token", result.plain), ("with drafts", result.drafted)):
        generation = part.generation
        drafted = any(step.proposed for step in generation.steps)
        table.add_row(
            name,
            str(len(generation.tokens)),
            str(len(generation.steps)),
            f"{generation.acceptance_rate:.0%}" if drafted else "-",
            f"{generation.tokens_per_target_step:.2f}",
            f"{part.worst:.1e}",
            f"{part.kv_nbytes:,}",
        )
    return table


def _verdict(result: DemoResult) -> str:
    parts = (result.plain, result.drafted)
    calls = [step for part in parts for step in part.parity]
    mismatches = sum(step.max_abs_difference > result.tolerance for step in calls)
    limit = f"{result.tolerance:g}"
    counted = " and ".join(str(len(part.generation.steps)) for part in parts)
    number = f"{len(calls)} calls (2 prefills, {counted} steps)"
    parity = (
        f"MISMATCH: {mismatches} of {number} differ from the native run by more than {limit}"
        if mismatches
        else f"all {number} match the native run (worst {result.worst:.1e}, allowed {limit})"
    )
    lossless = "drafting changed no token" if result.is_lossless else "MISMATCH: drafting changed the tokens"
    return f"{parity}\n{lossless}"


def _result_json(result: DemoResult) -> dict[str, Json]:
    return {
        "prompt": result.prompt,
        "text": byte_vocabulary.decode(result.plain.generation.tokens),
        "matches": result.matches,
        "lossless": result.is_lossless,
        "tolerance": result.tolerance,
        "worst_difference": finite(result.worst),
        "plain": _part_json(result.plain),
        "speculative": _part_json(result.drafted),
    }


def _part_json(part: Part) -> dict[str, Json]:
    return {
        "tokens": list(part.generation.tokens),
        "finish_reason": part.generation.finish_reason.value,
        "target_steps": len(part.generation.steps),
        "acceptance_rate": part.generation.acceptance_rate,
        "tokens_per_target_step": part.generation.tokens_per_target_step,
        "worst_difference": finite(part.worst),
        "kv_nbytes": part.kv_nbytes,
        "steps": [
            {
                "position": step.position,
                "num_tokens": step.num_tokens,
                "max_abs_difference": finite(step.max_abs_difference),
            }
            for step in part.parity
        ],
    }
