"""Writing traces: the header of a run, and the listener that a request gets."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import openvino as ov

import npusim
from npusim.trace import TraceError, TraceHeader, TraceWriter, file_sha256


def npusim_version() -> str:
    """The installed version; "source" where npusim runs from a source tree without being installed."""
    try:
        return version("npusim")
    except PackageNotFoundError:
        return "source"


def openvino_version() -> str:
    """The build that computes the logits."""
    return str(ov.get_version())


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
    header = TraceHeader(
        model_sha256=file_sha256(model),
        config=compiled.config.to_mapping(),
        npusim_version=npusim_version(),
        openvino_version=openvino_version(),
    )
    try:
        writer = TraceWriter(path, header)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror}); give another file") from error
    with writer:
        request.step_listener = writer.write
        try:
            yield
        finally:
            request.step_listener = None
