"""What a request did, call by call: the records, and writing them to a file of JSON lines.

A header says which model and configuration, then there is one line per infer call, then an end that counts
them. `npusim.trace_reader` reads such a file, `npusim.replay` makes the same calls again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from npusim.errors import NpuSimError
from npusim.stage import Stage

FORMAT = 2


class TraceError(NpuSimError, ValueError):
    """A trace file that cannot be written or read: which line, what is wrong with it."""


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
    trimmed: tokens that the previous call left stored and this one does not build on, whether they went by
    `trim` or by this call's first position; 0 from position 0 on, where a conversation begins anew. windows:
    one entry per distinct window, none at all of NPUW, which does not say where it puts rows. host_seconds:
    time outside the compiled graph, graph_seconds: in it.
    logits_sha256: of the bytes of the returned logits.
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


@runtime_checkable
class Traced(Protocol):
    """A request that keeps records of its own: it calls the listener once per infer call."""

    step_listener: Callable[[StepRecord], None] | None


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """What was run: configuration as given, versions, and SHA-256 of the files of the model.

    weights_sha256: of each file of external weights, by the name that the model file has for it.
    """

    model_sha256: str
    weights_sha256: Mapping[str, str]
    config: Mapping[str, str]
    npusim_version: str
    openvino_version: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace as read. is_whole: the end is there; without it calls may be missing after the last record."""

    header: TraceHeader
    records: tuple[StepRecord, ...]
    is_whole: bool


def visible_span(positions: Sequence[int], local_window_size: int) -> Span:
    """What tokens at consecutive `positions` attend to between them; a window counts the query itself."""
    oldest = 0 if local_window_size < 0 else max(0, positions[0] - local_window_size + 1)
    return oldest, positions[-1] + 1


def logits_sha256(logits: npt.NDArray[np.floating]) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits).data).hexdigest()


def step_values(record: StepRecord) -> dict[str, object]:
    """The fields of a record as a trace file has them: nothing but what JSON knows."""
    return {**asdict(record), "stage": record.stage.value}


class TraceWriter:
    """Writes a trace file, a full line per record at once, so that a crash loses nothing that was done.

    Use as a context manager: it ends the file, also after an error or an interrupt. `write` is what a
    request's step listener is set to. Raises TraceError, wherever it is, when the file cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._path = path
        self._num_steps = 0
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise self._unwritable(error) from error
        self._line(
            {
                "record": "header",
                "format": FORMAT,
                "model_sha256": header.model_sha256,
                "weights_sha256": dict(header.weights_sha256),
                "config": dict(header.config),
                "npusim_version": header.npusim_version,
                "openvino_version": header.openvino_version,
            }
        )

    def write(self, record: StepRecord) -> None:
        self._num_steps += 1
        self._line({"record": "step", **step_values(record)})

    def _line(self, values: Mapping[str, object]) -> None:
        try:
            self._file.write(json.dumps(values).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> TraceError:
        return TraceError(f"{self._path}: cannot be written ({error.strerror}); give another file")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._line({"record": "end", "steps": self._num_steps})
        finally:
            with suppress(OSError):  # it tries once more what `_line` could not write
                self._file.close()
