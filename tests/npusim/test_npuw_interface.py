"""The request of NPUW is driven, recorded and replayed as the simulator's is."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import openvino as ov
import pytest
from llama_like import LlamaLike
from npuw_calls import LENGTHS, WHOLE_GRAPH, call, tokens_of
from trace_data import HEADER

import npusim
from npusim import npuw
from npusim.errors import CapacityError, InputError, NpuSimError, TrimError
from npusim.npuw import NPUWCompiledLLM, NPUWInferRequest
from npusim.replay import replay
from npusim.speculative.target import KnowsRewinds
from npusim.stage import Stage
from npusim.trace import StepRecord, TraceWriter, logits_sha256
from npusim.trace_reader import read_trace

_UNAVAILABLE = npuw.unavailable_reason()
pytestmark = pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))

TINY = LlamaLike(windows=(4, -1))
PROMPT = tokens_of(10)


@pytest.fixture(scope="module")
def compiled() -> NPUWCompiledLLM:
    return npuw.compile_model(ov.Core().read_model(TINY.serialized), {**LENGTHS, **WHOLE_GRAPH})


@pytest.fixture
def request_(compiled: NPUWCompiledLLM) -> NPUWInferRequest:
    return compiled.create_infer_request()


@pytest.fixture(scope="module")
def used(compiled: NPUWCompiledLLM) -> NPUWInferRequest:
    """For tests that set no tensors; compiling is what takes the time."""
    return compiled.create_infer_request()


@pytest.fixture
def recorded(used: NPUWInferRequest) -> tuple[NPUWInferRequest, list[StepRecord]]:
    """A request without a conversation, and what it records."""
    records: list[StepRecord] = []
    used.reset_state()
    used.step_listener = records.append
    return used, records


def test_tensors_are_set_and_got(compiled: NPUWCompiledLLM, request_: NPUWInferRequest) -> None:
    with pytest.raises(InputError, match="input_ids is missing; set it, or pass it to infer"):
        request_.infer()
    with pytest.raises(InputError, match="logits are not there yet; call infer first"):
        request_.get_tensor("logits")
    with pytest.raises(InputError, match="'position_ids' was not set"):
        request_.get_tensor("position_ids")
    request_.set_tensor("input_ids", np.array([PROMPT]))
    request_.set_tensor(compiled.model.input("position_ids"), np.arange(10)[None])
    logits = request_.infer()["logits"]
    got = request_.get_tensor("logits")
    assert (got.element_type, list(got.shape)) == (ov.Type.f32, [1, 8, TINY.vocab_size])  # the newest rows
    np.testing.assert_array_equal(got.data, logits)
    assert request_.get_tensor("input_ids").data.tolist() == [PROMPT]
    # What is passed to infer goes before, for that call alone; what is not, as it was set.
    call(request_, [5], 10)
    assert request_.num_stored_tokens == 11
    other = request_.infer({"input_ids": [tokens_of(10, seed=4)]})["logits"]
    np.testing.assert_array_equal(call(request_, tokens_of(10, seed=4), 0), other)
    call(request_, [5], 10)
    np.testing.assert_array_equal(request_.infer()["logits"], logits)
    assert request_.num_stored_tokens == 10
    request_.reset_state()
    assert request_.get_tensor("input_ids").data.tolist() == [PROMPT]
    np.testing.assert_array_equal(request_.get_tensor("logits").data, logits)


@pytest.mark.parametrize("name", ["beam_idx", "tokens"])
def test_unknown_names_are_refused(used: NPUWInferRequest, name: str) -> None:
    for refused in (
        lambda: used.set_tensor(name, [[1]]),
        lambda: used.get_tensor(name),
        lambda: used.infer({"input_ids": [[1]], name: [[1]]}),
    ):
        with pytest.raises(InputError, match=f"unknown input '{name}'; inputs are input_ids, attention_mask"):
            refused()


def test_logits_are_a_copy_unless_outputs_are_shared(used: NPUWInferRequest) -> None:
    call(used, PROMPT, 0)
    kept = call(used, [5], 10)
    once = kept.copy()
    given = {"input_ids": np.array([[6]]), "position_ids": np.array([[11]])}
    shared = used.infer(given, share_outputs=True)["logits"]
    np.testing.assert_array_equal(kept, once)
    assert np.shares_memory(shared, used.get_tensor("logits").data)
    assert not np.shares_memory(kept, shared)


def test_any_rejected_draft_can_be_taken_back(used: NPUWInferRequest) -> None:
    assert isinstance(used, KnowsRewinds)
    assert used.takes_back_blocks(block_size=8, num_tokens=120)
    call(used, PROMPT, 0)
    start = 10
    for length in (1, 8, 5, 8):
        call(used, tokens_of(length), start)
        assert all(used.can_trim(end) for end in range(start, start + length + 1))
        start += length


def test_a_record_says_what_a_call_did(recorded: tuple[NPUWInferRequest, list[StepRecord]]) -> None:
    request, records = recorded
    calls = [(PROMPT, 0), ([8, 9, 10], 10), ([11, 12, 13], 11), ([14], 14)]
    digests = [logits_sha256(call(request, tokens, start)) for tokens, start in calls]
    assert request.graph_seconds == records[-1].graph_seconds
    assert [record.logits_sha256 for record in records] == digests
    assert [record.stage for record in records] == [Stage.PREFILL] + [Stage.GENERATE] * 3
    assert [record.trimmed for record in records] == [0, 0, 2, 0]
    assert (records[2].tokens, records[2].positions) == ((11, 12, 13), (11, 12, 13))
    assert [(record.windows, record.error) for record in records] == [((), "")] * 4
    assert all(record.graph_seconds > record.host_seconds > 0 for record in records)


def test_a_traced_run_replays_bit_for_bit(
    compiled: NPUWCompiledLLM, recorded: tuple[NPUWInferRequest, list[StepRecord]], tmp_path: Path
) -> None:
    """With rejected drafts, a trim, a refusal, a reset and a prompt of one token."""
    request, _ = recorded
    flawed = npusim.Scripted(lambda tokens, n: [tokens[-1], 7, 7][:n])
    with TraceWriter(tmp_path / "npuw.jsonl", HEADER) as writer:
        request.step_listener = writer.write
        npusim.generate(request, PROMPT, max_new_tokens=10, drafter=flawed, num_draft_tokens=3)
        call(request, [4, 5, 6], request.num_stored_tokens)
        request.trim(request.num_stored_tokens - 2)
        request.infer({"input_ids": [[5, 6]]})
        with pytest.raises(TrimError, match="goes back no further than"):
            call(request, [5], 3)
        request.reset_state()
        npusim.generate(request, [7], max_new_tokens=6, drafter=flawed, num_draft_tokens=2)
        request.step_listener = None
    trace = read_trace(tmp_path / "npuw.jsonl")
    assert trace.is_whole
    assert max(record.trimmed for record in trace.records) >= 2
    assert [record.error for record in trace.records if record.error] == ["TrimError"]
    result = replay(trace.records, compiled.create_infer_request())
    assert (result.difference, result.num_equal) == (None, len(trace.records))


def test_on_step_gets_the_record(recorded: tuple[NPUWInferRequest, list[StepRecord]]) -> None:
    request, records = recorded
    steps: list[npusim.Step] = []
    npusim.generate(request, PROMPT, max_new_tokens=4, on_step=steps.append)
    assert [step.record for step in steps] == records
    assert [step.record.positions[0] for step in steps if step.record] == [0, 10, 11, 12]


@pytest.mark.parametrize(
    ("error", "tokens", "start"),
    [(CapacityError, [1] * 9, 10), (TrimError, [1], 9), (InputError, [1, 2], 12), (InputError, [-4], 10)],
)
def test_a_refused_call_leaves_a_record_and_no_change(
    recorded: tuple[NPUWInferRequest, list[StepRecord]],
    error: type[NpuSimError],
    tokens: list[int],
    start: int,
) -> None:
    request, records = recorded
    call(request, PROMPT, 0)
    expected = call(request, [5], 10)
    call(request, PROMPT, 0)
    with pytest.raises(error, match=r"a block of 9|goes back no further|would be a gap|token ids are"):
        call(request, tokens, start)
    refused = records[-1]
    assert (refused.error, refused.tokens, refused.positions[0]) == (error.__name__, tuple(tokens), start)
    assert (refused.trimmed, refused.logits_sha256, request.graph_seconds) == (0, "", 0.0)
    assert request.num_stored_tokens == 10
    np.testing.assert_array_equal(call(request, [5], 10), expected)


@pytest.mark.parametrize(
    ("error", "raised", "count"), [(RuntimeError, NpuSimError, 1), (KeyboardInterrupt, KeyboardInterrupt, 0)]
)
def test_a_failure_of_npuw_is_recorded_and_ends_the_conversation_but_an_interrupt_is_not(
    recorded: tuple[NPUWInferRequest, list[StepRecord]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    raised: type[BaseException],
    count: int,
) -> None:
    request, records = recorded
    expected = call(request, PROMPT, 0)
    with monkeypatch.context() as patched:
        patched.setattr(ov.InferRequest, "infer", Mock(side_effect=error("the device is gone")))
        with pytest.raises(raised, match="the device is gone"):
            call(request, [5], 10)
    assert [record.error for record in records[1:]] == ["NpuSimError"] * count
    assert request.num_stored_tokens == (0 if count else 10)
    np.testing.assert_array_equal(call(request, PROMPT, 0), expected)
    assert records[-1].trimmed == 0
