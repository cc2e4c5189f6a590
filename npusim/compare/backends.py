"""What the simulator is compared with, all behind one call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt
import openvino as ov

from npusim import npuw, onnxruntime_backend
from npusim.compare.taps import Rows, attention_outputs, tap, tap_onnx
from npusim.config_values import ConfigValue
from npusim.errors import ModelError, NpuSimError
from npusim.model_file import read_model
from npusim.native import REFERENCE_PROPERTIES, NativeModel
from npusim.onnx_attention import load_onnx
from npusim.onnxruntime_backend import OnnxRuntimeModel
from npusim.speculative.openvino_target import OpenVINOTarget
from npusim.speculative.target import Target, feed
from transforms import find_gqa


class BackendKind(Enum):
    """Which runtime."""

    ORT = "ort"
    """ONNX Runtime on the CPU, from the ONNX file."""
    OPENVINO = "openvino"
    """OpenVINO's CPU plugin with dynamic shapes."""
    NPUW = "npuw"
    """OpenVINO's NPUW, on the CPU device unless told otherwise."""


class Backend(Protocol):
    """A conversation that can be continued, and taken back."""

    def feed(self, tokens: Sequence[int], position: int) -> Rows:
        """Forget what is stored from `position` on, then run `tokens` there; logits [n, width], not shared.

        Of a prompt fewer rows may come back: the newest. Raises NpuSimError for a call that is refused.
        """


@dataclass(frozen=True, kw_only=True)
class BackendSetup:
    """What a backend is made from.

    path: ONNX or OpenVINO IR file. vocab_size: that of the simulated model, and so of any that is compared.
    max_length: the most tokens that will be stored. channels: by past input, the size of its last dimension.
    npuw_config: as `npusim.npuw.compile_model` takes it. tapped: whether the attention of every layer is to
    come behind the logits.
    """

    path: Path
    vocab_size: int
    max_length: int
    channels: Mapping[str, int]
    npuw_config: Mapping[str, ConfigValue]
    tapped: bool = False


def unavailable_reason(kind: BackendKind) -> str | None:
    """Why a backend cannot be used here; None where it can."""
    match kind:
        case BackendKind.ORT:
            return onnxruntime_backend.unavailable_reason()
        case BackendKind.OPENVINO:
            return None
        case BackendKind.NPUW:
            return npuw.unavailable_reason()
        case _:
            assert_never(kind)


def open_backend(kind: BackendKind, setup: BackendSetup) -> Backend:
    """Load the model into a runtime. Raises ModelError or ConfigError where it does not take it."""
    match kind:
        case BackendKind.ORT:
            return _GrowingBackend(_onnxruntime_model(setup))
        case BackendKind.OPENVINO:
            return _openvino_backend(setup)
        case BackendKind.NPUW:
            compiled = npuw.compile_model(_openvino_model(setup), setup.npuw_config)
            return RequestBackend(compiled.create_infer_request())
        case _:
            assert_never(kind)


class RequestBackend:
    """Anything with the request interface; the simulator itself, too."""

    def __init__(self, request: Target) -> None:
        self._request = request

    def feed(self, tokens: Sequence[int], position: int) -> Rows:
        """See `Backend`."""
        with _failures_named(position):
            return np.array(feed(self._request, tokens, position))


class _Growing(Protocol):
    """A model whose cache grows, and is cut anywhere."""

    def trim(self, num_tokens: int) -> int: ...

    def feed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


class _GrowingBackend:
    def __init__(self, model: _Growing) -> None:
        self._model = model

    def feed(self, tokens: Sequence[int], position: int) -> Rows:
        with _failures_named(position):
            self._model.trim(position)
            rows: Rows = self._model.feed(tokens)[0]
            return rows


@contextmanager
def _failures_named(position: int) -> Iterator[None]:
    """OpenVINO fails with bare RuntimeErrors; here they say where."""
    try:
        yield
    except RuntimeError as error:
        raise NpuSimError(f"OpenVINO failed at position {position}: {last_line(error)}") from error


def _onnxruntime_model(setup: BackendSetup) -> OnnxRuntimeModel:
    model = load_onnx(setup.path)
    shapes = {port.name: port.type.tensor_type.shape.dim for port in model.graph.output}
    for last in shapes.get("logits", ())[-1:]:
        if last.HasField("dim_value"):  # else the first rows tell
            check_vocabulary(setup.vocab_size, last.dim_value)
    if setup.tapped:
        tap_onnx(model)
    return OnnxRuntimeModel(
        model, folder=setup.path.parent, max_length=setup.max_length, channels=setup.channels
    )


def _openvino_backend(setup: BackendSetup) -> Backend:
    model = _openvino_model(setup)
    if not find_gqa(model) and not model.get_variables():
        raise ModelError(
            f"{setup.path}: neither GroupQueryAttention nor states; openvino runs models whose KV cache is "
            "one of the two"
        )
    try:
        if find_gqa(model):
            return _GrowingBackend(NativeModel(model))
        request = ov.Core().compile_model(model, "CPU", REFERENCE_PROPERTIES).create_infer_request()
    except RuntimeError as error:
        raise ModelError(f"{setup.path}: OpenVINO does not compile it: {last_line(error)}") from error
    return RequestBackend(OpenVINOTarget(request, capacity=setup.max_length))


def _openvino_model(setup: BackendSetup) -> ov.Model:
    model = read_model(setup.path)
    shapes = [port.get_partial_shape() for port in model.outputs if "logits" in port.get_names()]
    for shape in shapes:
        if shape.rank.is_static and shape[-1].is_static:
            check_vocabulary(setup.vocab_size, shape[-1].get_length())
    if setup.tapped:
        tap(model, attention_outputs(model))
    return model


def check_vocabulary(ours: int, theirs: int) -> None:
    """ModelError where the logits of a model are of another width than the simulator's."""
    if theirs != ours:
        raise ModelError(
            f"its logits are of {theirs} token ids, those of the simulated model of {ours}; compare models "
            "of one vocabulary"
        )


def last_line(error: RuntimeError) -> str:
    """What of a message of OpenVINO says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
