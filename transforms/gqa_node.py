"""Read a GroupQueryAttention node into names, once, with everything that cannot be lowered refused."""

from dataclasses import dataclass, field
from enum import IntEnum

import openvino as ov
from openvino import Node, Output
from openvino.op import if_op, loop, tensor_iterator

from transforms.cache_quantization import CacheInputs, CacheQuantization, read_quantization, stored_channels
from transforms.errors import DecompositionError
from transforms.gqa_rules import (
    check_heads,
    check_shapes,
    check_sink,
    check_table_type,
    check_window,
    refuse_unsupported_attributes,
)

GQA_TYPE = "GroupQueryAttention"


class Port(IntEnum):
    """Input positions of the op (the contrib op's order)."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    PAST_KEY = 3
    PAST_VALUE = 4
    SEQLENS_K = 5
    TOTAL_SEQUENCE_LENGTH = 6
    COS_CACHE = 7
    SIN_CACHE = 8
    POSITION_IDS = 9
    ATTENTION_BIAS = 10
    HEAD_SINK = 11
    K_SCALE = 12
    V_SCALE = 13
    Q_NORM = 14
    K_NORM = 15


@dataclass(frozen=True, kw_only=True)
class RotaryInputs:
    """Rotary embedding inside the op: tables [positions, R], of which 2 R channels are rotated."""

    cos_cache: Output
    sin_cache: Output
    position_ids: Output | None
    interleaved: bool

    @property
    def table_rows(self) -> int | None:
        """How many positions the tables cover; None while unknown."""
        rows = self.cos_cache.get_partial_shape()[0]
        return rows.get_length() if rows.is_static else None

    @property
    def half(self) -> int:
        """R: channel pairs that are rotated."""
        length: int = self.cos_cache.get_partial_shape()[1].get_length()
        return length


@dataclass(frozen=True, kw_only=True)
class GQANode:
    """One GroupQueryAttention op: attributes resolved, inputs bound, absent inputs None.

    query [1, num_heads, S, D], key and value [1, kv_num_heads, S, D], past
    [1, kv_num_heads, C, D], or [1, kv_num_heads, C, cache_channels] in the type of a quantization.
    """

    node: Node = field(repr=False)
    name: str
    num_heads: int
    kv_num_heads: int
    head_size: int
    scale: float
    local_window_size: int
    causal: bool
    rolling_cache: bool
    has_sink: bool
    query: Output = field(repr=False)
    key: Output = field(repr=False)
    value: Output = field(repr=False)
    past_key: Output = field(repr=False)
    past_value: Output = field(repr=False)
    seqlens_k: Output = field(repr=False)
    head_sink: Output | None = field(repr=False)
    attention_bias: Output | None = field(repr=False)
    rotary: RotaryInputs | None = field(repr=False)
    quantization: CacheQuantization | None

    @property
    def element_type(self) -> ov.Type:
        """The type attention is computed in: the query's."""
        return self.query.get_element_type()

    @property
    def group(self) -> int:
        """G: query heads that read one KV head; query head h reads KV head h // G."""
        return self.num_heads // self.kv_num_heads

    @property
    def cache_channels(self) -> int:
        """Elements of a past tensor that hold one row of a head: D, or D / 2 where two codes share a byte."""
        return stored_channels(self.quantization.form if self.quantization else None, self.head_size)


def node_label(node: Node) -> str:
    """A name a person recognises: the tensor name of the attention output, else the node's own name.

    (The frontend names the node after its last output, so every node of a whole model is called
    "present.N.value".)
    """
    names = sorted(node.output(0).get_names())
    return names[0] if names else str(node.get_friendly_name())


def find_gqa(model: ov.Model) -> list[Node]:
    """The GroupQueryAttention nodes of a model in execution order.

    Raises DecompositionError for one inside the body of a control-flow op, where no pass would reach it.
    """
    nodes = model.get_ordered_ops()
    for node in nodes:
        hidden = _first_inside(node)
        if hidden is not None:
            raise DecompositionError(
                f"{node_label(hidden)}: this {GQA_TYPE} is inside the body of {node.get_friendly_name()} "
                f"({node.get_type_name()}); only those of the model itself are lowered, export it without "
                "control flow"
            )
    return [node for node in nodes if node.get_type_name() == GQA_TYPE]


def _first_inside(node: Node) -> Node | None:
    """A GroupQueryAttention in the bodies of a node, at any depth; None where there is none."""
    for body in _bodies(node):
        for inner in body.get_ordered_ops():
            found = inner if inner.get_type_name() == GQA_TYPE else _first_inside(inner)
            if found is not None:
                return found
    return None


def _bodies(node: Node) -> list[ov.Model]:
    if isinstance(node, if_op):
        return [node.get_then_body(), node.get_else_body()]
    return [node.get_function()] if isinstance(node, loop | tensor_iterator) else []


