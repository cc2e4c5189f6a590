"""Trace files and their replay."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_target import ToyTarget, hashed

from npusim.errors import CapacityError, InputError
from npusim.replay import Difference, ReplayResult, replay
from npusim.speculative import PromptLookup, Scripted, generate
from npusim.stage import Stage
from npusim.trace import (
    StepRecord,
    TraceError,
    TraceHeader,
    TraceWriter,
    WindowRecord,
    file_sha256,
    logits_sha256,
    read_trace,
    visible_span,
)

HEADER = TraceHeader(
    model_sha256="ab12",
    config={"NPUW_LLM_MAX_PROMPT_LEN": "16", "NPUSIM_COMMIT": "DEFERRED"},
    npusim_version="0.1.0",
    openvino_version="2026.4.1",
)
RECORD = StepRecord(
    stage=Stage.GENERATE,
    tokens=(7, 250),
    positions=(12, 13),
    trimmed=3,
    windows=(
        WindowRecord(local_window_size=-1, slots_written=((12, 14),), visible=(0, 14)),
        WindowRecord(local_window_size=5, slots_written=((5, 6), (0, 1)), visible=(8, 14)),
    ),
    host_seconds=1.25e-4,
    graph_seconds=0.1 + 0.2,
    logits_sha256="cd34",
)
FAILED = replace(RECORD, error="CapacityError", windows=(), logits_sha256="", stage=Stage.PREFILL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def test_what_is_written_is_read_back(path: Path) -> None:
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
        writer.write(FAILED)
    trace = read_trace(path)
    assert trace.header == HEADER
    assert trace.records == (RECORD, FAILED)
    assert len(path.read_text().splitlines()) == 3


def test_every_record_is_in_the_file_as_soon_as_it_is_written(path: Path) -> None:
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
        assert read_trace(path).records == (RECORD,)


def test_a_line_of_a_step_is_documented_json(path: Path) -> None:
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
    assert json.loads(path.read_text().splitlines()[1]) == {
        "record": "step",
        "stage": "generate",
        "tokens": [7, 250],
        "positions": [12, 13],
        "error": "",
        "trimmed": 3,
        "windows": [
            {"local_window_size": -1, "slots_written": [[12, 14]], "visible": [0, 14]},
            {"local_window_size": 5, "slots_written": [[5, 6], [0, 1]], "visible": [8, 14]},
        ],
        "host_seconds": 1.25e-4,
        "graph_seconds": 0.1 + 0.2,
        "logits_sha256": "cd34",
    }


def lines_of(path: Path) -> list[dict[str, object]]:
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
        writer.write(RECORD)
    return [json.loads(line) for line in path.read_text().splitlines()]


Change = Callable[[dict[str, object]], object]


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (1, lambda v: v.pop("model_sha256"), "a header record has no field 'model_sha256'"),
        (1, lambda v: v.update(format=2), "trace format 2; this npusim reads format 1"),
        (1, lambda v: v.update(config={"A": 1}), "field 'A' must be a string, got 1"),
        (1, lambda v: v.update(config=[]), r"field 'config' must be a JSON object, got \[\]"),
        (1, lambda v: v.update(record="step"), "a 'step' record where a header belongs"),
        (1, lambda v: v.update(date="x"), r"a header record has the unknown field\(s\) \['date'\]"),
        (3, lambda v: v.update(record="header"), "a 'header' record where a step belongs"),
        (3, lambda v: v.update(stage="decode"), r"stage 'decode' is none of \['prefill', 'generate'\]"),
        (3, lambda v: v.update(stage=None), "field 'stage' must be a string, got None"),
        (3, lambda v: v.update(tokens=[7, "8"]), "field 'tokens' must hold integers, got '8'"),
        (3, lambda v: v.update(tokens=7), "field 'tokens' must be a list, got 7"),
        (3, lambda v: v.update(tokens=[7]), "1 tokens at 2 positions"),
        (3, lambda v: v.update(tokens=[], positions=[]), "0 tokens at 0 positions"),
        (3, lambda v: v.update(trimmed=True), "field 'trimmed' must hold integers, got True"),
        (3, lambda v: v.update(trimmed=1.5), "field 'trimmed' must hold integers, got 1.5"),
        (3, lambda v: v.update(host_seconds="1"), "field 'host_seconds' must be a number, got '1'"),
        (3, lambda v: v.update(graph_seconds=False), "field 'graph_seconds' must be a number, got False"),
        (3, lambda v: v.pop("graph_seconds"), "a step record has no field 'graph_seconds'"),
        (
            3,
            lambda v: v.update(logit_sha256=""),
            r"a step record has the unknown field\(s\) \['logit_sha256'\]",
        ),
        (3, lambda v: v.update(windows=[3]), "an item of 'windows' must be a JSON object, got 3"),
        (3, lambda v: v["windows"][1].update(visible=[1]), r"field 'visible' must hold pairs.*\[1\]"),
        (3, lambda v: v["windows"][0].update(slots_written=[4]), "field 'slots_written' must hold pairs.*4"),
        (
            3,
            lambda v: v["windows"][0].update(w=4),
            r"an item of 'windows' has the unknown field\(s\) \['w'\]",
        ),
    ],
)
def test_a_malformed_line_is_named(path: Path, line: int, change: Change, message: str) -> None:
    lines = lines_of(path)
    change(lines[line - 1])
    path.write_text("".join(json.dumps(values) + "\n" for values in lines))
    with pytest.raises(TraceError, match=f"steps.jsonl, line {line}: {message}"):
        read_trace(path)


def test_a_file_cut_short_names_the_line(path: Path) -> None:
    lines_of(path)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(TraceError, match=r"line 3: not JSON .*may have been cut short"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b"\n", "line 1: not JSON"),
        (b"[1]\n", r"line 1: a header record must be a JSON object, got \[1\]"),
        (b"\xff\xfe\x00garbage", "line 1: not JSON"),
    ],
)
def test_what_is_no_trace_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("positions", "local_window_size", "expected"),
    [
        ((4, 5, 6), -1, (0, 7)),
        ((4, 5, 6), 1, (4, 7)),
        ((4, 5, 6), 4, (1, 7)),
        ((4, 5, 6), 5, (0, 7)),
        ((4, 5, 6), 6, (0, 7)),
    ],
)
def test_a_window_counts_the_query(
    positions: tuple[int, ...], local_window_size: int, expected: tuple[int, int]
) -> None:
    assert visible_span(positions, local_window_size) == expected


def test_digests_are_of_the_bytes(path: Path) -> None:
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    logits = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    assert logits_sha256(logits) == logits_sha256(np.asfortranarray(logits))
    assert logits_sha256(logits) != logits_sha256(np.nextafter(logits, np.float32(9)))


# -- replay --------------------------------------------------------------------------------------------------


def toy(capacity: int = 30) -> ToyTarget:
    """A cache that can go back by one block from the highest position since its last reset."""
    return ToyTarget(capacity=capacity, rewind_rows=3)


def recorded() -> list[StepRecord]:
    """Records of a generation with rejected drafts, a reset, single-token prompts and a refused call."""
    records: list[StepRecord] = []
    target = toy()
    target.step_listener = records.append
    flawed = Scripted(lambda tokens, n: [tokens[-1]] * n)
    generate(target, [3, 9, 1, 4], max_new_tokens=9, drafter=flawed, num_draft_tokens=3)
    with pytest.raises(CapacityError, match="toy: 18 tokens"):
        target.infer({"input_ids": np.ones((1, 18), int), "position_ids": np.arange(18)[None]})
    target.infer({"input_ids": np.array([[5]]), "position_ids": np.array([[12]])})
    target.reset_state()
    generate(target, [6], max_new_tokens=9, drafter=flawed, num_draft_tokens=2)
    return records


class Untraced:
    """Only what any request has."""

    def __init__(self, target: ToyTarget) -> None:
        self._target = target

    def infer(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self._target.infer(inputs)

    def reset_state(self) -> None:
        self._target.reset_state()


@pytest.mark.parametrize("wrap", [lambda target: target, Untraced])
def test_a_replay_reproduces_every_record(wrap: Callable[[ToyTarget], ToyTarget]) -> None:
    records = recorded()
    assert {record.error for record in records} == {"", "CapacityError"}
    assert any(record.trimmed for record in records)
    used = toy()
    generate(used, [1, 1, 1], max_new_tokens=20)
    assert replay(records, wrap(used)) == ReplayResult(num_equal=len(records), difference=None)


def test_a_replay_begins_with_an_empty_cache() -> None:
    records: list[StepRecord] = []
    target = toy()
    target.step_listener = records.append
    with pytest.raises(InputError, match="toy: a gap"):
        target.infer({"input_ids": np.array([[4]]), "position_ids": np.array([[3]])})
    used = toy()
    generate(used, [1, 1, 1], max_new_tokens=2)
    assert replay(records, used).difference is None


def test_a_replay_survives_the_file(path: Path) -> None:
    target = ToyTarget(capacity=30)
    with TraceWriter(path, HEADER) as writer:
        target.step_listener = writer.write
        generate(target, [3, 9, 1], max_new_tokens=6, drafter=PromptLookup())
    assert replay(read_trace(path).records, ToyTarget(capacity=30)).difference is None


@pytest.mark.parametrize("index", [1, 4, 7])
@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("logits_sha256", "00", "00"),
        ("error", "TrimError", "TrimError"),
        ("trimmed", 55, "55"),
        ("stage", Stage.PREFILL, "Stage.PREFILL"),
        ("windows", (), "()"),
    ],
)
def test_the_first_difference_is_named(index: int, field: str, value: object, shown: str) -> None:
    records = recorded()
    right = str(getattr(records[index], field)) or "none"
    for changed in (index, index + 2):
        records[changed] = replace(records[changed], **{field: value})  # type: ignore[arg-type]
    result = replay(records, toy())
    assert result.num_equal == index
    assert result.difference == Difference(index=index, field=field, expected=shown, got=right)
    assert str(result.difference) == f"record {index}, {field}: recorded {shown}, now {right}"


def test_another_model_differs_in_its_logits_and_a_smaller_one_in_an_error() -> None:
    records = recorded()
    other = replay(records, Untraced(ToyTarget(capacity=30, logits_of=hashed(vocab_size=11, seed=8))))
    assert (other.num_equal, other.difference and other.difference.field) == (0, "logits_sha256")
    smaller = replay(records, toy(capacity=10)).difference
    assert smaller is not None
    assert (smaller.field, smaller.expected, smaller.got) == ("error", "none", "CapacityError")


def test_times_do_not_count_and_the_listener_is_put_back() -> None:
    records = [replace(record, host_seconds=9.0, graph_seconds=9.0) for record in recorded()]
    request = ToyTarget(capacity=30)
    seen: list[StepRecord] = []
    request.step_listener = listener = seen.append
    assert replay(records, request).difference is None
    assert request.step_listener is listener
    assert seen == []
