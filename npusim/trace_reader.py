"""Read a trace file, which may have been cut short or edited: every line is checked."""

import json
import reprlib
import sys
from pathlib import Path
from typing import NoReturn, Self

from npusim.stage import Stage
from npusim.trace import FORMAT, Span, StepRecord, Trace, TraceError, TraceHeader, WindowRecord


def read_trace(path: Path) -> Trace:
    """The whole trace; TraceError, with the number of the line, for the first line that is not as written.

    A file without its end is what a crash or a full disk leaves: it is read as far as it goes, without half
    a last line. Raises TraceError too where there is not one call in it, OSError where it cannot be opened.
    """
    reading = _Reading()
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                reading.take(line)
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    if reading.header is None:
        raise TraceError(f"{path}, line 1: the file is empty; a trace begins with a header")
    if not reading.records:
        raise TraceError(f"{path}: there is no call in this trace, and so nothing to make again")
    return Trace(header=reading.header, records=tuple(reading.records), is_whole=reading.is_whole)


def is_trace(path: Path) -> bool:
    """Whether the file begins as a trace does, whatever follows. Raises OSError where it cannot be opened."""
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            _, header = _Fields.of_line(file.readline(LONGEST_HEADER), "header")
            header.text("npusim_version")
        except TraceError:
            return False
    return True


LONGEST_HEADER = 1_000_000
"""Characters; a file of another kind may be one line without an end."""


class _Reading:
    """What was read so far."""

    def __init__(self) -> None:
        self.header: TraceHeader | None = None
        self.records: list[StepRecord] = []
        self.is_whole = False

    def take(self, line: str) -> None:
        if self.is_whole:
            raise TraceError("a line behind the end of the trace")
        if self.header is None:
            self.header = _header(_Fields.of_line(line, "header")[1])
        elif line.endswith("\n") or _is_json(line):  # else it is half a line, the last one
            kind, values = _Fields.of_line(line, "step", "end")
            if kind == "end":
                self._end(values)
            else:
                self.records.append(_step(values))

    def _end(self, values: "_Fields") -> None:
        expected = values.integer("steps")
        values.end()
        if expected != len(self.records):
            raise TraceError(f"the end counts {expected} steps, here are {len(self.records)}")
        self.is_whole = True


class _Fields:
    """The fields of one JSON object, taken one by one with the type that each must have."""

    def __init__(self, values: object, what: str) -> None:
        if not isinstance(values, dict):
            raise TraceError(f"{what} must be a JSON object, got {_shown(values)}")
        self._values: dict[str, object] = dict(values)
        self._what = what

    @classmethod
    def of_line(cls, line: str, *kinds: str) -> tuple[str, Self]:
        """Which of the kinds of records a line holds, and its other fields."""
        expected = " or ".join(kinds)
        result = cls(_decoded(line), f"a record ({expected})")
        kind = result.text("record")
        if kind not in kinds:
            raise TraceError(
                f"a {_shown(kind)} record, expected was {expected}; a trace is one header, steps, one end"
            )
        result._what = f"the {kind} record"
        return kind, result

    def take(self, name: str) -> object:
        if name not in self._values:
            raise TraceError(f"{self._what} has no field {name!r}")
        return self._values.pop(name)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise TraceError(f"field {name!r} must be a string, got {_shown(value)}")
        return value

    def integer(self, name: str) -> int:
        return _integer(self.take(name), name)

    def seconds(self, name: str) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TraceError(f"field {name!r} must be a number, got {_shown(value)}")
        if not abs(value) <= sys.float_info.max:  # NaN is not
            raise TraceError(f"field {name!r} must be a finite number, got {_shown(value)}")
        return float(value)

    def items(self, name: str) -> list[object]:
        value = self.take(name)
        if not isinstance(value, list):
            raise TraceError(f"field {name!r} must be a list, got {_shown(value)}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(_integer(value, name) for value in self.items(name))

    def span(self, name: str) -> Span:
        return _span(self.take(name), name)

    def texts(self, name: str) -> dict[str, str]:
        inner = _Fields(self.take(name), f"field {name!r}")
        return {key: inner.text(key) for key in list(inner._values)}

    def end(self) -> None:
        if self._values:
            raise TraceError(f"{self._what} has the unknown field(s) {_shown(sorted(self._values))}")


def _header(values: _Fields) -> TraceHeader:
    found = values.integer("format")
    if found != FORMAT:
        raise TraceError(f"trace format {found}; this npusim reads format {FORMAT}")
    result = TraceHeader(
        model_sha256=values.text("model_sha256"),
        weights_sha256=values.texts("weights_sha256"),
        config=values.texts("config"),
        npusim_version=values.text("npusim_version"),
        openvino_version=values.text("openvino_version"),
    )
    values.end()
    return result


def _step(values: _Fields) -> StepRecord:
    result = StepRecord(
        stage=_stage(values.text("stage")),
        tokens=values.integers("tokens"),
        positions=values.integers("positions"),
        error=values.text("error"),
        trimmed=values.integer("trimmed"),
        windows=tuple(_window(_Fields(item, "an item of 'windows'")) for item in values.items("windows")),
        host_seconds=values.seconds("host_seconds"),
        graph_seconds=values.seconds("graph_seconds"),
        logits_sha256=values.text("logits_sha256"),
    )
    values.end()
    if not result.error and (not result.tokens or len(result.tokens) != len(result.positions)):
        raise TraceError(f"{len(result.tokens)} tokens at {len(result.positions)} positions")
    return result


def _window(values: _Fields) -> WindowRecord:
    result = WindowRecord(
        local_window_size=values.integer("local_window_size"),
        slots_written=tuple(_span(item, "slots_written") for item in values.items("slots_written")),
        visible=values.span("visible"),
    )
    values.end()
    return result


def _stage(value: str) -> Stage:
    try:
        return Stage(value)
    except ValueError as error:
        raise TraceError(f"stage {_shown(value)} is none of {[stage.value for stage in Stage]}") from error


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"field {name!r} must hold integers, got {_shown(value)}")
    if not -(2**63) <= value < 2**63:
        raise TraceError(f"field {name!r} must hold integers of 64 bits, got {_shown(value)}")
    return value


def _span(value: object, name: str) -> Span:
    if not isinstance(value, list) or len(value) != 2:
        raise TraceError(f"field {name!r} must hold pairs of integers, got {_shown(value)}")
    return _integer(value[0], name), _integer(value[1], name)


def _decoded(line: str) -> object:
    try:
        values: object = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # of a number or a nesting beyond Python's limits too
        raise TraceError(
            f"not JSON ({error}); no trace of `npusim run --trace FILE`, or the file was cut short"
        ) from error
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_json(line: str) -> bool:
    try:
        _decoded(line)
    except TraceError:
        return False
    return True


_shown = reprlib.repr
"""Of values of any size and depth, in short."""
