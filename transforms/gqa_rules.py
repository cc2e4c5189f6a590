"""What a GroupQueryAttention may not say: each rule raises DecompositionError with node, value and limit."""

import math

import numpy as np
import openvino as ov
from openvino import Output

from transforms.errors import DecompositionError

SUPPORTED_TYPES = (ov.Type.f32, ov.Type.f16, ov.Type.bf16)

LARGEST = 2**31 - 1


def refuse_unsupported_attributes(name: str, attributes: dict[str, object]) -> None:
    """Softcap, and a scale that is no number."""
    softcap = attributes.get("softcap", 0.0)
    if softcap:
        raise DecompositionError(f"{name}: softcap={softcap}; only softcap=0 is lowered")
    scale = attributes["scale"]
    if not math.isfinite(float(str(scale))):
        raise DecompositionError(f"{name}: scale={scale}; a finite number is needed, 0 is 1 / sqrt(D)")


def check_sink(name: str, head_sink: Output | None, num_heads: int) -> None:
    """H logits; finite where they are known before the graph runs."""
    if head_sink is None:
        return
    shape = head_sink.get_partial_shape()
    if shape.is_static and math.prod(shape.to_shape()) != num_heads:
        raise DecompositionError(f"{name}: head_sink has shape {shape}; {num_heads} elements are needed")
    node = head_sink.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        return
    values = node.get_data(dtype=np.float32)
    if not np.isfinite(values).all():
        bad = values[~np.isfinite(values)].flat[0]
        raise DecompositionError(f"{name}: head_sink contains {bad}; its logits must be finite")


def check_heads(name: str, num_heads: int, kv_num_heads: int) -> None:
    """H a positive multiple of KV."""
    if num_heads < 1 or kv_num_heads < 1 or num_heads % kv_num_heads:
        raise DecompositionError(
            f"{name}: num_heads={num_heads}, kv_num_heads={kv_num_heads}; "
            "num_heads must be a positive multiple of kv_num_heads"
        )


def check_shapes(
    name: str, query: Output, num_heads: int, key: Output, value: Output, kv_num_heads: int
) -> int:
    """Check ranks, batch, heads and types; return the head size D."""
    for label, source, heads in (
        ("query", query, num_heads),
        ("key", key, kv_num_heads),
        ("value", value, kv_num_heads),
    ):
        shape = source.get_partial_shape()
        if shape.rank.is_dynamic or shape.rank.get_length() != 4:
            raise DecompositionError(f"{name}: {label} has shape {shape}; [1, heads, S, D] is needed")
        if shape[0].is_static and shape[0].get_length() != 1:
            raise DecompositionError(
                f"{name}: {label} has batch {shape[0].get_length()}; only batch 1 is lowered"
            )
        if shape[1].is_static and shape[1].get_length() != heads:
            raise DecompositionError(
                f"{name}: {label} has {shape[1].get_length()} heads, the attributes say {heads}"
            )
        if source.get_element_type() != query.get_element_type():
            raise DecompositionError(
                f"{name}: {label} is {source.get_element_type()}, query is {query.get_element_type()}; "
                "both must have one type"
            )
    if query.get_element_type() not in SUPPORTED_TYPES:
        raise DecompositionError(
            f"{name}: query is {query.get_element_type()}; "
            f"allowed: {', '.join(t.get_type_name() for t in SUPPORTED_TYPES)}"
        )
    head_size = query.get_partial_shape()[3]
    if head_size.is_dynamic:
        raise DecompositionError(
            f"{name}: the head size of query {query.get_partial_shape()} is unknown; give it a static last "
            "dimension"
        )
    length: int = head_size.get_length()
    return length


def check_table_type(name: str, label: str, table: Output, element_type: ov.Type) -> None:
    """A rotary table is multiplied with rows of the query's type."""
    if table.get_element_type() != element_type:
        raise DecompositionError(
            f"{name}: {label} is {table.get_element_type()}, query is {element_type}; convert it to the "
            "query's type"
        )


def check_window(name: str, window: int, causal: bool) -> None:
    """W = -1 or 1 to 2^31 - 1, and then causal."""
    if window == 0 or window < -1:
        raise DecompositionError(
            f"{name}: local_window_size={window}; a window counts the query itself, so 1 is the least, "
            "-1 is no window"
        )
    if window > LARGEST:
        raise DecompositionError(
            f"{name}: local_window_size={window}; positions are counted in 32 bits, so {LARGEST} is the "
            "most, -1 is no window"
        )
    if window > 0 and not causal:
        raise DecompositionError(
            f"{name}: local_window_size={window} with causal=0; a window needs causal attention"
        )