def read_gqa(node: Node) -> GQANode:
    """Bind a node's inputs and attributes.

    Raises DecompositionError for what the lowering does not implement: softcap, QK norm inputs, W = 0, a
    window without causal attention, head counts that do not divide, a batch other than 1, a scale or sink
    that is not finite, codes and scales that `read_quantization` does not know.
    """
    name = node_label(node)
    attributes = node.get_attributes()
    refuse_unsupported_attributes(name, attributes)
    inputs = [_present(node.input_value(i)) for i in range(node.get_input_size())]
    inputs += [None] * (len(Port) - len(inputs))
    _refuse_unsupported_inputs(name, inputs)
    num_heads, kv_num_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    check_heads(name, num_heads, kv_num_heads)
    query, key, value = (_required(name, inputs, port) for port in (Port.QUERY, Port.KEY, Port.VALUE))
    head_size = check_shapes(name, query, num_heads, key, value, kv_num_heads)
    window, causal = int(attributes["local_window_size"]), bool(attributes.get("causal", True))
    check_window(name, window, causal)
    check_sink(name, inputs[Port.HEAD_SINK], num_heads)
    past_key, past_value = (_required(name, inputs, port) for port in (Port.PAST_KEY, Port.PAST_VALUE))
    cache = CacheInputs(
        past_key=past_key,
        past_value=past_value,
        k_scale=inputs[Port.K_SCALE],
        v_scale=inputs[Port.V_SCALE],
        kv_num_heads=kv_num_heads,
        head_size=head_size,
    )
    return GQANode(
        node=node,
        name=name,
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        scale=float(attributes["scale"]) or head_size**-0.5,
        local_window_size=window,
        causal=causal,
        rolling_cache=bool(attributes.get("sliding_window_cache", False)),
        has_sink=inputs[Port.HEAD_SINK] is not None or bool(attributes.get("smooth_softmax", False)),
        query=query,
        key=key,
        value=value,
        past_key=past_key,
        past_value=past_value,
        seqlens_k=_required(name, inputs, Port.SEQLENS_K),
        head_sink=inputs[Port.HEAD_SINK],
        attention_bias=inputs[Port.ATTENTION_BIAS],
        rotary=_read_rotary(name, inputs, attributes, query),
        quantization=read_quantization(name, attributes, cache),
    )


def _present(source: Output) -> Output | None:
    """The input, or None for the constant of shape [0] that stands for an absent one."""
    shape = source.get_partial_shape()
    is_absent = (
        source.get_node().get_type_name() == "Constant" and shape.is_static and list(shape.to_shape()) == [0]
    )
    return None if is_absent else source


def _required(name: str, inputs: list[Output | None], port: Port) -> Output:
    source = inputs[port]
    if source is None:
        raise DecompositionError(
            f"{name}: input {port.name.lower()} is absent; an op with a KV cache needs it, "
            "export the model with past_key_values"
        )
    return source


def _refuse_unsupported_inputs(name: str, inputs: list[Output | None]) -> None:
    for port, meaning in (
        (Port.Q_NORM, "QK norm inside the op"),
        (Port.K_NORM, "QK norm inside the op"),
    ):
        if inputs[port] is not None:
            raise DecompositionError(
                f"{name}: input {port.name.lower()} is given; {meaning} is not lowered, leave it absent"
            )


def _read_rotary(
    name: str, inputs: list[Output | None], attributes: dict[str, object], query: Output
) -> RotaryInputs | None:
    if not attributes.get("do_rotary", False):
        return None
    cos_cache, sin_cache = inputs[Port.COS_CACHE], inputs[Port.SIN_CACHE]
    if cos_cache is None or sin_cache is None:
        raise DecompositionError(f"{name}: do_rotary=1 without cos_cache and sin_cache; give both tables")
    shape = cos_cache.get_partial_shape()
    if shape != sin_cache.get_partial_shape() or shape.rank.get_length() != 2 or shape[1].is_dynamic:
        raise DecompositionError(
            f"{name}: cos_cache {shape} and sin_cache {sin_cache.get_partial_shape()}; "
            "both must be [positions, R] with the same static R"
        )
    for label, table in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
        check_table_type(name, label, table, query.get_element_type())
    head_size = query.get_partial_shape()[3].get_length()
    if 2 * shape[1].get_length() > head_size:
        raise DecompositionError(
            f"{name}: the rotary tables have {shape[1].get_length()} columns; "
            f"at most head_size / 2 = {head_size // 2} can be rotated"
        )
    return RotaryInputs(
        cos_cache=cos_cache,
        sin_cache=sin_cache,
        position_ids=inputs[Port.POSITION_IDS],
        interleaved=bool(attributes.get("rotary_interleaved", False)),
    )
