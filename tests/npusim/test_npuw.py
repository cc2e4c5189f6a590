"""The real NPUW on the CPU device: right through the adapter, and every call refused that it gets wrong."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import stateful_runs as runs
from llama_like import LlamaLike
from model_files import READABLE
from npuw_calls import LENGTHS, WHOLE_GRAPH, call, tokens_of, tolerance
from ort_runner import OrtModel

import npusim
from npusim import npuw
from npusim.errors import CapacityError, InputError, TrimError
from npusim.npuw import NPUWInferRequest

_UNAVAILABLE = npuw.unavailable_reason()
pytestmark = pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))

TINY = LlamaLike(windows=(4, -1))


def check_call(
    request: NPUWInferRequest,
    oracle: OrtModel,
    tokens: Sequence[int],
    start: int,
    *,
    partitioned: bool = False,
) -> None:
    oracle.rewind(start)
    expected = oracle.feed(tokens)
    logits = call(request, tokens, start)
    expected = expected[:, -logits.shape[1] :]
    atol = tolerance(expected, partitioned=partitioned)
    np.testing.assert_allclose(logits, expected, atol=atol, rtol=0)
    assert request.num_stored_tokens == start + len(tokens)


@pytest.fixture(scope="module")
def tiny_oracle(tmp_path_factory: pytest.TempPathFactory) -> OrtModel:
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny.onnx"
    path.write_bytes(TINY.serialized)
    return OrtModel(path)


@pytest.fixture
def oracle(tiny_oracle: OrtModel) -> OrtModel:
    tiny_oracle.reset()
    return tiny_oracle


@pytest.fixture
def request_(tiny_compiled: npuw.NPUWCompiledLLM) -> NPUWInferRequest:
    return tiny_compiled.create_infer_request()


@pytest.fixture
def tiny_compiled() -> npuw.NPUWCompiledLLM:
    model = ov.Core().read_model(TINY.serialized)
    return npuw.compile_model(model, {**LENGTHS, **WHOLE_GRAPH})


# (first position, tokens): prompt, blocks of 1 to 8 with rejections, a window of 8 crossed at every offset.
SCRIPT = [(0, 13), (13, 1), (14, 8), (17, 5), (22, 3), (23, 8), (23, 2), (25, 7), (32, 4), (33, 6), (39, 8)]
# Prompts that end before, at and after the end of a chunk of 16, up to the longest; two blocks after each.
PROMPTS = [
    step for length in (15, 16, 17, 40, 63, 64) for step in ((0, length), (length, 5), (length + 5, 1))
]
# To the last slot of 120, in whole blocks and in one that just fits.
TO_THE_EDGE = [(0, 60), *((start, 8) for start in range(60, 116, 8)), (116, 4), (118, 2)]


@pytest.mark.parametrize("partitioned", [False, True], ids=["whole-graph-in-chunks", "partitioned"])
@pytest.mark.parametrize("name", READABLE)
def test_matches_onnx_runtime(name: str, partitioned: bool) -> None:
    """Through rejections, in chunked or whole prefill of any length, and up to the capacity."""
    oracle = OrtModel(READABLE[name])
    chunked = {**WHOLE_GRAPH, "NPUW_LLM_PREFILL_CHUNK_SIZE": 16}
    config = {**LENGTHS, "NPUW_LLM_MAX_PROMPT_LEN": 64, **({} if partitioned else chunked)}
    request = npuw.compile_model(READABLE[name], config).create_infer_request()
    assert request.capacity == 64 + 64 - 8
    for seed, (start, count) in enumerate([*SCRIPT, *PROMPTS, *TO_THE_EDGE]):
        check_call(request, oracle, tokens_of(count, seed=seed), start, partitioned=partitioned)
    for start, count in ((120, 1), (118, 8)):
        message = f"at position {start} need {start + count} slots, the capacity is 120"
        with pytest.raises(CapacityError, match=message):
            call(request, tokens_of(count), start)
    check_call(request, oracle, tokens_of(2), 118, partitioned=partitioned)


def test_oversized_calls_are_refused_and_change_nothing(request_: NPUWInferRequest, oracle: OrtModel) -> None:
    with pytest.raises(CapacityError, match="a prompt of 65 tokens; NPUW was compiled for 64"):
        call(request_, tokens_of(65), 0)
    check_call(request_, oracle, tokens_of(10), 0)
    with pytest.raises(CapacityError, match=r"9 tokens; NPUW's .* has 8 rows, .* give position_ids, or"):
        call(request_, tokens_of(9), 10)
    with pytest.raises(InputError, match="would be a gap"):
        call(request_, [3], 12)
    with pytest.raises(InputError, match="input_ids is empty"):
        request_.infer({"input_ids": np.zeros((1, 0), np.int64)})
    check_call(request_, oracle, tokens_of(3), 10)


def test_rewinds_below_the_last_block_are_refused(request_: NPUWInferRequest, oracle: OrtModel) -> None:
    check_call(request_, oracle, tokens_of(10), 0)
    for start in (10, 11, 12):
        check_call(request_, oracle, [start], start)
    assert [n for n in range(14) if request_.can_trim(n)] == [0, 12, 13]
    with pytest.raises(TrimError, match="goes back no further than 12"):
        request_.trim(11)
    with pytest.raises(TrimError, match="goes back no further than 12"):
        call(request_, [5], 11)
    for outside in (14, -1, 12.5, "12", None, True):
        assert not request_.can_trim(outside)
        with pytest.raises(TrimError, match=rf"trim to {outside!r} tokens, 13 are stored; .* 0\.\.13"):
            request_.trim(outside)
    assert request_.num_stored_tokens == 13
    assert request_.trim(12) == 1
    check_call(request_, oracle, tokens_of(4), 12)


def test_a_first_step_below_the_prompt_is_refused(request_: NPUWInferRequest, oracle: OrtModel) -> None:
    check_call(request_, oracle, tokens_of(10), 0)
    assert [n for n in range(12) if request_.can_trim(n)] == [0, 10]
    with pytest.raises(TrimError, match="the end of the prompt"):
        call(request_, [5], 9)
    check_call(request_, oracle, [5], 10)


@pytest.mark.parametrize(
    ("before", "start"), [([(0, 10), (10, 1), (11, 1), (12, 1)], 11), ([(0, 10)], 8)], ids=["steps", "prompt"]
)
def test_what_the_refusal_prevents(before: list[tuple[int, int]], start: int, oracle: OrtModel) -> None:
    """NPUW itself takes these rewinds, and its logits are wrong by far more than its rounding."""
    compiled = npuw.compile_model(ov.Core().read_model(TINY.serialized), {**LENGTHS, **WHOLE_GRAPH})
    raw = ov.compile_model(compiled.model, "NPU", dict(compiled.config.properties)).create_infer_request()
    for first, count in [*before, (start, 2)]:
        oracle.rewind(first)
        tokens = tokens_of(count, seed=first + count)
        expected = oracle.feed(tokens)
        stop = first + count
        feeds = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, stop), np.int64),
            "position_ids": np.arange(first, stop)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        difference = np.abs(raw.infer(feeds)["logits"][:, -1] - expected[:, -1]).max()
    assert difference > 0.1


def test_a_new_conversation_sees_nothing_of_the_old(request_: NPUWInferRequest, oracle: OrtModel) -> None:
    """Also one of a single token, which is a generate step to NPUW: its mask must be clean."""
    for begin in (30, 1, 5, 1):
        oracle.reset()
        check_call(request_, oracle, tokens_of(begin), 0)
        check_call(request_, oracle, tokens_of(8), begin)
        check_call(request_, oracle, tokens_of(3), begin + 2)
    request_.reset_state()
    oracle.reset()
    assert request_.num_stored_tokens == 0
    check_call(request_, oracle, tokens_of(1), 0)
    check_call(request_, oracle, tokens_of(2), 1)
    assert request_.trim(0) == 3
    oracle.reset()
    check_call(request_, oracle, tokens_of(1, seed=9), 0)


def test_two_requests_do_not_disturb_each_other(
    tiny_compiled: npuw.NPUWCompiledLLM, oracle: OrtModel
) -> None:
    first, second = tiny_compiled.create_infer_request(), tiny_compiled.create_infer_request()
    call(first, tokens_of(20), 0)
    call(second, tokens_of(6), 0)
    oracle.feed(tokens_of(20))
    check_call(first, oracle, tokens_of(3), 20)


def test_generate_and_drafts_agree_with_the_simulator() -> None:
    prompt = list(b"Return a list of the ")
    options = {**LENGTHS, **WHOLE_GRAPH}
    target = npuw.compile_model(READABLE["swa_target"], options).create_infer_request()
    draft = npuw.compile_model(READABLE["swa_draft"], options).create_infer_request()
    simulated = npusim.compile_model(READABLE["swa_target"], LENGTHS).create_infer_request()
    expected = npusim.generate(simulated, prompt, max_new_tokens=40).tokens
    assert npusim.generate(target, prompt, max_new_tokens=40).tokens == expected
    drafted = npusim.generate(target, prompt, max_new_tokens=40, drafter=npusim.DraftModel(draft))
    assert drafted.tokens == expected
    assert drafted.tokens_per_target_step > 2
    looked_up = npusim.generate(target, prompt, max_new_tokens=40, drafter=npusim.PromptLookup())
    assert looked_up.tokens == expected


def test_an_exported_model_is_taken_as_it_is(oracle: OrtModel) -> None:
    model = runs.lowered(TINY.serialized)
    request = npuw.compile_model(model, {**LENGTHS, **WHOLE_GRAPH}).create_infer_request()
    check_call(request, oracle, tokens_of(7), 0)
    check_call(request, oracle, tokens_of(2), 7)
    assert request.vocab_size == TINY.vocab_size
