"""What a language model offers: its ports, attention layers and limits, read once from the graph."""

from collections.abc import Mapping
from dataclasses import dataclass

import openvino as ov

from npusim.errors import ModelError
from npusim.look_ups import max_positions, num_embeddings
from npusim.mask_use import check_mask_use, check_seqlens
from npusim.model_rules import check_caches, check_labels, in_layer_order
from npusim.token_mixing import BLOCKS, check_logits, check_token_mixing, with_block
from transforms import DecompositionError, GQANode, find_gqa, read_gqa

KNOWN_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One attention layer: its node, its four cache ports, and what sizes its buffers.

    index: its place among the layers, by their numbers. number: what it goes by (`layer_numbers`).
    present_outputs: which outputs of the model present_key and present_value are. A compiler that finds two
    of them equal makes them one, and of their names one is lost; their places stay.
    cache_channels: elements of type cache_type that hold one row of a head: D, or D / 2 where two codes
    share a byte.
    """

    index: int
    number: int
    name: str
    past_key: str
    past_value: str
    present_key: str
    present_value: str
    present_outputs: tuple[int, int]
    kv_num_heads: int
    head_size: int
    cache_channels: int
    local_window_size: int
    causal: bool
    cache_type: ov.Type
    is_quantized: bool


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model npusim can run.

    vocab_size is the width of the logits, num_embeddings the number of token ids that input_ids may name,
    max_positions the positions that the shortest table covers, rotary or of position embeddings (None: no
    table). Layers are in the order of the numbers in their ports' names, where they have any.
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    num_embeddings: int
    max_positions: int | None
    has_position_ids: bool


def read_spec(model: ov.Model) -> ModelSpec:
    """Read the ports and layers; ModelError names the port or node, and what is wrong with it."""
    try:
        gqas = [read_gqa(node) for node in find_gqa(model)]
    except DecompositionError as error:
        raise ModelError(str(error)) from error
    if not gqas:
        raise ModelError(
            "the model has no GroupQueryAttention; give an ONNX file of a builder that emits the contrib op "
            "(onnxruntime-genai's does; OpenVINO IR cannot hold it)"
        )
    places = {name: place for place, output in enumerate(model.outputs) for name in output.get_names()}
    layers = tuple(
        _read_layer(index, number, gqa, places)
        for index, (number, gqa) in enumerate(in_layer_order(gqas).items())
    )
    check_labels(gqas)
    check_caches(gqas)
    _check_ports(model, gqas)
    check_seqlens(gqas)
    vocab_size = _vocab_size(model)
    static = model.clone()
    with_block(static, BLOCKS[0])
    check_logits(static, vocab_size)
    check_mask_use(static)
    positions = max_positions(model, static, gqas)
    check_token_mixing(static)
    return ModelSpec(
        layers=layers,
        vocab_size=vocab_size,
        num_embeddings=num_embeddings(model),
        max_positions=positions,
        has_position_ids="position_ids" in _input_names(model),
    )


def _input_names(model: ov.Model) -> set[str]:
    return {name for source in model.inputs for name in source.get_names()}


def _check_ports(model: ov.Model, gqas: list[GQANode]) -> None:
    names = _input_names(model)
    for needed in ("input_ids", "attention_mask"):
        if needed not in names:
            raise ModelError(f"the model has no input {needed}; its inputs are {sorted(names)}")
    if not any("logits" in output.get_names() for output in model.outputs):
        raise ModelError("the model has no output logits")
    caches = {past.get_node().get_friendly_name() for gqa in gqas for past in (gqa.past_key, gqa.past_value)}
    for source in model.inputs:
        known = source.get_names() & set(KNOWN_INPUTS)
        if not known and source.get_node().get_friendly_name() not in caches:
            raise ModelError(
                f"the model has an input {source.get_any_name()} that npusim cannot fill; known are "
                f"{', '.join(KNOWN_INPUTS)} and the caches of GroupQueryAttention"
            )


def _read_layer(index: int, number: int, gqa: GQANode, places: Mapping[str, int]) -> LayerSpec:
    past_key, past_value = (_past_port(gqa, source) for source in (gqa.past_key, gqa.past_value))
    present_key, present_value = (_present_port(gqa, port) for port in (1, 2))
    return LayerSpec(
        index=index,
        number=number,
        name=gqa.name,
        past_key=past_key,
        past_value=past_value,
        present_key=present_key,
        present_value=present_value,
        present_outputs=(places[present_key], places[present_value]),
        kv_num_heads=gqa.kv_num_heads,
        head_size=gqa.head_size,
        cache_channels=gqa.cache_channels,
        local_window_size=gqa.local_window_size,
        causal=gqa.causal,
        cache_type=gqa.past_key.get_element_type(),
        is_quantized=gqa.quantization is not None,
    )


def _past_port(gqa: GQANode, source: ov.Output) -> str:
    if source.get_node().get_type_name() != "Parameter":
        raise ModelError(
            f"{gqa.name}: its past comes from {source.get_node().get_friendly_name()}, not from a model "
            "input; export the model with past_key_values inputs"
        )
    return str(source.get_any_name())


def _present_port(gqa: GQANode, port: int) -> str:
    present = gqa.node.output(port)
    if not any(t.get_node().get_type_name() == "Result" for t in present.get_target_inputs()):
        raise ModelError(
            f"{gqa.name}: output {port} (present) is no model output; export the model with its KV cache"
        )
    return str(present.get_any_name())


def _vocab_size(model: ov.Model) -> int:
    shape = model.output("logits").get_partial_shape()
    if shape.rank.get_length() != 3 or shape[2].is_dynamic:
        raise ModelError(
            f"logits have shape {shape}; [batch, rows, vocabulary] with a static last one is needed"
        )
    width: int = shape[2].get_length()
    return width
