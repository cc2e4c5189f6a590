"""One node with the static sizes it is lowered for, and what cannot be lowered refused."""

from dataclasses import dataclass

from openvino import Output, PartialShape

from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode
from transforms.key_layout import Branch, KeyLayout
from transforms.opset import static_dimension


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node, the layout of its past, S and C."""

    gqa: GQANode
    layout: KeyLayout
    sequence_length: int
    capacity: int


def read_site(gqa: GQANode, branch: Branch, layout: KeyLayout) -> Site:
    """The site of a node; DecompositionError for dynamic lengths and for what its layout cannot hold."""
    site = Site(
        gqa=gqa,
        layout=layout,
        sequence_length=_static(gqa, "query", gqa.query),
        capacity=_static(gqa, "past_key", gqa.past_key),
    )
    _check_layout(site, branch)
    _check_past(site)
    _check_bias(site)
    return site


def _static(gqa: GQANode, label: str, source: Output) -> int:
    length = static_dimension(source, 2)
    if length is None:
        raise DecompositionError(
            f"{gqa.name}: {label} {source.get_partial_shape()} has a dynamic length; "
            "make the model static first (StaticShapes)"
        )
    return length


def _check_layout(site: Site, branch: Branch) -> None:
    gqa, layout = site.gqa, site.layout
    if layout is KeyLayout.LINEAR:
        return
    if branch is Branch.PREFILL:
        raise DecompositionError(
            f"{gqa.name}: key_layout {layout.name} with Branch.PREFILL; the right-aligned run has one "
            "layout, use LINEAR"
        )
    window, capacity = gqa.local_window_size, site.capacity
    if window < 1:
        raise DecompositionError(
            f"{gqa.name}: key_layout {layout.name} needs a window, local_window_size={window}; "
            "use LINEAR for this node"
        )
    least = {KeyLayout.ROLLING: window, KeyLayout.RING: window - 1, KeyLayout.GATHERED: 0}[layout]
    if capacity < least:
        raise DecompositionError(
            f"{gqa.name}: a {layout.name} past of {capacity} slots cannot hold local_window_size={window}; "
            f"at least {least} are needed"
        )


def _check_past(site: Site) -> None:
    gqa = site.gqa
    for label, past in (("past_key", gqa.past_key), ("past_value", gqa.past_value)):
        shape = past.get_partial_shape()
        wanted = _past_shape(site)
        is_input = past.get_node().get_type_name() == "Parameter"
        if not shape.compatible(wanted) or (shape.is_dynamic and not is_input):
            raise DecompositionError(f"{gqa.name}: {label} has shape {shape}; {wanted} is needed")
        if gqa.quantization is None and past.get_element_type() != gqa.element_type:
            raise DecompositionError(
                f"{gqa.name}: {label} is {past.get_element_type()}, query is {gqa.element_type}; "
                "convert the past to the query's type"
            )


def _past_shape(site: Site) -> PartialShape:
    gqa = site.gqa
    return PartialShape([1, gqa.kv_num_heads, site.capacity, gqa.cache_channels])


def resolve_head_size(site: Site) -> None:
    """Give cache inputs whose head size is symbolic what follows from the head size of the query."""
    for past in (site.gqa.past_key, site.gqa.past_value):
        if past.get_partial_shape().is_dynamic:
            parameter = past.get_node()
            parameter.set_partial_shape(_past_shape(site))
            parameter.validate_and_infer_types()


def _check_bias(site: Site) -> None:
    bias = site.gqa.attention_bias
    if bias is None:
        return
    shape = bias.get_partial_shape()
    heads = (1, site.gqa.num_heads)
    if shape.is_dynamic or len(shape) != 4 or shape[0] != 1 or shape[1].get_length() not in heads:
        raise DecompositionError(
            f"{site.gqa.name}: attention_bias has shape {shape}; "
            f"[1, 1 or {site.gqa.num_heads}, {site.sequence_length}, total] is needed"
        )
    if shape[2].get_length() != site.sequence_length:
        raise DecompositionError(
            f"{site.gqa.name}: attention_bias has {shape[2].get_length()} rows, "
            f"the block has {site.sequence_length}; both must be equal"
        )
