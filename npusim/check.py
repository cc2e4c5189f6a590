"""What npusim makes of a model, layer by layer, without compiling anything.

The facts of a layer come from the ONNX file, the verdict from OpenVINO's frontend and from the very code that
would lower the layer. So a file that OpenVINO refuses still gets its rows, and a layer is called good only
where the lowering itself would take it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import openvino as ov
from openvino import Node

from npusim.cache_plan import plan_caches
from npusim.config import LLMConfig
from npusim.errors import ModelError
from npusim.graphs import lower_block
from npusim.model_file import read_onnx
from npusim.model_spec import read_spec
from npusim.onnx_attention import AttentionLayer, OnnxAttention
from npusim.onnx_refusals import Refusals
from transforms import Branch, DecompositionError, KeyLayout, StaticShapes, find_gqa, node_label, read_gqa
from transforms.gqa_site import read_site

_BLOCKS = (1, 2)
"""Lengths of a block that a model is tried with: one that fixes another length cannot have both."""


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
    file = read_onnx(path)
    attention = file.attention
    if not attention.layers:
        raise ModelError(
            f"{path}: no GroupQueryAttention op among {sum(attention.op_counts.values())} ops; "
            "export the language model with onnxruntime-genai's model builder"
        )
    judged, of_model = list(file.refusals.layers), file.refusals.model
    if file.model is not None and not any(judged):
        judged, of_model = _judge_by_model(attention, file.model)
    layers = tuple(
        CheckedLayer(layer=layer, refusals=reasons)
        for layer, reasons in zip(attention.layers, judged, strict=True)
    )
    return CheckReport(path=os.fspath(path), layers=layers, refusals=of_model)


def _judge_by_model(attention: OnnxAttention, model: ov.Model) -> tuple[list[Refusals], Refusals]:
    """Refusals per layer and of the model, from what npusim itself would read of it and make of it."""
    nodes = {node_label(node): node for node in find_gqa(model)}
    judged = [_refusals_by_reading(layer, nodes.get(layer.name)) for layer in attention.layers]
    if any(judged):
        return judged, ()
    try:
        spec = read_spec(model)
        refused = dict(_refusals_when_static(model))
        judged = [refused.get(layer.name, ()) for layer in attention.layers]
        if not any(judged):
            config = LLMConfig(max_prompt_len=max(_BLOCKS), min_response_len=1).fitted(spec.max_positions)
            lower_block(model, spec, plan_caches(spec, config), max(_BLOCKS), config.capacity)
    except ModelError as error:
        return judged, (str(error),)
    return judged, ()


def _refusals_by_reading(layer: AttentionLayer, node: Node | None) -> Refusals:
    """What the lowering says of the node that the frontend made of the layer."""
    if node is None:
        return ("OpenVINO's frontend left no GroupQueryAttention op for this layer; the file has one",)
    try:
        gqa = read_gqa(node)
    except DecompositionError as error:
        return (str(error).removeprefix(f"{layer.name}: "),)
    if gqa.local_window_size != layer.local_window_size:
        return (
            f"OpenVINO's frontend reads local_window_size={gqa.local_window_size}, "
            f"the file says {layer.local_window_size}",
        )
    if gqa.has_sink != layer.has_sink:
        return (f"OpenVINO's frontend lost the attention sink ({layer.sink.value}) of the file",)
    return ()


def _refusals_when_static(model: ov.Model) -> Iterator[tuple[str, Refusals]]:
    """What the lowering says of the shapes of a node's inputs, by node; ModelError for the model's own."""
    for rows in _BLOCKS:
        static = model.clone()
        try:
            StaticShapes(sequence_length=rows, past_length=max(_BLOCKS)).run_on_model(static)
        except DecompositionError as error:
            raise ModelError(str(error)) from error
        for node in find_gqa(static):
            name = node_label(node)
            try:
                read_site(read_gqa(node), Branch.GENERATE, KeyLayout.LINEAR)
            except DecompositionError as error:
                yield name, (str(error).removeprefix(f"{name}: "),)
