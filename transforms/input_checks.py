"""Whether the inputs of a GroupQueryAttention fit each other in the static sizes it is lowered for."""

from dataclasses import dataclass

import openvino as ov
from openvino import Output, PartialShape

from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode


@dataclass(frozen=True, kw_only=True)
class StaticSizes:
    """S rows of the block, C past slots."""

    sequence_length: int
    capacity: int


def check_inputs(gqa: GQANode, sizes: StaticSizes) -> None:
    """Raise DecompositionError for the first input of a wrong shape or type; a past may be open yet."""
    rows, size = sizes.sequence_length, gqa.head_size
    for label, source, heads in (
        ("query", gqa.query, gqa.num_heads),
        ("key", gqa.key, gqa.kv_num_heads),
        ("value", gqa.value, gqa.kv_num_heads),
    ):
        _expect_shape(gqa, label, source, PartialShape([1, heads, rows, size]))
    for label, past in (("past_key", gqa.past_key), ("past_value", gqa.past_value)):
        _check_past(gqa, label, past, past_shape(gqa, sizes))
    _expect_count(gqa, "seqlens_k", gqa.seqlens_k, 1)
    if gqa.rotary is not None and gqa.rotary.position_ids is not None:
        _expect_count(gqa, "position_ids", gqa.rotary.position_ids, rows)
    if gqa.attention_bias is not None:
        _check_bias(gqa, gqa.attention_bias, sizes)


def past_shape(gqa: GQANode, sizes: StaticSizes) -> PartialShape:
    """What a cache input must be: its last dimension is D, or what D takes in a quantized cache."""
    return PartialShape([1, gqa.kv_num_heads, sizes.capacity, gqa.cache_channels])


def _check_past(gqa: GQANode, label: str, past: Output, wanted: PartialShape) -> None:
    shape = past.get_partial_shape()
    is_input = past.get_node().get_type_name() == "Parameter"
    if not shape.compatible(wanted) or (shape.is_dynamic and not is_input):
        raise DecompositionError(f"{gqa.name}: {label} has shape {shape}; {wanted} is needed")
    if gqa.quantization is None:
        _expect_type(gqa, label, past)


def _check_bias(gqa: GQANode, bias: Output, sizes: StaticSizes) -> None:
    shape = bias.get_partial_shape()
    if shape.is_dynamic or len(shape) != 4 or shape[0] != 1 or shape[1] not in (1, gqa.num_heads):
        raise DecompositionError(
            f"{gqa.name}: attention_bias has shape {shape}; "
            f"[1, 1 or {gqa.num_heads}, {sizes.sequence_length}, total] is needed"
        )
    rows, columns = shape[2].get_length(), shape[3].get_length()
    if rows != sizes.sequence_length:
        raise DecompositionError(
            f"{gqa.name}: attention_bias has {rows} rows, the block has {sizes.sequence_length}; "
            "both must be equal"
        )
    # The op's own contract gives the bias a column for each of the T tokens; T is at least S and known only
    # when the graph runs.
    if columns < sizes.sequence_length:
        raise DecompositionError(
            f"{gqa.name}: attention_bias has {columns} columns for {sizes.sequence_length} tokens; they "
            "are token positions, one for each of total_sequence_length"
        )
    _expect_type(gqa, "attention_bias", bias)


def _expect_shape(gqa: GQANode, label: str, source: Output, wanted: PartialShape) -> None:
    shape = source.get_partial_shape()
    if shape != wanted:
        raise DecompositionError(
            f"{gqa.name}: {label} has shape {shape}; {wanted} is needed, make the model static first "
            "(StaticShapes)"
        )


def _expect_count(gqa: GQANode, label: str, source: Output, count: int) -> None:
    """Elements of an input whose rank does not matter; an open dimension is left to the device."""
    shape = source.get_partial_shape()
    if shape.is_static and _elements(shape) != count:
        raise DecompositionError(f"{gqa.name}: {label} has shape {shape}; {count} elements are needed")


def _expect_type(gqa: GQANode, label: str, source: Output) -> None:
    kind: ov.Type = source.get_element_type()
    if kind != gqa.element_type:
        raise DecompositionError(
            f"{gqa.name}: {label} is {kind}, query is {gqa.element_type}; convert it to the query's type"
        )


def _elements(shape: PartialShape) -> int:
    count = 1
    for dimension in shape:
        count *= dimension.get_length()
    return count
