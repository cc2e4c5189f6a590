"""`npusim demo`: the built-in pair of models, each step held against the same file run natively."""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

import openvino as ov

import npusim
from npusim import byte_vocabulary, speculative
from npusim.cli.compiling import GenerationSizes, compile_models
from npusim.cli.config_help import config_keys
from npusim.cli.demo_report import (
    ROUNDED_CACHE_TOLERANCE,
    TOLERANCE,
    DemoResult,
    Part,
    print_result,
    result_json,
)
from npusim.cli.output import Advance, print_json, progress
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
from npusim.parity import ParityTarget

DEFAULT_PROMPT = "Return a list of the "
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
(NPUSIM_KV_PRECISION=F16). With a cache that rounds near ties may fall the other
way under drafts: a block reads its own rows before they are rounded. The prompt
of 22 tokens and the first new ones cross the window of 32: where a mask written
in slot distance goes wrong.

{config_keys()}

examples:
  npusim demo
  npusim demo --prompt "Raise an error if " --max-new-tokens 100
  npusim demo -c NPUW_LLM_PREFILL_CHUNK_SIZE=5
  npusim demo --json | jq .worst_difference

exit code: 0 if every call matches and drafting changes no token (near ties of a
cache that rounds aside), 1 if not"""


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
        print_json(result_json(result))
    else:
        print_result(result)
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
        cache_rounds=any(cache.cache_type != ov.Type.f32 for cache in target.caches),
        plain=plain_part,
        drafted=drafted,
    )


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
