"""Records of the simulated NPU's request, and their replay."""

import numpy as np
import pytest
from model_files import READABLE

import npusim
from npusim.errors import CapacityError, InputError, TrimError
from npusim.replay import replay
from npusim.speculative import Scripted, generate
from npusim.stage import Stage
from npusim.static_graph import StaticGraph
from npusim.trace import StepRecord, WindowRecord


def compiled(model: str = "gptoss_attention", **changes: str | int) -> npusim.CompiledLLM:
    config: dict[str, str | int] = {
        "NPUW_LLM_MAX_PROMPT_LEN": 9,
        "NPUW_LLM_MIN_RESPONSE_LEN": 14,
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 4,
    }
    return npusim.compile_model(READABLE[model], config | changes)


@pytest.fixture(scope="module")
def eager() -> npusim.CompiledLLM:
    return compiled()


@pytest.fixture(scope="module")
def deferred() -> npusim.CompiledLLM:
    return compiled(NPUSIM_COMMIT="DEFERRED")


PROMPT = [40, 41, 200, 17, 3]


def recorded(llm: npusim.CompiledLLM) -> list[StepRecord]:
    """Rejected drafts, trims, a reset, a prompt of one token and five refusals."""
    records: list[StepRecord] = []
    request = llm.create_infer_request()
    request.step_listener = records.append
    flawed = Scripted(lambda tokens, n: [tokens[-1], 7, 7][:n])
    generate(request, PROMPT, max_new_tokens=10, drafter=flawed, num_draft_tokens=3)
    request.trim(9)
    request.infer({"input_ids": np.array([[5, 6]])})
    with pytest.raises(
        CapacityError, match=r"a block of 5 tokens .* begins at position 0: give position_ids"
    ):
        request.infer({"input_ids": np.array([[1, 2, 3, 4, 5]])})
    for refused in (
        {"position_ids": [[30]]},
        {"position_ids": [[2, 9]], "input_ids": [[1, 2]]},
        {"input_ids": [[-4]]},
    ):
        with pytest.raises(InputError, match=r"gap|not consecutive|token ids are"):
            request.infer({"input_ids": [[7]], **refused})
    request.reset_state()
    generate(request, [257], max_new_tokens=12, drafter=flawed, num_draft_tokens=2)
    with pytest.raises(CapacityError, match="a prompt of 10 tokens"):
        request.infer({"input_ids": np.ones((1, 10), int), "position_ids": np.arange(10)[None]})
    generate(request, PROMPT[:2], max_new_tokens=3)
    return records


def test_a_record_says_what_a_call_did(eager: npusim.CompiledLLM) -> None:
    records: list[StepRecord] = []
    request = eager.create_infer_request()
    request.step_listener = records.append
    for tokens, first in [(PROMPT, 0), ([8, 9, 10], 5), ([11, 12, 13], 6), ([14], 9)]:
        positions = first + np.arange(len(tokens))[None]
        request.infer({"input_ids": np.array([tokens]), "position_ids": positions})
    assert [record.stage for record in records] == [Stage.PREFILL] + [Stage.GENERATE] * 3
    assert [record.trimmed for record in records] == [0, 0, 2, 0]
    assert records[2].tokens == (11, 12, 13)
    assert records[2].positions == (6, 7, 8)
    assert records[3].windows == (
        WindowRecord(local_window_size=-1, slots_written=((9, 10),), visible=(0, 10)),
        WindowRecord(local_window_size=8, slots_written=((9, 10),), visible=(2, 10)),
    )
    assert all(record.graph_seconds > 0 and record.host_seconds > 0 for record in records)
    assert len({record.logits_sha256 for record in records}) == 4


