"""Read one attention of the device form: a ScaledDotProductAttention over broadcast, joined KV rows."""

from dataclasses import dataclass, field

import openvino as ov
from openvino import Node, Output

from transforms.form_choice import AttentionSizes

SDPA_TYPE = "ScaledDotProductAttention"
_FLOATS = (ov.Type.f32, ov.Type.f16, ov.Type.bf16)


@dataclass(frozen=True, kw_only=True)
class DeviceAttention:
    """One SDPA with the KV broadcast and the joining of ranges undone.

    query [1, H, S, D]; keys and values: the ranges (past, block), each [1, KV, length, D]; mask additive,
    [1, 1 or H, S, K]; scale one element; sink [1, H, 1, 1] or None.
    """

    node: Node = field(repr=False)
    query: Output = field(repr=False)
    keys: tuple[Output, ...] = field(repr=False)
    values: tuple[Output, ...] = field(repr=False)
    mask: Output = field(repr=False)
    scale: Output = field(repr=False)
    sink: Output | None = field(repr=False)
    sizes: AttentionSizes


def find_attention(model: ov.Model) -> list[DeviceAttention]:
    """Every attention of a model that has the device form, in execution order."""
    nodes = (node for node in model.get_ordered_ops() if node.get_type_name() == SDPA_TYPE)
    return [found for node in nodes if (found := read_attention(node)) is not None]


def read_attention(node: Node) -> DeviceAttention | None:
    """Bind an SDPA, or None where it is not of the device form (shapes, mask, causal attribute)."""
    inputs = [node.input_value(i) for i in range(node.get_input_size())]
    if len(inputs) < 5 or node.get_attributes()["causal"]:
        return None
    if any(source.get_partial_shape().is_dynamic for source in inputs):
        return None
    query, key, value, mask, scale = inputs[:5]
    shapes = [list(source.get_shape()) for source in inputs]
    if not _is_plain(shapes) or mask.get_element_type() not in _FLOATS:
        return None
    key, value = _without_broadcast(key), _without_broadcast(value)
    kv_num_heads = key.get_shape()[1]
    if value.get_shape()[1] != kv_num_heads:
        return None
    keys, values = _ranges(key), _ranges(value)
    if _lengths(keys) != _lengths(values):
        keys, values = (key,), (value,)
    sizes = AttentionSizes(
        num_heads=shapes[0][1],
        kv_num_heads=kv_num_heads,
        head_size=shapes[0][3],
        sequence_length=shapes[0][2],
        key_lengths=_lengths(keys),
    )
    sink = inputs[5] if len(inputs) > 5 else None
    return DeviceAttention(
        node=node, query=query, keys=keys, values=values, mask=mask, scale=scale, sink=sink, sizes=sizes
    )


def _is_plain(shapes: list[list[int]]) -> bool:
    """Whether shapes fit: [1, H, S, D], [1, H, K, D] twice, [1, 1 or H, S, K], one element, [1, H, 1, 1]."""
    query, key, value, mask, scale, *sink = shapes
    if any(len(shape) != 4 for shape in (query, key, value, mask)):
        return False
    heads, rows = query[1:3]
    mask_fits = mask in ([1, shared, rows, key[2]] for shared in (1, heads))
    sink_fits = all(shape == [1, heads, 1, 1] for shape in sink)
    return (
        query[0] == 1
        and key == [1, heads, key[2], query[3]]
        and value[:3] == key[:3]
        and mask_fits
        and sink_fits
        and scale in ([], [1])
    )


def _without_broadcast(rows: Output) -> Output:
    """[1, KV, K, D] behind Reshape(Broadcast(Unsqueeze(.))) to [1, H, K, D]; else the rows themselves."""
    chain = []
    source = rows
    for expected in ("Reshape", "Broadcast", "Unsqueeze"):
        node = source.get_node()
        if node.get_type_name() != expected:
            return rows
        chain.append(list(source.get_shape()))
        source = node.input_value(0)
    wide, repeated, lifted = chain
    inner = list(source.get_shape())
    if len(inner) != 4 or len(repeated) != 5:
        return rows
    one, kv_num_heads, length, size = inner
    group = repeated[2]
    is_repetition = (
        lifted == [one, kv_num_heads, 1, length, size]
        and repeated == [one, kv_num_heads, group, length, size]
        and wide == [one, kv_num_heads * group, length, size]
    )
    return source if is_repetition else rows


def _ranges(rows: Output) -> tuple[Output, ...]:
    """The pieces that a Concat along the slots joins; the rows themselves where there is none."""
    node = rows.get_node()
    if node.get_type_name() != "Concat" or node.get_attributes()["axis"] not in (2, -2):
        return (rows,)
    return tuple(node.input_value(i) for i in range(node.get_input_size()))


def _lengths(ranges: tuple[Output, ...]) -> tuple[int, ...]:
    return tuple(rows.get_shape()[2] for rows in ranges)
