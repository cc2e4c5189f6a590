"""What a request did, call by call: the records, and their file of JSON lines.

A header says which model and configuration, then there is one line per infer call. `npusim.replay` makes the
same calls again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import numpy as np
import numpy.typing as npt

from npusim.errors import NpuSimError
from npusim.stage import Stage

FORMAT = 1


class TraceError(NpuSimError, ValueError):
    """A trace file that cannot be read: which line, what is wrong with it."""


Span = tuple[int, int]  # half-open: first, one past last


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """What one call did in the layers of one window.

    slots_written: spans of cache slots, in the order of the rows that went there. visible: span of the
    absolute positions that the call's tokens could attend to between them.
    """

    local_window_size: int
    slots_written: tuple[Span, ...]
    visible: Span


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One infer call.

    error: type name of the exception that the call ended in, refused or failed, and then there are no logits
    and no windows; "" for a call that returned. positions: as given; of a refused call they may be anything.
    trimmed: tokens that the previous call left stored and this one does not
    build on, whether they went by `trim` or by this call's first position; 0 from position 0 on, where a
    conversation begins anew. windows: one entry per distinct window. host_seconds: time outside the compiled
    graph, graph_seconds: in it. logits_sha256: of the bytes of the returned logits.
    """

    stage: Stage
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    error: str = ""
    trimmed: int
    windows: tuple[WindowRecord, ...]
    host_seconds: float
    graph_seconds: float
    logits_sha256: str


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """What was run: SHA-256 of the model file, configuration as given, versions."""

    model_sha256: str
    config: Mapping[str, str]
    npusim_version: str
    openvino_version: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    header: TraceHeader
    records: tuple[StepRecord, ...]


def visible_span(positions: Sequence[int], local_window_size: int) -> Span:
    """What tokens at consecutive `positions` attend to between them; a window counts the query itself."""
    oldest = 0 if local_window_size < 0 else max(0, positions[0] - local_window_size + 1)
    return oldest, positions[-1] + 1


def logits_sha256(logits: npt.NDArray[np.floating]) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits).data).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TraceWriter:
    """Writes a trace file, a full line per record at once, so that a crash loses nothing that was done.

    Use as a context manager; `write` is what a request's step listener is set to.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)
        self._line(
            {
                "record": "header",
                "format": FORMAT,
                "model_sha256": header.model_sha256,
                "config": dict(header.config),
                "npusim_version": header.npusim_version,
                "openvino_version": header.openvino_version,
            }
        )

    def write(self, record: StepRecord) -> None:
        self._line({"record": "step", **asdict(record), "stage": record.stage.value})

    def _line(self, values: Mapping[str, object]) -> None:
        self._file.write(json.dumps(values) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def read_trace(path: Path) -> Trace:
    """The whole trace; TraceError, with the number of the line, for the first line that is not as written."""
    header: TraceHeader | None = None
    records: list[StepRecord] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                if header is None:
                    header = _header(_Fields.of_line(line, "header"))
                else:
                    records.append(_step(_Fields.of_line(line, "step")))
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    if header is None:
        raise TraceError(f"{path}, line 1: the file is empty; a trace begins with a header")
    return Trace(header=header, records=tuple(records))


class _Fields:
    """The fields of one JSON object, taken one by one with the type that each must have."""

    def __init__(self, values: object, what: str) -> None:
        if not isinstance(values, dict):
            raise TraceError(f"{what} must be a JSON object, got {_shown(values)}")
        self._values: dict[str, object] = dict(values)
        self._what = what

    @classmethod
    def of_line(cls, line: str, kind: str) -> Self:
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"not JSON ({error}); the file may have been cut short") from error
        result = cls(values, f"a {kind} record")
        found = result.text("record")
        if found != kind:
            raise TraceError(f"a {found!r} record where a {kind} belongs; a trace is one header, then steps")
        return result

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
            raise TraceError(f"{self._what} has the unknown field(s) {sorted(self._values)}")


def _header(values: _Fields) -> TraceHeader:
    found = values.integer("format")
    if found != FORMAT:
        raise TraceError(f"trace format {found}; this npusim reads format {FORMAT}")
    result = TraceHeader(
        model_sha256=values.text("model_sha256"),
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
    if not result.tokens or len(result.tokens) != len(result.positions):
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
        raise TraceError(f"stage {value!r} is none of {[stage.value for stage in Stage]}") from error


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"field {name!r} must hold integers, got {_shown(value)}")
    return value


def _span(value: object, name: str) -> Span:
    if not isinstance(value, list) or len(value) != 2:
        raise TraceError(f"field {name!r} must hold pairs of integers, got {_shown(value)}")
    return _integer(value[0], name), _integer(value[1], name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
