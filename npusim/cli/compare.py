"""`npusim compare`: the simulator beside other runtimes, step by step and layer by layer."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov

import npusim
from npusim import byte_vocabulary, speculative
from npusim.cli.compare_report import print_report, report_json
from npusim.cli.config_help import config_keys
from npusim.cli.drafting import LOOKUP, add_draft_options, draft_path
from npusim.cli.output import print_json, progress
from npusim.cli.parsers import (
    DEFAULT_NUM_DRAFT,
    Subparsers,
    add_command,
    add_config_option,
    at_least,
    parse_config,
    refuse_idle,
    sized_config,
    token_ids,
    utf8_text,
)
from npusim.compare import BackendKind, Comparison, compare
from npusim.compare.differences import EXACT, QUANTIZED, ROUNDED
from npusim.config_options import MAX_GENERATION_TOKEN_LEN, MIN_RESPONSE_LEN
from npusim.errors import ConfigError, InputError
from npusim.model_file import read_model
from npusim.model_spec import ModelSpec, read_spec
from npusim.npuw_profile import BLOCK_STEP, round_up
from npusim.onnx_attention import require_file

LEAST_PROMPT, MOST_PROMPT = 24, 512
PAST_THE_WINDOW = 8

DESCRIPTION = """\
Run a model on the simulated NPU and on other runtimes over the same tokens, and
show for every step how far the logits lie apart. The simulator continues the
prompt greedily, with --draft in blocks of which some tokens are taken back; the
others are fed the same blocks at the same positions. --layers says which
attention layer differs first, and why."""

_TOLERANCES = "\n".join(
    f"  {caches:<36} {tolerance}"
    for caches, tolerance in (
        ("all float32", EXACT),
        ("a float16 cache, and npuw always", ROUNDED),
        ("a quantized cache", QUANTIZED),
    )
)

EPILOG = f"""\
runtimes (--against; default: all that can be used here)
  ort       ONNX Runtime on the ONNX file; needs the package onnxruntime
  openvino  OpenVINO's CPU plugin, dynamic shapes, a cache that grows
  npuw      the real NPUW of the openvino wheel, lowered by npusim, on the CPU
            device (-c NPUW_DEVICES=NPU for an NPU)

tolerance: greatest difference of logits that is agreement (L: the largest logit
of the run), and of attention outputs with --layers (A: the largest one of the
layer)
{_TOLERANCES}
--tolerance sets that of logits.

--candidate FILE is what the other runtimes run instead of MODEL: another export
of it, or an OpenVINO IR with a stateful model (openvino and npuw). So a faulty
export is found.

prompt: --prompt needs the byte vocabulary of the built-in models. Without a
prompt random tokens are taken: {LEAST_PROMPT}, or {PAST_THE_WINDOW} more than the largest window,
{MOST_PROMPT} at most.

{config_keys()}
Other keys that begin with NPUW_ or NPU_ are handed to npuw.

examples:
  npusim compare model.onnx
  npusim compare model.onnx --against ort,npuw --draft lookup --steps 32
  npusim compare model.onnx --candidate exported/openvino_model.xml --layers
  npusim compare model.onnx --json | jq '.backends[] | {{name, agrees, worst}}'

exit code: 0 if all agree, 1 if one differs or stops, 2 for wrong usage or an
unusable file"""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "compare", "the simulator beside other runtimes, step by step", DESCRIPTION, EPILOG
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="ONNX file of a language model")
    parser.add_argument(
        "--against",
        metavar="A,B",
        type=_kinds,
        help="runtimes to compare with: " + ", ".join(kind.value for kind in BackendKind),
    )
    parser.add_argument("--candidate", metavar="FILE", type=Path, help="what they run instead of MODEL")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", type=utf8_text, help="prompt as text (byte vocabulary only)"
    )
    prompt.add_argument("--prompt-ids", metavar="1,2,3", type=token_ids, help="prompt as token ids")
    parser.add_argument(
        "--steps", metavar="N", type=at_least(1), default=16, help="generate steps (default 16)"
    )
    add_draft_options(parser)
    parser.add_argument("--layers", action="store_true", help="find the attention layer that differs first")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help="greatest logits difference that is agreement"
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Compare and print; 1 if anything differs."""
    with progress("comparing", 1 + len(options.against or BackendKind)) as advance:
        asked = _comparison(options)
        report = compare(asked, advance)
    if options.json:
        print_json(report_json(str(options.model), asked, report))
    else:
        print_report(asked, report)
    return 0 if report.agrees else 1


