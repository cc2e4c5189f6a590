"""SHA-256 of all that a model consists of: the ONNX file, and the files of weights that it names."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from npusim.errors import ModelError
from npusim.onnx_attention import load_onnx


@dataclass(frozen=True, kw_only=True)
class ModelDigest:
    """Hex digests. weights_sha256: of each external file, by its name in the ONNX file."""

    model_sha256: str
    weights_sha256: dict[str, str]


def file_sha256(path: Path) -> str:
    """Of the whole file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_model(path: Path) -> ModelDigest:
    """Hash the file and the weights beside it. Raises ModelError for what is missing or no ONNX model."""
    graph = load_onnx(path).graph
    names = {ExternalDataInfo(tensor).location for tensor in _tensors(graph) if uses_external_data(tensor)}
    return ModelDigest(
        model_sha256=file_sha256(path),
        weights_sha256={name: _weights_sha256(path, name) for name in sorted(names)},
    )


def _weights_sha256(model: Path, name: str) -> str:
    try:
        return file_sha256(model.parent / name)
    except OSError as error:
        raise ModelError(
            f"{model}: its weights {name} cannot be opened ({error.strerror}); keep them beside the model"
        ) from error


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor with values: initializers and attributes, of inner graphs too."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
