"""The digest of a model counts its external weights."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from npusim.errors import ModelError
from npusim.model_digest import digest_model


def external(value: float, location: str) -> onnx.TensorProto:
    """A tensor whose numbers lie in another file."""
    tensor = numpy_helper.from_array(np.full(300, value, np.float32), name=location)
    onnx.external_data_helper.set_external_data(tensor, location)
    return tensor


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Weights in three files: an initializer's, a constant's, and one of an inner graph."""
    inner = helper.make_graph([helper.make_node("Identity", ["c"], ["o"])], "g", [], [], [external(1, "c")])
    nodes = [
        helper.make_node("Constant", [], ["b"], value=external(2, "folder/b")),
        helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner),
    ]
    graph = helper.make_graph(
        nodes, "g", [], [], [external(3, "a"), numpy_helper.from_array(np.ones(3), "d")]
    )
    path = tmp_path / "model.onnx"
    (tmp_path / "folder").mkdir()
    path.write_bytes(helper.make_model(graph).SerializeToString())
    for name in ("a", "folder/b", "c"):
        (tmp_path / name).write_text(name)
    return path


def test_every_file_is_hashed(model: Path) -> None:
    digest = digest_model(model)
    assert digest.model_sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    names = ("a", "c", "folder/b")
    assert digest.weights_sha256 == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}


def test_weights_that_are_missing_are_named(model: Path) -> None:
    (model.parent / "c").unlink()
    with pytest.raises(ModelError, match=r"model.onnx: its weights c cannot be opened"):
        digest_model(model)
