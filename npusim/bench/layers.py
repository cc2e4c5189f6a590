"""Attention alone, lowered by npusim or run by ONNX Runtime, on the same inputs."""

from dataclasses import dataclass, replace

import numpy as np
import onnx
import openvino as ov
from numpy.typing import NDArray
from openvino.passes import Manager

from npusim.bench.ort import OrtSession
from npusim.bench.synthetic import AttentionShape, build_attention_chain
from npusim.static_graph import COMPILE_PROPERTIES
from transforms import Branch, DecomposeGQA, ExecutionForm, KeepNewRows, KeyLayout

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """num_layers attention layers in a chain: S new tokens after `stored` ones, buffers of C slots."""

    shape: AttentionShape
    sequence_length: int = 1
    capacity: int
    stored: int
    num_layers: int = 1
    key_layout: KeyLayout = KeyLayout.LINEAR

    def with_window(self, window: int, **changes: object) -> "LayerCase":
        """The same with a sliding window."""
        return replace(self, shape=replace(self.shape, local_window_size=window), **changes)  # type: ignore[arg-type]

    def build(self) -> onnx.ModelProto:
        """The ONNX model that all runtimes are given."""
        return build_attention_chain(
            self.shape,
            num_layers=self.num_layers,
            sequence_length=self.sequence_length,
            capacity=self.capacity,
        )

    def inputs(self) -> Arrays:
        """Random rows; every slot holds one, as memory never written costs nothing to read."""
        rng = np.random.default_rng(1)
        shape, length = self.shape, self.sequence_length
        total = self.stored + length
        arrays: Arrays = {
            "query": _normal(rng, (1, length, shape.query_size)),
            "key": _normal(rng, (1, length, shape.kv_size)),
            "value": _normal(rng, (1, length, shape.kv_size)),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        cache = (1, shape.kv_num_heads, self.capacity, shape.head_size)
        for index in range(self.num_layers):
            for kind in ("key", "value"):
                arrays[f"past_{kind}.{index}"] = _normal(rng, cache)
        return arrays


class LoweredLayers:
    """The chain as npusim lowers it: the device form, or the form for a CPU."""

    def __init__(self, case: LayerCase, *, fast: bool) -> None:
        model = ov.Core().read_model(case.build().SerializeToString())
        manager = Manager()
        manager.register_pass(DecomposeGQA(Branch.GENERATE, key_layout=case.key_layout))
        manager.register_pass(KeepNewRows())
        if fast:
            manager.register_pass(ExecutionForm())
        manager.run_passes(model)
        compiled = ov.Core().compile_model(model, "CPU", COMPILE_PROPERTIES)
        self._request = compiled.create_infer_request()
        self._arrays = case.inputs()
        for port in compiled.inputs:
            array = self._arrays[port.get_any_name()]
            self._request.set_tensor(port, ov.Tensor(array, shared_memory=True))

    def prepare(self, calls: int) -> None:
        """Every call is the same."""

    def __call__(self) -> None:
        self._request.infer(share_outputs=True)

    def attention(self) -> NDArray[np.generic]:
        """[1, S, H D] of the last call."""
        return np.array(self._request.get_tensor("attention").data)


class OrtLayers:
    """The chain as ONNX Runtime runs it, with past and present in one buffer."""

    def __init__(self, case: LayerCase) -> None:
        self._session = OrtSession(case.build().SerializeToString())
        arrays = case.inputs()
        for name, array in arrays.items():
            present = name.replace("past_", "present_") if name.startswith("past_") else None
            self._session.bind(name, array, shared_output=present)
        self._session.bind_output("attention", arrays["query"].shape)

    def prepare(self, calls: int) -> None:
        """Every call is the same."""

    def __call__(self) -> None:
        self._session.run()

    def attention(self) -> NDArray[np.generic]:
        """[1, S, H D] of the last call."""
        return self._session.output("attention")


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return rng.standard_normal(shape, dtype=np.float32)
