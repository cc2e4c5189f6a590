"""Trace files: written, read back, cut short, edited."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from trace_data import FAILED, HEADER, RECORD, lines_of

from npusim.trace import (
    TraceError,
    TraceWriter,
    logits_sha256,
    visible_span,
)
from npusim.trace_reader import read_trace


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
    assert trace.is_whole
    assert len(path.read_text().splitlines()) == 4


def test_every_record_is_in_the_file_as_soon_as_it_is_written(path: Path) -> None:
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
        trace = read_trace(path)
        assert trace.records == (RECORD,)
        assert not trace.is_whole


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


Change = Callable[[dict[str, object]], object]


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (1, lambda v: v.pop("model_sha256"), "the header record has no field 'model_sha256'"),
        (1, lambda v: v.update(format=1), "trace format 1; this npusim reads format 2"),
        (1, lambda v: v.pop("weights_sha256"), "the header record has no field 'weights_sha256'"),
        (1, lambda v: v.update(config={"A": 1}), "field 'A' must be a string, got 1"),
        (1, lambda v: v.update(config=[]), r"field 'config' must be a JSON object, got \[\]"),
        (1, lambda v: v.update(record="step"), "a 'step' record, expected was header"),
        (1, lambda v: v.update(date="x"), r"the header record has the unknown field\(s\) \['date'\]"),
        (3, lambda v: v.update(record="header"), "a 'header' record, expected was step or end"),
        (3, lambda v: v.update(stage="decode"), r"stage 'decode' is none of \['prefill', 'generate'\]"),
        (3, lambda v: v.update(stage=None), "field 'stage' must be a string, got None"),
        (3, lambda v: v.update(tokens=[7, "8"]), "field 'tokens' must hold integers, got '8'"),
        (3, lambda v: v.update(tokens=7), "field 'tokens' must be a list, got 7"),
        (3, lambda v: v.update(tokens=[7]), "1 tokens at 2 positions"),
        (3, lambda v: v.update(tokens=[], positions=[]), "0 tokens at 0 positions"),
        (3, lambda v: v.update(trimmed=True), "field 'trimmed' must hold integers, got True"),
        (3, lambda v: v.update(trimmed=2**63), "field 'trimmed' must hold integers of 64 bits"),
        (3, lambda v: v.update(positions=[-(2**63) - 1, 0]), "field 'positions' must hold integers of 64"),
        (
            3,
            lambda v: v.update(host_seconds=10**400),
            "field 'host_seconds' must be a finite",
        ),
        (3, lambda v: v.update(graph_seconds=math.nan), "not JSON .NaN is no number of JSON"),
        (3, lambda v: v.update(trimmed=1.5), "field 'trimmed' must hold integers, got 1.5"),
        (3, lambda v: v.update(host_seconds="1"), "field 'host_seconds' must be a number, got '1'"),
        (3, lambda v: v.update(graph_seconds=False), "field 'graph_seconds' must be a number, got False"),
        (3, lambda v: v.pop("graph_seconds"), "the step record has no field 'graph_seconds'"),
        (
            3,
            lambda v: v.update(logit_sha256=""),
            r"the step record has the unknown field\(s\) \['logit_sha256'\]",
        ),
        (3, lambda v: v.update(windows=[3]), "an item of 'windows' must be a JSON object, got 3"),
        (3, lambda v: v["windows"][1].update(visible=[1]), r"field 'visible' must hold pairs.*\[1\]"),
        (3, lambda v: v["windows"][0].update(slots_written=[4]), "field 'slots_written' must hold pairs.*4"),
        (
            3,
            lambda v: v["windows"][0].update(w=4),
            r"an item of 'windows' has the unknown field\(s\) \['w'\]",
        ),
        (4, lambda v: v.update(steps=3), "the end counts 3 steps, here are 2"),
        (4, lambda v: v.update(steps=None), "field 'steps' must hold integers, got None"),
        (4, lambda v: v.update(more=1), r"the end record has the unknown field\(s\) \['more'\]"),
    ],
)
def test_a_malformed_line_is_named(path: Path, line: int, change: Change, message: str) -> None:
    lines = lines_of(path)
    change(lines[line - 1])
    path.write_text("".join(json.dumps(values) + "\n" for values in lines))
    with pytest.raises(TraceError, match=f"steps.jsonl, line {line}: {message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b"\n", "line 1: not JSON"),
        (b"[1]\n", r"line 1: a record .header. must be a JSON object, got \[1\]"),
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


def test_digests_are_of_the_bytes() -> None:
    logits = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    assert logits_sha256(logits) == logits_sha256(np.asfortranarray(logits))
    assert logits_sha256(logits) != logits_sha256(np.nextafter(logits, np.float32(9)))
