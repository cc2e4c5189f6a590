"""Speculative decoding on real models of the simulated NPU: lossless, in step, and worth its while."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from acceptance_patterns import LENGTH, SEGMENT, PatternDrafter, PatternIsOverError, segments
from model_files import READABLE

import npusim
from npusim.errors import CapacityError
from npusim.speculative import DraftModel, FinishReason, PromptLookup, Sampler, Scripted, Step, generate
from npusim.stage import Stage
from npusim.trace import StepRecord

MAX_PROMPT_LEN = 8
NEW_TOKENS = 165

COMMIT = {"llama": "DEFERRED", "gemma3_alternating": "DEFERRED", "swa_target": "DEFERRED"}


def compiled(model: str, *, block: int, prompt: int, response: int, **more: str) -> npusim.CompiledLLM:
    return npusim.compile_model(
        READABLE[model],
        {
            "NPUW_LLM_MAX_PROMPT_LEN": prompt,
            "NPUW_LLM_MIN_RESPONSE_LEN": response,
            "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": block,
            "NPUSIM_COMMIT": COMMIT.get(model, "EAGER"),
            **more,
        },
    )


def test_the_segments_contain_every_pattern() -> None:
    found = {segment[i : i + LENGTH] for segment in segments() for i in range(SEGMENT - LENGTH + 1)}
    assert found == {"".join(letters) for letters in product("RWX", repeat=LENGTH)}


@pytest.mark.parametrize("model", READABLE)
def test_every_acceptance_pattern_gives_the_tokens_of_plain_greedy(model: str) -> None:
    """Prompts of 1 to 8 tokens, so that windows are crossed at every offset inside a block."""
    llm = compiled(model, block=8, prompt=MAX_PROMPT_LEN, response=NEW_TOKENS)
    request = llm.create_infer_request()
    truth = [257, *generate(request, [257], max_new_tokens=NEW_TOKENS).tokens]
    for num_draft_tokens in range(1, 8):
        for number, pattern in enumerate(segments()):
            prompt = truth[: 1 + (number + num_draft_tokens) % MAX_PROMPT_LEN]
            drafter = PatternDrafter(pattern, truth, request.vocab_size)
            seen: list[Step] = []
            with pytest.raises(PatternIsOverError, match=r"^$"):
                generate(
                    request,
                    prompt,
                    max_new_tokens=NEW_TOKENS,
                    drafter=drafter,
                    num_draft_tokens=num_draft_tokens,
                    on_step=seen.append,
                )
            tokens = [token for step in seen for token in step.tokens]
            assert [*prompt, *tokens] == truth[: len(prompt) + len(tokens)], (num_draft_tokens, pattern)
            assert [step.accepted for step in seen[1:]] == drafter.accepted
            assert all(step.proposed == num_draft_tokens for step in seen[1:])


@pytest.fixture(scope="module")
def target() -> npusim.CompiledLLM:
    return compiled("swa_target", block=5, prompt=64, response=80)


@pytest.fixture(scope="module")
def draft() -> npusim.CompiledLLM:
    return compiled("swa_draft", block=2, prompt=64, response=80)


@pytest.mark.parametrize("prompt", ["Return a list of the ", "Raise an exception if "])
@pytest.mark.parametrize("begin", [[], [257]])
def test_the_trained_pair_needs_a_third_of_the_target_steps(
    target: npusim.CompiledLLM, draft: npusim.CompiledLLM, prompt: str, begin: list[int]
) -> None:
    """Windows of 32 in target and draft, of which both have layers without: the text crosses them."""
    prompt_ids = [*begin, *prompt.encode()]
    plain = generate(target.create_infer_request(), prompt_ids, max_new_tokens=100)
    drafter = DraftModel(draft.create_infer_request())
    result = generate(target.create_infer_request(), prompt_ids, max_new_tokens=100, drafter=drafter)
    assert result.tokens == plain.tokens
    assert len(result.steps) / len(result.tokens) <= 0.35
    assert result.acceptance_rate > 0.5


def test_a_lookup_in_its_own_text_helps_the_trained_target(target: npusim.CompiledLLM) -> None:
    prompt = list(b"Return a list of the ")
    request = target.create_infer_request()
    plain = generate(request, prompt, max_new_tokens=100)
    result = generate(request, prompt, max_new_tokens=100, drafter=PromptLookup())
    assert result.tokens == plain.tokens
    assert result.tokens_per_target_step > 1.4


@pytest.mark.parametrize("seed", range(3))
def test_a_real_draft_stays_in_step(draft: npusim.CompiledLLM, seed: int) -> None:
    random = np.random.default_rng(seed)
    request = draft.create_infer_request()
    drafter = DraftModel(request)
    tokens = [257, *b"If "]
    for _ in range(10):
        proposal = drafter.propose(tokens, 4)
        assert request.num_stored_tokens == len(tokens) + 3
        assert proposal == DraftModel(draft.create_infer_request()).propose(tokens, 4)
        tokens += [*proposal[: random.integers(0, 5)], int(random.integers(97, 123))]


def test_a_draft_in_rings_too_small_for_its_rewinds_is_prefilled_anew() -> None:
    """Rings of the eager minimum: the target's hold one block more than the window, the draft's one token."""
    rings = {"NPUSIM_KV_LAYOUT": "RING", "NPUSIM_COMMIT": "EAGER"}
    target = compiled("gemma3_alternating", block=5, prompt=64, response=16, **rings).create_infer_request()
    draft = compiled("gemma3_alternating", block=1, prompt=64, response=16, **rings).create_infer_request()
    prompt = list(b"Return a ")
    plain = generate(target, prompt, max_new_tokens=40)
    records: list[StepRecord] = []
    draft.step_listener = records.append
    same = DraftModel(draft)

    def flawed(tokens: Sequence[int], num_tokens: int) -> list[int]:
        return [
            (token + (place == len(tokens) % 3)) % 259
            for place, token in enumerate(same.propose(tokens, num_tokens))
        ]

    result = generate(target, prompt, max_new_tokens=40, drafter=Scripted(flawed))
    assert result.tokens == plain.tokens
    assert [step.accepted for step in result.steps[:-1]] == [
        (step.position + 1) % 3 for step in result.steps[:-1]
    ], "the draft itself is right wherever it was not made wrong"
    assert sum(record.stage is Stage.PREFILL for record in records) > 5


@pytest.mark.parametrize(("commit", "block"), [("DEFERRED", 5), ("EAGER", 1)])
@pytest.mark.parametrize(("slack", "rereads"), [(1, True), (2, False)])
def test_a_draft_in_rings_needs_two_rows_less_of_slack_than_it_guesses(
    commit: str, block: int, slack: int, rereads: bool
) -> None:
    """All four guesses are rejected each time, the longest way back."""
    settings = {"NPUSIM_KV_LAYOUT": "RING", "NPUSIM_COMMIT": commit, "NPUSIM_KV_SLACK": str(slack)}
    draft = compiled("gemma3_alternating", block=block, prompt=64, response=32, **settings)
    request = draft.create_infer_request()
    records: list[StepRecord] = []
    request.step_listener = records.append
    drafter, tokens = DraftModel(request), list(b"Return a list of")
    for step in range(12):
        drafter.propose(tokens, 4)
        tokens.append(5 + step)
    assert (sum(record.stage is Stage.PREFILL for record in records) > 1) == rereads


@pytest.fixture(scope="module")
def narrow() -> npusim.CompiledLLM:
    return compiled("phi3_window8", block=4, prompt=8, response=4)


@pytest.mark.parametrize("length", [1, 7, 8])
@pytest.mark.parametrize("num_draft_tokens", [0, 2, 3, 9])
def test_generation_ends_where_the_cache_is_full(
    narrow: npusim.CompiledLLM, length: int, num_draft_tokens: int
) -> None:
    """Capacity 8 + 4 - 1 = 11: a prompt of 8 has exactly 4 tokens."""
    request = narrow.create_infer_request()
    prompt = [40, 41, 42, 40, 41, 42, 40, 41][:length]
    plain = generate(request, prompt, max_new_tokens=99)
    assert (len(plain.tokens), plain.finish_reason) == (12 - length, FinishReason.CAPACITY)
    drafter = Scripted(lambda tokens, n: [*plain.tokens, 0, 0, 0][len(tokens) - length :][:n])
    result = generate(
        request,
        prompt,
        max_new_tokens=99,
        drafter=drafter if num_draft_tokens else None,
        num_draft_tokens=num_draft_tokens,
    )
    assert result.tokens == plain.tokens
    assert request.num_stored_tokens == 11
    with pytest.raises(CapacityError, match="cache full"):
        request.infer({"input_ids": np.array([[5]])})
    assert generate(request, prompt, max_new_tokens=99).tokens == plain.tokens


def test_a_prompt_too_long_is_refused_with_the_limit(narrow: npusim.CompiledLLM) -> None:
    with pytest.raises(CapacityError, match="the prompt has 9 tokens, the target takes 8"):
        generate(narrow.create_infer_request(), [40] * 9, max_new_tokens=1)


def test_sampling_with_a_draft_repeats_with_its_seed(
    target: npusim.CompiledLLM, draft: npusim.CompiledLLM
) -> None:
    def run(seed: int) -> list[int]:
        return generate(
            target.create_infer_request(),
            list(b"Return "),
            max_new_tokens=40,
            drafter=DraftModel(draft.create_infer_request()),
            sampler=Sampler(temperature=0.7, top_p=0.9, seed=seed),
        ).tokens

    assert run(1) == run(1)
    assert run(1) != run(2)
