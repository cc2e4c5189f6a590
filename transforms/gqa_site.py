"""One node with the static sizes it is lowered for, and what cannot be lowered refused."""

from dataclasses import dataclass

from openvino import Output

from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode
from transforms.input_checks import StaticSizes, check_inputs, past_shape
from transforms.key_layout import Branch, KeyLayout
from transforms.opset import static_dimension


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node, the layout of its past, S and C."""

    gqa: GQANode
    layout: KeyLayout
    sequence_length: int
    capacity: int

    @property
    def sizes(self) -> StaticSizes:
        """What inputs are checked against."""
        return StaticSizes(sequence_length=self.sequence_length, capacity=self.capacity)


def read_site(gqa: GQANode, branch: Branch, layout: KeyLayout) -> Site:
    """The site of a node; DecompositionError for dynamic lengths and for what its layout cannot hold."""
    site = Site(
        gqa=gqa,
        layout=layout,
        sequence_length=_static(gqa, "query", gqa.query),
        capacity=_static(gqa, "past_key", gqa.past_key),
    )
    _check_layout(site, branch)
    check_inputs(gqa, site.sizes)
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


def resolve_head_size(site: Site) -> None:
    """Give cache inputs whose head size is symbolic what follows from the head size of the query."""
    for past in (site.gqa.past_key, site.gqa.past_value):
        if past.get_partial_shape().is_dynamic:
            parameter = past.get_node()
            parameter.set_partial_shape(past_shape(site.gqa, site.sizes))
            parameter.validate_and_infer_types()
