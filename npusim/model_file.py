"""Model files: ONNX, or OpenVINO IR without the attention op; read, or refused with the reason."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from npusim.errors import ModelError
from npusim.onnx_attention import OnnxAttention, read_onnx_attention, require_file
from npusim.onnx_refusals import FileRefusals, refusals_by_file, refusals_by_message

IR_SUFFIX = ".xml"
_IR_BEGINS = re.compile(rb"<net\s[^>]*\bversion=")
_IR_HEAD_BYTES = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class OnnxFile:
    """An ONNX file as it is, and as OpenVINO reads it; model is None where OpenVINO refuses it."""

    attention: OnnxAttention
    model: ov.Model | None
    refusals: FileRefusals


def read_onnx(path: str | os.PathLike[str]) -> OnnxFile:
    """Read an ONNX file, with all that is refused of it. Raises ModelError for one that is no ONNX model."""
    attention = read_onnx_attention(path)
    try:
        model, said = ov.Core().read_model(os.fspath(path)), FileRefusals(layers=(), model=())
    except (RuntimeError, UnicodeDecodeError) as error:
        model, said = None, refusals_by_message(attention, str(error))
    return OnnxFile(
        attention=attention,
        model=model,
        refusals=FileRefusals(
            # The file's own words say it better than what fails later because of them.
            layers=tuple(
                refusals_by_file(layer) or (said.layers[layer.index] if said.layers else ())
                for layer in attention.layers
            ),
            model=said.model,
        ),
    )


def read_model(model: str | Path | ov.Model) -> ov.Model:
    """A model of the caller's own: read from a file, or a clone of what was given.

    Files are ONNX, or OpenVINO IR (.xml): of a model whose attention is lowered already, as IR cannot hold
    GroupQueryAttention. Raises ModelError for a file that is missing, is no model, or cannot be read as one.
    """
    if isinstance(model, ov.Model):
        return model.clone()
    path = Path(model)
    if path.suffix == IR_SUFFIX:
        return _read_ir(path)
    file = read_onnx(path)
    reason = _first_reason(file)
    if file.model is None or reason is not None:
        raise ModelError(f"{path}: {reason}")
    return file.model


def _first_reason(file: OnnxFile) -> str | None:
    """The first refused layer, with the number of others; else what refuses the file; None for neither."""
    refused = [
        (layer, reasons)
        for layer, reasons in zip(file.attention.layers, file.refusals.layers, strict=True)
        if reasons
    ]
    if not refused:
        return "; ".join(file.refusals.model) or None
    layer, reasons = refused[0]
    more = f" (and {len(refused) - 1} more layers, see npusim check)" if len(refused) > 1 else ""
    return f"{layer.name}: {'; '.join(reasons)}{more}"


def _read_ir(path: Path) -> ov.Model:
    require_file(path)
    with path.open("rb") as stream:
        begins_as_ir = _IR_BEGINS.search(stream.read(_IR_HEAD_BYTES))
    if not begins_as_ir:
        # OpenVINO would try all its frontends on it, and some of them talk.
        raise ModelError(f"{path}: no OpenVINO IR (an XML file of a net and its version); export it again")
    try:
        return ov.Core().read_model(path)
    except RuntimeError as error:
        raise ModelError(f"{path}: {_ir_reason(str(error))}") from error


def _ir_reason(message: str) -> str:
    if "Cannot create GroupQueryAttention" in message:
        return "OpenVINO IR with GroupQueryAttention cannot be read back; give the ONNX file it was made from"
    return f"OpenVINO cannot read it: {message.strip().splitlines()[-1].strip()}"
