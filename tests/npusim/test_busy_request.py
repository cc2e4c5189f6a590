"""A request makes one call at a time; what a call leaves is counted however it ends."""

import threading

import numpy as np
import pytest
from model_files import READABLE

import npusim
from npusim.errors import CapacityError, InputError, NpuSimError
from npusim.replay import replay
from npusim.static_graph import StaticGraph
from npusim.trace import StepRecord

PROMPT = [5, 9, 2, 40, 7]
BLOCK = {"input_ids": np.array([[11, 12]])}


@pytest.fixture(scope="module")
def compiled() -> npusim.CompiledLLM:
    return npusim.compile_model(
        READABLE["phi3_window8"],
        {
            "NPUW_LLM_MAX_PROMPT_LEN": 12,
            "NPUW_LLM_MIN_RESPONSE_LEN": 9,
            "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 3,
            "NPUW_LLM_PREFILL_CHUNK_SIZE": 4,
        },
    )


@pytest.fixture
def prefilled(compiled: npusim.CompiledLLM) -> npusim.LLMInferRequest:
    request = compiled.create_infer_request()
    request.infer({"input_ids": np.array([PROMPT])})
    return request


def test_a_call_from_another_thread_is_refused(
    prefilled: npusim.LLMInferRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()
    run = StaticGraph.run

    def slow(graph: StaticGraph) -> None:
        entered.set()
        leave.wait(timeout=30)
        run(graph)

    monkeypatch.setattr(StaticGraph, "run", slow)
    caller = threading.Thread(target=prefilled.infer, args=(BLOCK,))
    caller.start()
    entered.wait(timeout=30)
    with pytest.raises(NpuSimError, match="busy with another call"):
        prefilled.infer(BLOCK)
    leave.set()
    caller.join()
    assert prefilled.num_stored_tokens == 7
    assert prefilled.infer(BLOCK)["logits"].shape[1] == 2


def test_a_listener_cannot_call_the_request_that_called_it(prefilled: npusim.LLMInferRequest) -> None:
    prefilled.step_listener = lambda _record: prefilled.infer(BLOCK)
    with pytest.raises(NpuSimError, match="busy with another call"):
        prefilled.infer(BLOCK)
    prefilled.step_listener = None
    assert prefilled.num_stored_tokens == 7
    assert prefilled.infer(BLOCK)["logits"].shape[1] == 2


def test_what_is_trimmed_is_counted_after_a_listener_that_raised(prefilled: npusim.LLMInferRequest) -> None:
    records: list[StepRecord] = []

    def failing(record: StepRecord) -> None:
        records.append(record)
        raise CapacityError("the disk is full")

    prefilled.step_listener = failing
    for start in (5, 7, 8):
        with pytest.raises(CapacityError, match="the disk is full"):
            prefilled.infer({**BLOCK, "position_ids": np.array([[start, start + 1]])})
    assert [record.trimmed for record in records] == [0, 0, 1]


def test_what_is_trimmed_is_counted_after_a_prefill_that_failed_in_its_midst(
    compiled: npusim.CompiledLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = compiled.create_infer_request()
    runs = iter(range(9))
    run = StaticGraph.run

    def second_fails(graph: StaticGraph) -> None:
        if next(runs) == 1:
            raise RuntimeError("the device is gone")
        run(graph)

    with monkeypatch.context() as patched:
        patched.setattr(StaticGraph, "run", second_fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            request.infer({"input_ids": np.array([[*PROMPT, *PROMPT]])})
    records: list[StepRecord] = []
    request.step_listener = records.append
    request.infer({**BLOCK, "position_ids": np.array([[3, 4]])})
    assert [record.trimmed for record in records] == [1], "four were stored"


def test_a_refused_call_does_not_hide_what_a_trim_before_it_took(compiled: npusim.CompiledLLM) -> None:
    """Nor may it in the replay, where the trim and the call after it are one."""
    records: list[StepRecord] = []
    request = compiled.create_infer_request()
    request.step_listener = records.append
    request.infer({"input_ids": np.array([PROMPT])})
    request.trim(3)
    with pytest.raises(InputError, match="would be a gap"):
        request.infer({**BLOCK, "position_ids": np.array([[6, 7]])})
    request.infer(BLOCK)
    assert [(record.error, record.trimmed) for record in records] == [("", 0), ("InputError", 0), ("", 2)]
    assert replay(records, compiled.create_infer_request()).difference is None
