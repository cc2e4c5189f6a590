"""The product's ONNX Runtime runner against the tests' own, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_files import READABLE, UNREADABLE
from onnx import TensorProto, helper
from ort_runner import OrtModel

from npusim import onnxruntime_backend
from npusim.errors import CapacityError, InputError, ModelError, NpuSimError, TrimError
from npusim.onnxruntime_backend import OnnxRuntimeModel

LENGTH = 45
TOKENS = np.random.default_rng(4).integers(0, 259, LENGTH).tolist()
# Start and end of blocks; some begin where earlier ones are taken back to.
BLOCKS = ((0, 19), (19, 20), (20, 25), (22, 27), (23, 24), (24, 45), (3, 9), (0, 2), (2, 12))


def load(path: Path, max_length: int = LENGTH) -> OnnxRuntimeModel:
    model = onnx.load(path, load_external_data=False)
    names = [port.name for port in model.graph.input if port.name.startswith("past")]
    return OnnxRuntimeModel(
        model, folder=path.parent, max_length=max_length, channels=dict.fromkeys(names, 16)
    )


@pytest.mark.parametrize("name", ["llama", "gemma3_alternating", "gptoss_attention", "gemma2_softcap"])
def test_logits_are_those_of_the_tests_runner(name: str) -> None:
    path = {**READABLE, **UNREADABLE}[name]
    model, other = load(path), OrtModel(path, max_length=LENGTH)
    for start, stop in BLOCKS:
        stored = model.num_stored_tokens
        assert model.trim(start) == stored - start
        other.rewind(start)
        logits = model.feed(TOKENS[start:stop])
        assert model.num_stored_tokens == stop
        np.testing.assert_allclose(logits, other.feed(TOKENS[start:stop]), atol=1e-6)


@pytest.mark.parametrize("name", ["gemma3_alternating", "gptoss_attention"])
def test_a_run_may_be_shorter_than_the_window(name: str) -> None:
    """ONNX Runtime takes no rolling buffer below the window (8); the model itself needs none."""
    short = load(READABLE[name], max_length=3)
    np.testing.assert_array_equal(short.feed(TOKENS[:3]), load(READABLE[name]).feed(TOKENS[:3]))
    with pytest.raises(CapacityError, match="4 tokens to store; the buffers were made for 3"):
        short.feed(TOKENS[3:4])


def test_external_data_are_found_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        onnx.load(READABLE["llama"]),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=64,
    )
    assert (tmp_path / "weights.bin").stat().st_size > 10_000
    expected = load(READABLE["llama"]).feed(TOKENS[:7])
    np.testing.assert_array_equal(load(path).feed(TOKENS[:7]), expected)


def test_calls_that_cannot_be_are_refused_and_change_nothing() -> None:
    model = load(READABLE["llama"], max_length=9)
    model.feed(TOKENS[:6])
    with pytest.raises(CapacityError, match="10 tokens to store; the buffers were made for 9"):
        model.feed(TOKENS[:4])
    with pytest.raises(InputError, match="got no token"):
        model.feed([])
    with pytest.raises(TrimError, match="trim to 7 tokens: 6 are stored"):
        model.trim(7)
    with pytest.raises(NpuSimError, match="ONNX Runtime failed at position 6"):
        model.feed([100_000])
    expected = load(READABLE["llama"]).feed(TOKENS[:9])[:, 6:]
    np.testing.assert_allclose(model.feed(TOKENS[6:9]), expected, atol=1e-6)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_backend, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"not installed \(pip install onnxruntime, the extra ort\)"):
        load(READABLE["llama"])


def _add_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.INT64, [1]))


def _drop_present(model: onnx.ModelProto) -> None:
    del model.graph.output[1]


def _open_heads(model: onnx.ModelProto) -> None:
    port = next(port for port in model.graph.input if port.name.startswith("past"))
    port.type.tensor_type.shape.dim[1].dim_param = "heads"


def _unknown_op(model: onnx.ModelProto) -> None:
    model.graph.node[3].op_type = "NoSuchOp"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_add_input, "input extra is unknown; known are input_ids"),
        (_drop_present, "must be an input and an output"),
        (_open_heads, "leaves heads or head size unknown"),
        (_unknown_op, "ONNX Runtime cannot load the model"),
    ],
)
def test_models_that_cannot_be_fed_are_refused(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    model = onnx.load(READABLE["llama"])
    change(model)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=reason):
        load(tmp_path / "model.onnx")


def test_a_symbolic_head_size_must_be_told() -> None:
    model = onnx.load(READABLE["llama"])
    with pytest.raises(ModelError, match="leaves heads or head size unknown"):
        OnnxRuntimeModel(model, folder=Path(), max_length=4, channels={})
