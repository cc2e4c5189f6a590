"""`npusim run`: generate from a prompt on the simulated NPU, with or without a draft."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import npusim
from npusim import byte_vocabulary, speculative
from npusim.cli.compiling import GenerationSizes, compile_models
from npusim.cli.config_help import config_keys
from npusim.cli.drafting import LOOKUP, add_draft_options, draft_path
from npusim.cli.output import Json, print_fields, print_json, progress, stdout
from npusim.cli.parsers import (
    DEFAULT_NUM_DRAFT,
    Subparsers,
    add_command,
    add_config_option,
    add_max_new_tokens_option,
    at_least,
    parse_config,
    probability,
    refuse_idle,
    temperature,
    token_ids,
    utf8_text,
)
from npusim.cli.tracing import check_can_trace, tracing
from npusim.errors import InputError

DESCRIPTION = """\
Generate from a prompt on the simulated NPU: a prefill graph takes the prompt, a
generate graph one block after the other, the host keeps the KV cache between
them. With --draft a smaller model (or the text itself) guesses ahead and the
model verifies the guesses in one block: the greedy tokens stay the same, the
steps become fewer. (With a cache that rounds - float16 or quantized - near ties
may fall the other way: a block reads its own rows before they are rounded.)"""

EPILOG = f"""\
sizes: what -c leaves open is chosen for this run. NPUW_LLM_MAX_PROMPT_LEN is
the prompt rounded up to 64 (less where the rotary tables end),
NPUW_LLM_MIN_RESPONSE_LEN is --max-new-tokens, NPUW_LLM_MAX_GENERATION_TOKEN_LEN
is 1, or --num-draft + 1 with a draft. With a draft and NPUSIM_KV_LAYOUT=ROLLING
NPUSIM_COMMIT is DEFERRED, since rejected rows could not be taken back.

text: --prompt and text output need the byte vocabulary ({byte_vocabulary.VOCAB_SIZE} ids, a token is
a byte) that the built-in models have. Other models take --prompt-ids and answer
with token ids.

traces: a line of JSON per call, and an end that counts them. FILE may be new,
empty or a trace, which is overwritten; any other file is refused.

{config_keys()}

examples:
  npusim run model.onnx --prompt-ids 257,72,105 --max-new-tokens 32
  npusim run model.onnx --prompt "Return a list" -c NPUW_LLM_PREFILL_HINT=STATIC
  npusim run target.onnx --prompt "Return" --draft draft.onnx --num-draft 4
  npusim run target.onnx --prompt "Return" --draft lookup --temperature 0.8
  npusim run model.onnx --prompt-ids 1,2,3 --json | jq .tokens
  npusim run model.onnx --prompt-ids 1,2,3 --trace run.jsonl

