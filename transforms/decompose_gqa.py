"""Lower every GroupQueryAttention of a static branch to a single ScaledDotProductAttention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import openvino as ov
import openvino.opset13 as ops
from openvino import Output, PartialShape
from openvino.passes import ModelPass
from openvino.utils.node_factory import NodeFactory

from transforms.cache_codec import codecs_of
from transforms.cached_rows import PastView, cached_rows
from transforms.errors import DecompositionError
from transforms.frames import Frame, Step, past_keys, right_aligned_frame, split_frame
from transforms.gqa_node import GQANode, find_gqa, read_gqa
from transforms.key_layout import Branch, KeyLayout
from transforms.masks import additive_mask, bias_by_slot, visible
from transforms.opset import OutputKey, i32, i64, key_of, reshape, scalar_i32, static_dimension
from transforms.rotary import gather_table, rotary_positions, rotate

BlockTokens = Callable[[ov.Model], Output]
"""From the model to the output (one element, any integer type) that yields n, the block's real rows."""

_FACTORY = NodeFactory("opset13")


def tokens_in_attention_mask(sequence_length: int) -> BlockTokens:
    """n of a language model: the sum of the last S entries of its attention_mask [1, length]."""

    def build(model: ov.Model) -> Output:
        mask = model.input("attention_mask")
        length = mask.get_partial_shape()[1].get_length()
        tail = ops.slice(mask, i64([length - sequence_length]), i64([length]), i64([1]), i64([1]))
        return ops.reduce_sum(tail, i64([1]), False).output(0)

    return build


