"""Trace files that were cut short, edited, or could not be written."""

import errno
import io
from dataclasses import replace
from pathlib import Path

import pytest
from trace_data import FAILED, HEADER, RECORD, lines_of

from npusim.trace import TraceError, TraceWriter
from npusim.trace_reader import is_trace, read_trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


@pytest.mark.parametrize("missing", [1, 25, 30])
def test_a_file_cut_short_is_read_as_far_as_it_goes(path: Path, missing: int) -> None:
    """Without its end, with half of it, with half of the last step."""
    lines_of(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-missing])
    trace = read_trace(path)
    assert trace.records == (RECORD, RECORD)
    assert trace.is_whole == (missing == 1)
    path.write_bytes(whole[: whole.rindex(b'"trimmed"')])
    trace = read_trace(path)
    assert trace.records == (RECORD,)
    assert not trace.is_whole


def test_a_line_that_is_cut_in_the_middle_of_the_file_is_named(path: Path) -> None:
    lines_of(path)
    first, second, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, second[:40] + "\n", *others]))
    with pytest.raises(TraceError, match=r"line 2: not JSON .*or the file was cut short"):
        read_trace(path)


def test_nothing_comes_behind_the_end(path: Path) -> None:
    lines_of(path)
    path.write_text(path.read_text() + '{"record": "end", "steps": 2}\n')
    with pytest.raises(TraceError, match="line 5: a line behind the end of the trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[NaN]", '{"record": [[1e999]]}']
)
def test_values_beyond_the_limits_are_no_traceback(path: Path, line: str) -> None:
    lines_of(path)
    header, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, line + "\n", *others]))
    with pytest.raises(TraceError, match="line 2: "):
        read_trace(path)


def test_a_trace_without_a_call_is_refused(path: Path) -> None:
    with TraceWriter(path, HEADER):
        pass
    with pytest.raises(TraceError, match="there is no call in this trace"):
        read_trace(path)


def test_a_refused_call_keeps_what_it_was_given(path: Path) -> None:
    """Positions that do not belong to the tokens, no token at all: that is why it was refused."""
    records = [
        replace(FAILED, error="InputError", tokens=tokens, positions=positions)
        for tokens, positions in [((5, 6), (3,)), ((), ()), ((-4, 10**9), (7, 5))]
    ]
    with TraceWriter(path, HEADER) as writer:
        for record in records:
            writer.write(record)
    assert read_trace(path).records == tuple(records)


def interrupted(path: Path) -> None:
    with TraceWriter(path, HEADER) as writer:
        writer.write(RECORD)
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_file_as_well(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert read_trace(path).is_whole


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_trace_error() -> None:
    with pytest.raises(TraceError, match=r"/dev/full: cannot be written \(No space left on device"):
        TraceWriter(FULL, HEADER)


class Full(io.BytesIO):
    """A file without room."""

    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up_is_a_trace_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(path, HEADER)
    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(TraceError, match="No space left on device"):
        writer.write(RECORD)
    with pytest.raises(TraceError, match="No space left on device"), writer:
        pass


def test_a_file_that_cannot_be_made_is_a_trace_error(path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent.steps.jsonl: cannot be written \(No such file"):
        TraceWriter(path.parent / "absent" / path.name, HEADER)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", False), ("{}\n", False), ('{"record": "header"}\n', False), ("PK\x00" * 9, False), ("[1]", False)],
)
def test_a_trace_is_known_by_its_header(path: Path, content: str, expected: bool) -> None:
    path.write_text(content)
    assert is_trace(path) == expected
    lines_of(path)
    assert is_trace(path)
    path.write_text(path.read_text().splitlines()[0] + "\nwhatever")
    assert is_trace(path)