exit code: 0, or 2 if the model, a setting, the prompt or a trace cannot be used"""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run gave, and what it cost."""

    prompt_ids: list[int]
    generation: speculative.Generation
    request: npusim.LLMInferRequest
    config: dict[str, str | int]
    compile_seconds: float
    generate_seconds: float

    @property
    def text(self) -> str | None:
        """The continuation as text; None where the model is not of the byte vocabulary."""
        if self.request.vocab_size != byte_vocabulary.VOCAB_SIZE:
            return None
        return byte_vocabulary.decode(self.generation.tokens)


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "run", "generate from a prompt", DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", type=Path, help="ONNX file of a language model")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", type=utf8_text, help="prompt as text (byte vocabulary only)"
    )
    prompt.add_argument("--prompt-ids", metavar="1,2,3", type=token_ids, help="prompt as token ids")
    add_max_new_tokens_option(parser)
    parser.add_argument(
        "--eos",
        metavar="ID",
        type=at_least(0),
        help="token that ends the text (default: the end mark of a byte vocabulary)",
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a record of each call, for `npusim replay`"
    )
    _add_draft_options(parser)
    _add_sampling_options(parser)
    parser.set_defaults(execute=execute)


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculative decoding")
    add_draft_options(group)
    group.add_argument(
        "--draft-trace", metavar="FILE", type=Path, help="as --trace, of the calls of the draft model"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (without --temperature: the likeliest token each time)")
    group.add_argument(
        "--temperature", metavar="T", type=temperature, default=0.0, help="0 is greedy (default)"
    )
    group.add_argument("--top-k", metavar="K", type=at_least(0), help="keep the K likeliest; 0 keeps all")
    group.add_argument("--top-p", metavar="P", type=probability, help="keep the likeliest that reach P")
    group.add_argument("--seed", metavar="N", type=at_least(0), help="seed of the draws (default 0)")


def execute(options: argparse.Namespace) -> int:
    """Run and print; 0, as an unusable model or prompt raises."""
    _check_options(options)
    result = _run(options)
    if options.json:
        print_json(_result_json(str(options.model), result))
    else:
        _print_result(result)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raises ConfigError for an option that would do nothing, TraceError for a trace that cannot be."""
    if options.draft is None:
        refuse_idle(options, "--draft", "--num-draft", "--draft-trace")
    elif options.draft == LOOKUP:
        refuse_idle(options, "a draft model", "--draft-trace")
    if options.temperature == 0:
        refuse_idle(options, "a --temperature above 0", "--top-k", "--top-p", "--seed")
    models = (options.model, draft_path(options.draft))
    check_can_trace(options.trace, models)
    check_can_trace(options.draft_trace, (*models, options.trace))


def _run(options: argparse.Namespace) -> RunResult:
    prompt_ids = options.prompt_ids or byte_vocabulary.encode(options.prompt)
    num_draft = options.num_draft or DEFAULT_NUM_DRAFT
    started = time.perf_counter()
    sizes = GenerationSizes(
        prompt_len=len(prompt_ids),
        max_new_tokens=options.max_new_tokens,
        block_len=num_draft + 1 if options.draft else 1,
    )
    paths = [path for path in (options.model, draft_path(options.draft)) if path is not None]
    compiled = compile_models(paths, parse_config(options.config), sizes)
    request = compiled.models[0].create_infer_request()
    eos_token_id = _eos_token_id(options, request.vocab_size)
    ready = time.perf_counter()
    with (
        tracing(options.trace, options.model, compiled.models[0], request),
        _drafter(options, compiled.models[-1]) as drafter,
        progress("generating", options.max_new_tokens) as advance,
    ):
        generation = speculative.generate(
            request,
            prompt_ids,
            max_new_tokens=options.max_new_tokens,
            drafter=drafter,
            num_draft_tokens=num_draft,
            eos_token_id=eos_token_id,
            sampler=_sampler(options),
            on_step=lambda step: advance(step.emitted),
        )
    return RunResult(
        prompt_ids=prompt_ids,
        generation=generation,
        request=request,
        config=compiled.config,
        compile_seconds=ready - started,
        generate_seconds=time.perf_counter() - ready,
    )


def _sampler(options: argparse.Namespace) -> speculative.Sampler:
    return speculative.Sampler(
        temperature=options.temperature,
        top_k=options.top_k or 0,
        top_p=1.0 if options.top_p is None else options.top_p,
        seed=options.seed or 0,
    )


def _eos_token_id(options: argparse.Namespace, vocab_size: int) -> int | None:
    """The end token; raises InputError for a text prompt to a model that is not of the byte vocabulary."""
    is_bytes = vocab_size == byte_vocabulary.VOCAB_SIZE
    if options.prompt is not None and not is_bytes:
        raise InputError(
            f"--prompt: {options.model} has {vocab_size} token ids, and text is understood for the "
            f"byte vocabulary of {byte_vocabulary.VOCAB_SIZE} only; tokenize elsewhere and give --prompt-ids"
        )
    default = byte_vocabulary.END_TOKEN if is_bytes else None
    return default if options.eos is None else int(options.eos)


@contextmanager
def _drafter(options: argparse.Namespace, draft: npusim.CompiledLLM) -> Iterator[speculative.Drafter | None]:
    """The drafter that was asked for; the calls of a draft model are traced meanwhile."""
    path = draft_path(options.draft)
    if path is None:
        yield speculative.PromptLookup() if options.draft else None
        return
    request = draft.create_infer_request()
    with tracing(options.draft_trace, path, draft, request):
        yield speculative.DraftModel(request)


def _print_result(result: RunResult) -> None:
    generation, request = result.generation, result.request
    fields = {}
    if result.text is not None:
        fields["prompt"] = byte_vocabulary.decode(result.prompt_ids)
        fields["continuation"] = result.text
    fields["tokens"] = ",".join(map(str, generation.tokens))
    fields["finished"] = f"{generation.finish_reason.value} after {len(generation.tokens)} new tokens"
    proposed = sum(step.proposed for step in generation.steps)
    if proposed:
        fields["speculation"] = (
            f"{generation.acceptance_rate:.0%} of {proposed} drafts accepted, "
            f"{generation.tokens_per_target_step:.2f} tokens per target step"
        )
    fields["stored"] = (
        f"{request.num_stored_tokens} of {request.capacity} tokens, {request.kv_nbytes:,} bytes of KV cache"
    )
    fields["time"] = f"{result.compile_seconds:.2f} s to compile, {result.generate_seconds:.2f} s to generate"
    print_fields(stdout(), fields)


def _result_json(model: str, result: RunResult) -> dict[str, Json]:
    generation, request = result.generation, result.request
    return {
        "model": model,
        "config": dict(result.config),
        "prompt_ids": list(result.prompt_ids),
        "tokens": list(generation.tokens),
        "text": result.text,
        "finish_reason": generation.finish_reason.value,
        "steps": [
            {
                "position": step.position,
                "proposed": step.proposed,
                "accepted": step.accepted,
                "emitted": step.emitted,
            }
            for step in generation.steps
        ],
        "acceptance_rate": generation.acceptance_rate,
        "tokens_per_target_step": generation.tokens_per_target_step,
        "num_stored_tokens": request.num_stored_tokens,
        "capacity": request.capacity,
        "kv_nbytes": request.kv_nbytes,
        "seconds": {"compile": result.compile_seconds, "generate": result.generate_seconds},
    }
