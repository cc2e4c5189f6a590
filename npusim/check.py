"""What npusim makes of a model, layer by layer, without compiling anything.

The facts of a layer come from the ONNX file, the verdict from OpenVINO's frontend and from the very code that
would lower the layer. So a file that OpenVINO refuses still gets its rows, and a layer is called good only
where the lowering itself would take it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import openvino as ov
from openvino import Node

from npusim.errors import ModelError
from npusim.model_spec import read_spec
from npusim.onnx_attention import AttentionLayer, OnnxAttention, read_onnx_attention
from transforms import DecompositionError
from transforms.gqa_node import find_gqa, node_label, read_gqa

Refusals = tuple[str, ...]
"""Why something is refused, a sentence each; empty where it is not."""


@dataclass(frozen=True, kw_only=True)
class CheckedLayer:
    """A layer and why it is refused; no refusal means that it runs."""

    layer: AttentionLayer
    refusals: Refusals


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """All layers of a model, and refusals that concern the model as a whole."""

    path: str
    layers: tuple[CheckedLayer, ...]
    refusals: Refusals

    @property
    def runs(self) -> bool:
        """Whether nothing is refused."""
        return not self.refusals and not any(checked.refusals for checked in self.layers)


def check_model(path: str | os.PathLike[str]) -> CheckReport:
    """Report on every attention layer of an ONNX file.

    Raises ModelError where there is nothing to report on: no readable ONNX file, or no GroupQueryAttention.
    """
    attention = read_onnx_attention(path)
    if not attention.layers:
        raise ModelError(
            f"{path}: no GroupQueryAttention op among {sum(attention.op_counts.values())} ops; "
            "export the language model with onnxruntime-genai's model builder"
        )
    by_file = [_refusals_by_file(layer) for layer in attention.layers]
    try:
        model = ov.Core().read_model(os.fspath(path))
    except RuntimeError as error:
        judged, of_model = _judge_by_message(attention, str(error))
    else:
        judged, of_model = _judge_by_model(attention, model)
    layers = tuple(
        # The file's own words say it better than what fails later because of them.
        CheckedLayer(layer=layer, refusals=own or others)
        for layer, own, others in zip(attention.layers, by_file, judged, strict=True)
    )
    return CheckReport(path=os.fspath(path), layers=layers, refusals=of_model)


def _judge_by_message(attention: OnnxAttention, message: str) -> tuple[list[Refusals], Refusals]:
    """Refusals per layer and of the model, from what the frontend says that refuses the file."""
    reasons = {failure.output: failure.reason for failure in _failures(message)}
    judged: list[Refusals] = [
        (reasons[layer.output],) if layer.output in reasons else () for layer in attention.layers
    ]
    return judged, _frontend_refusals(message, attention.op_counts)


def _judge_by_model(attention: OnnxAttention, model: ov.Model) -> tuple[list[Refusals], Refusals]:
    """Refusals per layer and of the model, from what npusim itself would read of it."""
    nodes = {node_label(node): node for node in find_gqa(model)}
    judged = [_refusals_by_lowering(layer, nodes.get(layer.output)) for layer in attention.layers]
    if any(judged):
        return judged, ()
    try:
        read_spec(model)
    except ModelError as error:
        return judged, (str(error),)
    return judged, ()


def _refusals_by_lowering(layer: AttentionLayer, node: Node | None) -> Refusals:
    """What the lowering says of the node that the frontend made of the layer."""
    if node is None:
        return ("OpenVINO's frontend left no GroupQueryAttention op for this layer; the file has one",)
    try:
        gqa = read_gqa(node)
    except DecompositionError as error:
        return (str(error).removeprefix(f"{layer.output}: "),)
    if gqa.local_window_size != layer.local_window_size:
        return (
            f"OpenVINO's frontend reads local_window_size={gqa.local_window_size}, "
            f"the file says {layer.local_window_size}",
        )
    if gqa.has_sink != layer.has_sink:
        return (f"OpenVINO's frontend lost the attention sink ({layer.sink.value}) of the file",)
    return ()


def _refusals_by_file(layer: AttentionLayer) -> Refusals:
    """What the file's own attributes rule out; OpenVINO's frontend refuses most of it, but names no node."""
    heads, kv_heads, window = layer.num_heads, layer.kv_num_heads, layer.local_window_size
    rules = (
        (layer.softcap != 0, f"softcap={layer.softcap:g}: only softcap=0 is lowered"),
        (layer.has_qk_norm, "QK norm inside the op is not lowered; export it outside of the op"),
        (not layer.has_past, "no past_key and past_value: there is no KV cache to manage"),
        (
            heads < 1 or kv_heads < 1 or heads % kv_heads != 0,
            f"num_heads={heads}, kv_num_heads={kv_heads}: must be a positive multiple",
        ),
        (
            window == 0 or window < -1,
            f"local_window_size={window}: a window counts the query itself, so 1 is the least; -1 is none",
        ),
        (
            window > 0 and not layer.causal,
            f"local_window_size={window} with causal=0: a window needs causal attention",
        ),
    )
    return tuple(reason for broken, reason in rules if broken)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One op type that the frontend could not convert; `output` names the (first) node, if it says so."""

    kind: str
    output: str | None
    reason: str


def _failures(message: str) -> list[_Failure]:
    """The entries of OpenVINO's "failed operations" log: "-- KIND with a message:", text, blank line."""
    failures = []
    for match in re.finditer(
        r"^-- (\S+) with a message:\n(.*?)\n\s*\n", message + "\n\n", re.DOTALL | re.MULTILINE
    ):
        kind, text = match.groups()
        node = re.search(r"<Node\([^)]*\): ([^>]*)>", text)
        failures.append(
            _Failure(kind=kind, output=node and node.group(1), reason=text.strip().splitlines()[-1].strip())
        )
    return failures


def _frontend_refusals(message: str, op_counts: Mapping[str, int]) -> Refusals:
    """Why OpenVINO does not read the file, a line each.

    Ops without a rule come first and alone: what fails after them mostly fails because of them.
    """
    missing = re.search(r"^-- No conversion rule found for operations: (.*)$", message, re.MULTILINE)
    if missing:
        return tuple(
            f"OpenVINO's ONNX frontend has no rule for {kind} ({op_counts.get(kind, 0)} nodes)"
            for kind in missing.group(1).strip().split(", ")
        )
    failures = _failures(message)
    if failures:
        return tuple(
            f"OpenVINO's ONNX frontend cannot convert {failure.kind}: {failure.reason}"
            for failure in failures
        )
    return (f"OpenVINO cannot read the file: {message.strip().splitlines()[-1]}",)