def _check_options(options: argparse.Namespace, given: Mapping[str, str]) -> None:
    """ConfigError for options of which nothing would come."""
    if options.draft is None:
        refuse_idle(options, "--draft", "--num-draft")
    for key in filter(_is_for_npuw_only, given):
        if options.against and BackendKind.NPUW not in options.against:
            raise ConfigError(f"-c {key} is for npuw, which --against leaves out; leave out one of the two")


def _comparison(options: argparse.Namespace) -> Comparison:
    given = parse_config(options.config)
    _check_options(options, given)
    if options.candidate is not None:
        require_file(options.candidate)
    paths = [path for path in (options.model, draft_path(options.draft)) if path is not None]
    models = {path: read_model(path) for path in paths}
    specs = {path: read_spec(model) for path, model in models.items()}
    prompt = _prompt(options, specs[options.model])
    config = _config(options, given, len(prompt), specs)
    return Comparison(
        model=options.model,
        candidate=options.candidate,
        kinds=options.against,
        prompt=prompt,
        num_steps=options.steps,
        drafter=_drafter(models[paths[-1]], options.draft, config) if options.draft else None,
        num_draft_tokens=options.num_draft or DEFAULT_NUM_DRAFT,
        config=config,
        npuw_config=_npuw_config(config, given),
        layers=options.layers,
        max_abs_difference=options.tolerance,
    )


def _config(
    options: argparse.Namespace, given: Mapping[str, str], prompt_len: int, specs: Mapping[Path, ModelSpec]
) -> dict[str, str | int]:
    block_len = 1 + (options.num_draft or DEFAULT_NUM_DRAFT) if options.draft else 1
    return sized_config(
        {key: value for key, value in given.items() if not _is_for_npuw_only(key)},
        prompt_len=prompt_len,
        max_new_tokens=1 + options.steps * block_len,
        block_len=block_len,
        max_positions={str(path): spec.max_positions for path, spec in specs.items()},
        length_option="--steps",
    )


def _is_for_npuw_only(key: str) -> bool:
    """Whether a key is none of the simulator's. A misspelt NPUW_LLM_ key is not handed on."""
    return key.startswith(("NPUW_", "NPU_")) and not key.startswith("NPUW_LLM_")


def _npuw_config(config: Mapping[str, str | int], given: Mapping[str, str]) -> dict[str, str | int]:
    """The same lengths; NPUW rounds the block up and takes it from the room for responses."""
    npuw = {key: value for key, value in config.items() if not key.startswith("NPUSIM_")}
    if MIN_RESPONSE_LEN not in given:
        block = round_up(int(config[MAX_GENERATION_TOKEN_LEN]), BLOCK_STEP)
        npuw[MIN_RESPONSE_LEN] = int(config[MIN_RESPONSE_LEN]) + block
    return {**npuw, **{key: value for key, value in given.items() if _is_for_npuw_only(key)}}


def _prompt(options: argparse.Namespace, spec: ModelSpec) -> list[int]:
    if options.prompt_ids:
        return list(options.prompt_ids)
    if options.prompt is not None:
        if spec.vocab_size != byte_vocabulary.VOCAB_SIZE:
            raise InputError(
                f"--prompt: {options.model} has {spec.vocab_size} token ids, and text is understood for the "
                f"byte vocabulary of {byte_vocabulary.VOCAB_SIZE} only; give --prompt-ids"
            )
        return byte_vocabulary.encode(options.prompt)
    largest = max(layer.local_window_size for layer in spec.layers)
    length = min(max(LEAST_PROMPT, largest + PAST_THE_WINDOW), MOST_PROMPT)
    drawn: list[int] = np.random.default_rng(0).integers(0, spec.num_embeddings, length).tolist()
    return drawn


def _drafter(model: ov.Model, draft: str, config: Mapping[str, str | int]) -> speculative.Drafter:
    """What --draft names: the text itself, or a model."""
    if draft == LOOKUP:
        return speculative.PromptLookup()
    return speculative.DraftModel(npusim.compile_model(model, config).create_infer_request())


def _kinds(text: str) -> tuple[BackendKind, ...]:
    """Comma separated names of runtimes, for argparse."""
    try:
        kinds = tuple(BackendKind(part.strip()) for part in text.split(","))
    except ValueError as error:
        names = ", ".join(kind.value for kind in BackendKind)
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {names}, with commas between") from error
    if len(set(kinds)) < len(kinds):
        raise argparse.ArgumentTypeError(f"{text!r}: a runtime is named twice; name each once")
    return kinds
