"""Writing traces: whether a file may be written, the header of a run, the listener that a request gets."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import openvino as ov

import npusim
from npusim.model_digest import digest_model
from npusim.trace import TraceError, TraceHeader, TraceWriter
from npusim.trace_reader import is_trace


def npusim_version() -> str:
    """The installed version; "source" where npusim runs from a source tree without being installed."""
    try:
        return version("npusim")
    except PackageNotFoundError:
        return "source"


def openvino_version() -> str:
    """The build that computes the logits."""
    return str(ov.get_version())


def check_can_trace(path: Path | None, others: Sequence[Path | None]) -> None:
    """Raises TraceError where a trace at `path` cannot be written, or would overwrite anything but a trace.

    others: files that the run reads or writes as well. What is None is not asked for.
    """
    if path is None:
        return
    try:
        reason = _refusal(path, [other for other in others if other is not None])
    except OSError as error:
        reason = str(error.strerror)
    if reason is not None:
        raise TraceError(f"{path}: no trace can be written there: {reason}; give another file")


def _refusal(path: Path, others: Sequence[Path]) -> str | None:
    for other in others:
        if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
            return f"it is the same file as {other}"
    if not path.exists():
        folder = path.resolve().parent
        return None if folder.is_dir() and os.access(folder, os.W_OK) else f"{folder} cannot be written to"
    if not path.is_file():
        return "it is no regular file"
    if path.stat().st_size and not is_trace(path):
        return "it holds something else than a trace, which would be lost"
    return None if os.access(path, os.W_OK) else "it is write-protected"


@contextmanager
def tracing(
    path: Path | None, model: Path, compiled: npusim.CompiledLLM, request: npusim.LLMInferRequest
) -> Iterator[None]:
    """Record every call of `request` in the file `path` meanwhile; None records nothing.

    Raises TraceError where the file cannot be written.
    """
    if path is None:
        yield
        return
    digest = digest_model(model)
    header = TraceHeader(
        model_sha256=digest.model_sha256,
        weights_sha256=digest.weights_sha256,
        config=compiled.config.to_mapping(),
        npusim_version=npusim_version(),
        openvino_version=openvino_version(),
    )
    with TraceWriter(path, header) as writer:
        request.step_listener = writer.write
        try:
            yield
        finally:
            request.step_listener = None