@pytest.mark.parametrize("policy", ["eager", "deferred"])
def test_a_replay_reproduces_a_request_bit_for_bit(
    policy: str, request: pytest.FixtureRequest, eager: npusim.CompiledLLM
) -> None:
    llm: npusim.CompiledLLM = request.getfixturevalue(policy)
    records = recorded(llm)
    errors = [record.error for record in records if record.error]
    assert errors == ["CapacityError", *["InputError"] * 3, "CapacityError"]
    assert max(record.trimmed for record in records) == 5, "by trim"
    used = llm.create_infer_request()
    generate(used, [1, 2, 3], max_new_tokens=12)
    assert replay(records, used).difference is None
    assert replay(records, eager.create_infer_request()).difference is None, "commit is not seen from outside"


@pytest.mark.parametrize(
    ("inputs", "positions"),
    [
        ({"position_ids": [[6, 7]]}, (6, 7)),
        ({"position_ids": [[5, 9]]}, (5, 9)),
        ({"position_ids": [[-1, 0]]}, (-1, 0)),
        ({"input_ids": [[4, 10**6]]}, (5, 6)),
    ],
)
def test_a_refused_call_leaves_a_record_of_what_was_given(
    eager: npusim.CompiledLLM, inputs: dict[str, list[list[int]]], positions: tuple[int, ...]
) -> None:
    records: list[StepRecord] = []
    request = eager.create_infer_request()
    request.infer({"input_ids": [PROMPT]})
    request.step_listener = records.append
    given = {"input_ids": [[4, 5]], **inputs}
    with pytest.raises(InputError):
        request.infer(given)
    (record,) = records
    assert (record.error, record.tokens) == ("InputError", tuple(given["input_ids"][0]))
    assert (record.positions, record.windows, record.logits_sha256) == (positions, (), "")


def test_a_call_that_contradicts_itself_leaves_none(eager: npusim.CompiledLLM) -> None:
    """A record has no mask, so the same call could not be made again."""
    records: list[StepRecord] = []
    request = eager.create_infer_request()
    request.infer({"input_ids": [PROMPT]})
    request.step_listener = records.append
    with pytest.raises(InputError, match="attention_mask has 2 entries"):
        request.infer({"input_ids": [[4, 5]], "attention_mask": [[1, 1]]})
    assert records == []
    assert request.infer({"input_ids": [[4, 5]]})["logits"].shape[1] == 2


@pytest.mark.parametrize(
    ("error", "recorded"), [(RuntimeError, ["", "RuntimeError", ""]), (KeyboardInterrupt, ["", ""])]
)
def test_a_call_that_fails_inside_leaves_a_record_but_an_interrupt_none(
    eager: npusim.CompiledLLM,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    recorded: list[str],
) -> None:
    def fail(_graph: StaticGraph) -> None:
        raise error("the device is gone")

    records: list[StepRecord] = []
    request = eager.create_infer_request()
    request.step_listener = records.append
    request.infer({"input_ids": [PROMPT]})
    with monkeypatch.context() as patched:
        patched.setattr(StaticGraph, "run", fail)
        with pytest.raises(error, match="the device is gone"):
            request.infer({"input_ids": [[4, 5]]})
    request.infer({"input_ids": [[4, 5]]})
    assert [record.error for record in records] == recorded
    assert {record.positions for record in records[1:]} == {(5, 6)}


def test_a_trim_that_is_refused_once_is_refused_in_the_replay() -> None:
    """A ring of 8 + 4 - 1 rows cannot go back by 5: the record holds the refusal, and the calls after it."""
    llm = compiled("phi3_window8", NPUSIM_KV_LAYOUT="RING")
    request = llm.create_infer_request()
    records: list[StepRecord] = []
    request.step_listener = records.append
    generate(request, PROMPT, max_new_tokens=14)
    with pytest.raises(TrimError, match="have overwritten or evicted"):
        request.infer({"input_ids": np.array([[4]]), "position_ids": np.array([[10]])})
    request.infer({"input_ids": np.array([[4]])})
    assert [record.error for record in records][-2:] == ["TrimError", ""]
    assert replay(records, llm.create_infer_request()).difference is None


def test_another_model_is_another_trace(eager: npusim.CompiledLLM) -> None:
    difference = replay(recorded(eager), compiled("qwen3").create_infer_request()).difference
    assert difference is not None
    assert (difference.index, difference.field) == (0, "windows")
