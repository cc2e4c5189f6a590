"""ONNX Runtime with everything bound: no copies at its border, past and present in one buffer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from npusim.bench.machine import available_threads
from npusim.errors import ConfigError
from npusim.onnxruntime_backend import unavailable_reason

if TYPE_CHECKING:
    import onnxruntime


class OrtSession:
    """A session whose inputs and outputs are bound to buffers that stay where they are."""

    def __init__(self, model: str | Path | bytes) -> None:
        """model: a path, or a serialized model. Raises ConfigError where onnxruntime is not installed."""
        reason = unavailable_reason()
        if reason is not None:
            raise ConfigError(reason)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = available_threads()
        options.inter_op_num_threads = 1
        source = model if isinstance(model, bytes) else str(model)
        self._session: onnxruntime.InferenceSession = onnxruntime.InferenceSession(
            source, options, providers=["CPUExecutionProvider"]
        )
        self._runtime = onnxruntime
        self._binding = self._session.io_binding()
        self._bound: dict[str, onnxruntime.OrtValue] = {}

    def bind(self, name: str, array: NDArray[np.generic], *, shared_output: str | None = None) -> None:
        """Copy an array into a buffer of ONNX Runtime's and bind it, as output `shared_output` too."""
        value = self._runtime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), "cpu")
        self._bound[name] = value
        self._binding.bind_ortvalue_input(name, value)
        if shared_output is not None:
            self._binding.bind_ortvalue_output(shared_output, value)

    def bind_output(self, name: str, shape: tuple[int, ...]) -> None:
        """A float32 buffer for an output."""
        value = self._runtime.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32, "cpu")
        self._bound[name] = value
        self._binding.bind_ortvalue_output(name, value)

    def run(self) -> None:
        """Infer with what is bound."""
        self._session.run_with_iobinding(self._binding)

    def output(self, name: str) -> NDArray[np.generic]:
        """A copy of a bound output."""
        result: NDArray[np.generic] = self._bound[name].numpy()
        return result