class DecomposeGQA(ModelPass):
    """Lower every GroupQueryAttention to one SDPA, exact in its frame; `lowered` counts the last run.

    The model must have static shapes: query [1, H, S, D], past [1, KV, C, D] (C = 0 is no past).
    PREFILL takes past and block as one right-aligned run. GENERATE takes a past of C slots in `key_layout`
    (one for all nodes, or a mapping from node name, see `node_label`, to layout) and a block at slots
    [C, C + S); the boundary is C, never `seqlens_k`. `block_tokens` yields n for partial blocks, None says
    that blocks are always full. present outputs become Concat(past, new), [1, KV, C + S, D],
    of a quantized cache in its codes.

    Raises DecompositionError, with the model unchanged, where a node cannot be lowered exactly.
    """

    def __init__(
        self,
        branch: Branch,
        *,
        key_layout: KeyLayout | Mapping[str, KeyLayout] = KeyLayout.LINEAR,
        block_tokens: BlockTokens | None = None,
    ) -> None:
        super().__init__()
        self._branch = branch
        self._key_layout = key_layout
        self._block_tokens = block_tokens
        self.lowered = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Lower all nodes or none; True when the model changed."""
        self.lowered = 0
        sites = [self._read_site(read_gqa(node)) for node in find_gqa(model)]
        self._check_layout_names([site.gqa.name for site in sites])
        if not sites:
            return False
        for site in sites:
            _resolve_head_size(site)
        model.validate_nodes_and_infer_types()
        num_tokens = None if self._block_tokens is None else scalar_i32(self._block_tokens(model))
        shared = _SharedParts(self._branch, num_tokens)
        lowered = [_lower(site, shared) for site in sites]
        for site, outputs in zip(sites, lowered, strict=True):
            for old, new in zip(site.gqa.node.outputs(), outputs, strict=True):
                _replace(old, new)
        self.lowered = len(sites)
        model.validate_nodes_and_infer_types()
        return True

    def _read_site(self, gqa: GQANode) -> "_Site":
        layout = self._key_layout
        if not isinstance(layout, KeyLayout):
            layout = layout.get(gqa.name, KeyLayout.LINEAR)
        site = _Site(
            gqa=gqa,
            layout=layout,
            sequence_length=_static(gqa, "query", gqa.query),
            capacity=_static(gqa, "past_key", gqa.past_key),
        )
        _check_layout(site, self._branch)
        _check_past(site)
        _check_bias(site)
        return site

    def _check_layout_names(self, names: list[str]) -> None:
        if isinstance(self._key_layout, KeyLayout):
            return
        unknown = sorted(set(self._key_layout) - set(names))
        if unknown:
            raise DecompositionError(
                f"key_layout names {unknown}, which the model does not have; its nodes are {names}"
            )


@dataclass(frozen=True, kw_only=True)
class _Site:
    """One node with the static sizes it is lowered for."""

    gqa: GQANode
    layout: KeyLayout
    sequence_length: int
    capacity: int


class _SharedParts:
    """What nodes of one model have in common, built once: frames, masks, rotary rows, zero sinks."""

    def __init__(self, branch: Branch, num_tokens: Output | None) -> None:
        self._branch = branch
        self._num_tokens = num_tokens
        self._steps: dict[tuple[OutputKey, int], Step] = {}
        self._frames: dict[tuple[object, ...], Frame] = {}
        self._masks: dict[tuple[object, ...], Output] = {}
        self._positions: dict[tuple[object, ...], Output] = {}
        self._tables: dict[tuple[OutputKey, OutputKey], Output] = {}

    def step(self, site: _Site) -> Step:
        """The step's lengths, one per seqlens_k and block size."""
        seqlens_k = site.gqa.seqlens_k
        key = (key_of(seqlens_k), site.sequence_length)
        if key not in self._steps:
            total = ops.add(scalar_i32(seqlens_k), i32([1])).output(0)
            self._steps[key] = Step(
                total=total, num_tokens=self._num_tokens, sequence_length=site.sequence_length
            )
        return self._steps[key]

    def frame(self, site: _Site) -> Frame:
        """Positions of the node's slots, shared by the nodes whose slots lie alike."""
        window = site.gqa.local_window_size if site.layout in _WINDOW_DEPENDENT else None
        key = (key_of(site.gqa.seqlens_k), site.sequence_length, site.layout, site.capacity, window)
        if key not in self._frames:
            self._frames[key] = self._build_frame(site)
        return self._frames[key]

    def _build_frame(self, site: _Site) -> Frame:
        step = self.step(site)
        match self._branch:
            case Branch.PREFILL:
                return right_aligned_frame(step, site.capacity + site.sequence_length)
            case Branch.GENERATE:
                window = site.gqa.local_window_size
                return split_frame(step, past_keys(site.layout, step, site.capacity, window))

    def mask(self, site: _Site) -> Output:
        """The additive mask: one per distinct frame, window and bias."""
        gqa, frame = site.gqa, self.frame(site)
        bias_key = None if gqa.attention_bias is None else key_of(gqa.attention_bias)
        key = (
            key_of(frame.key_position),
            gqa.local_window_size,
            gqa.causal,
            str(gqa.element_type),
            bias_key,
        )
        if key not in self._masks:
            bias = None if gqa.attention_bias is None else bias_by_slot(gqa.attention_bias, frame)
            keys = visible(frame, local_window_size=gqa.local_window_size, causal=gqa.causal)
            self._masks[key] = additive_mask(keys, gqa.element_type, bias)
        return self._masks[key]

    def rotated(self, site: _Site, source: Output) -> Output:
        """The rows with the node's rotary embedding, unchanged where it has none."""
        rotary = site.gqa.rotary
        if rotary is None:
            return source
        block = self.frame(site).query_position
        origin = key_of(block if rotary.position_ids is None else rotary.position_ids)
        if origin not in self._positions:
            self._positions[origin] = rotary_positions(rotary, block, site.sequence_length)
        positions = self._positions[origin]
        cos, sin = (self._table(table, positions) for table in (rotary.cos_cache, rotary.sin_cache))
        return rotate(source, cos, sin, interleaved=rotary.interleaved)

    def _table(self, table: Output, positions: Output) -> Output:
        key = (key_of(table), key_of(positions))
        if key not in self._tables:
            self._tables[key] = gather_table(table, positions)
        return self._tables[key]


_WINDOW_DEPENDENT = (KeyLayout.ROLLING, KeyLayout.GATHERED)


