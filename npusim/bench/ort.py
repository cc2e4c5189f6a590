"""ONNX Runtime with everything bound: no copies at its border, past and present in one buffer."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npusim.bench.machine import available_threads
from npusim.errors import NpuSimError
from npusim.onnxruntime_backend import failure_types, open_session


class OrtSession:
    """A session whose inputs and outputs are bound to buffers that stay where they are."""

    def __init__(self, model: Path | bytes) -> None:
        """model: a file, or a serialized model. Raises what `onnxruntime_backend.open_session` raises."""
        source = model if isinstance(model, bytes) else str(model)
        self._session = open_session(source, num_threads=available_threads())
        self._values = import_module("onnxruntime").OrtValue
        # A bare RuntimeError for wrong buffers.
        self._failures: tuple[type[Exception], ...] = (RuntimeError, *failure_types())
        self._binding = self._session.io_binding()
        self._bound: dict[str, Any] = {}

    def bind(self, name: str, array: NDArray[np.generic], *, shared_output: str | None = None) -> None:
        """Copy an array into a buffer of ONNX Runtime's and bind it, as output `shared_output` too."""
        value = self._values.ortvalue_from_numpy(np.ascontiguousarray(array), "cpu")
        self._bound[name] = value
        self._binding.bind_ortvalue_input(name, value)
        if shared_output is not None:
            self._binding.bind_ortvalue_output(shared_output, value)

    def bind_output(self, name: str, shape: tuple[int, ...]) -> None:
        """A float32 buffer for an output."""
        value = self._values.ortvalue_from_shape_and_type(list(shape), np.float32, "cpu")
        self._bound[name] = value
        self._binding.bind_ortvalue_output(name, value)

    def run(self) -> None:
        """Infer with what is bound. Raises NpuSimError for what ONNX Runtime refuses."""
        try:
            self._session.run_with_iobinding(self._binding)
        except self._failures as error:
            raise NpuSimError(f"ONNX Runtime failed: {error}") from error

    def output(self, name: str) -> NDArray[np.generic]:
        """A copy of a bound output."""
        result: NDArray[np.generic] = self._bound[name].numpy()
        return result