def _lower(site: _Site, shared: _SharedParts) -> tuple[Output, Output, Output]:
    """Attention [1, S, H D] and the presents [1, KV, C + S, D] of one node."""
    gqa = site.gqa
    query = shared.rotated(site, gqa.query)
    new_key, new_value = shared.rotated(site, gqa.key), gqa.value
    view = PastView(
        capacity=site.capacity,
        gathered=site.layout is KeyLayout.GATHERED,
        gather_index=shared.frame(site).gather_index,
    )
    key_codec, value_codec = codecs_of(gqa)
    keys = cached_rows(gqa.past_key, new_key, view, key_codec)
    values = cached_rows(gqa.past_value, new_value, view, value_codec)
    inputs = [
        query,
        _broadcast_heads(gqa, keys.read),
        _broadcast_heads(gqa, values.read),
        shared.mask(site),
        ops.constant(gqa.scale, dtype=gqa.element_type).output(0),
    ]
    if gqa.has_sink:
        inputs.append(_sink(gqa))
    attention = _FACTORY.create("ScaledDotProductAttention", inputs, {"causal": False})
    attention.set_friendly_name(gqa.name)
    return _merge_heads(site, attention.output(0)), keys.present, values.present


def _merge_heads(site: _Site, attention: Output) -> Output:
    """[1, H, S, D] -> [1, S, H D].

    Transposed in three dimensions: OpenVINO's CPU plugin fuses a transpose in four into the attention kernel
    and, where S == H makes the shapes of query and output equal, lets the kernel overwrite the query it is
    still reading.
    """
    head_size = attention.get_partial_shape()[3].get_length()
    heads = reshape(attention, [site.gqa.num_heads, site.sequence_length, head_size])
    rows = ops.transpose(heads, i32([1, 0, 2])).output(0)
    return reshape(rows, [1, site.sequence_length, site.gqa.num_heads * head_size])


def _broadcast_heads(gqa: GQANode, rows: Output) -> Output:
    """[1, KV, K, D] -> [1, H, K, D], each KV head repeated for the G query heads that read it."""
    if gqa.group == 1:
        return rows
    length, size = (rows.get_partial_shape()[axis].get_length() for axis in (2, 3))
    wide = ops.broadcast(
        ops.unsqueeze(rows, i32([2])), i64([1, gqa.kv_num_heads, gqa.group, length, size])
    ).output(0)
    return reshape(wide, [1, gqa.num_heads, length, size])


def _sink(gqa: GQANode) -> Output:
    """The extra logit of the denominator, [1, H, 1, 1]: head_sink, or 0 per head for smooth_softmax."""
    if gqa.head_sink is None:
        return ops.constant([[[[0.0]]] * gqa.num_heads], dtype=gqa.element_type).output(0)
    sink = gqa.head_sink
    if sink.get_element_type() != gqa.element_type:
        sink = ops.convert(sink, gqa.element_type.get_type_name()).output(0)
    return reshape(sink, [1, gqa.num_heads, 1, 1])


def _replace(old: Output, new: Output) -> None:
    """Hand an output's consumers and tensor names over."""
    names = old.get_names()
    old.get_tensor().set_names(set())
    old.replace(new)
    new.get_tensor().add_names(names)


def _static(gqa: GQANode, label: str, source: Output) -> int:
    length = static_dimension(source, 2)
    if length is None:
        raise DecompositionError(
            f"{gqa.name}: {label} {source.get_partial_shape()} has a dynamic length; "
            "make the model static first (StaticShapes)"
        )
    return length


def _check_layout(site: _Site, branch: Branch) -> None:
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


def _check_past(site: _Site) -> None:
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


def _past_shape(site: _Site) -> PartialShape:
    gqa = site.gqa
    return PartialShape([1, gqa.kv_num_heads, site.capacity, gqa.cache_channels])


def _resolve_head_size(site: _Site) -> None:
    """Give cache inputs whose head size is symbolic what follows from the head size of the query."""
    for past in (site.gqa.past_key, site.gqa.past_value):
        if past.get_partial_shape().is_dynamic:
            parameter = past.get_node()
            parameter.set_partial_shape(_past_shape(site))
            parameter.validate_and_infer_types()


def _check_bias(site: _Site) -> None:
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
