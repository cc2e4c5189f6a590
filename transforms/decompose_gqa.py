"""Lower every GroupQueryAttention of a static branch to a single ScaledDotProductAttention."""

import math
from collections.abc import Callable, Mapping

import openvino as ov
import openvino.opset13 as ops
from openvino import Output
from openvino.passes import ModelPass
from openvino.utils.node_factory import NodeFactory

from transforms.attention_parts import before_head_transpose, scalar, sink_logits, take_over
from transforms.cache_codec import codecs_of
from transforms.cached_rows import PastView, cached_rows
from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode, find_gqa, read_gqa
from transforms.gqa_site import Site, read_site, resolve_head_size
from transforms.key_layout import Branch, KeyLayout
from transforms.opset import i32, i64, reshape, scalar_i32
from transforms.shared_parts import SharedParts

BlockTokens = Callable[[ov.Model], Output]
"""From the model to the output (one element, any integer type) that yields n, the block's real rows."""

_FACTORY = NodeFactory("opset13")


def tokens_in_attention_mask(model: ov.Model) -> Output:
    """n of a language model: the sum of the last S entries of its attention_mask, S the rows of input_ids.

    For the `block_tokens` of DecomposeGQA. The model has static shapes: input_ids [1, S] and attention_mask
    [1, length], length at least S. Raises DecompositionError for any other.
    """
    rows = _static_input(model, "input_ids").get_shape()[1]
    mask = _static_input(model, "attention_mask")
    length = mask.get_shape()[1]
    if length < rows:
        raise DecompositionError(
            f"attention_mask has {length} entries for a block of {rows}; its last entries are those of the "
            "block, so at least as many are needed"
        )
    tail = ops.slice(mask, i64([length - rows]), i64([length]), i64([1]), i64([1]))
    return ops.reduce_sum(tail, i64([1]), False).output(0)


def _static_input(model: ov.Model, name: str) -> Output:
    for port in model.inputs:
        if name in port.get_names():
            shape = port.get_partial_shape()
            if shape.is_dynamic or len(shape) != 2:
                raise DecompositionError(
                    f"{name} has shape {shape}; a static [1, length] is needed (StaticShapes)"
                )
            return port
    raise DecompositionError(
        f"the model has no input {name} to count the block's tokens with; give block_tokens of your own"
    )


class DecomposeGQA(ModelPass):
    """Lower every GroupQueryAttention to one SDPA, exact in its frame; `lowered` counts the last run.

    The model must have static shapes: query [1, H, S, D], past [1, KV, C, D] (C = 0 is no past).
    PREFILL takes past and block as one right-aligned run. GENERATE takes a past of C slots in `key_layout`
    (one for all nodes, or a mapping from node name, see `node_label`, to layout) and a block at slots
    [C, C + S); the boundary is C, never `seqlens_k`. `block_tokens` yields n for partial blocks, None says
    that blocks are always full, as they must be in PREFILL over a past. In both branches the n real rows are
    the last of the block, [S - n, S); what stands before them is padding, answered with finite values that
    mean nothing. present outputs become Concat(past, new), [1, KV, C + S, D], of a quantized cache in its
    codes. Whether the rotary tables reach the last position is seen only when the graph runs: who runs it
    keeps T within their rows.

    Raises DecompositionError, with the model unchanged, where a node cannot be lowered exactly, and TypeError
    for a branch, layout or block_tokens that is none.
    """

    def __init__(
        self,
        branch: Branch,
        *,
        key_layout: KeyLayout | Mapping[str, KeyLayout] = KeyLayout.LINEAR,
        block_tokens: BlockTokens | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(branch, key_layout, block_tokens)
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
        if self._branch is Branch.PREFILL and self._block_tokens is not None:
            _check_no_past(sites)
        num_tokens = None if self._block_tokens is None else _token_count(self._block_tokens(model))
        for site in sites:
            resolve_head_size(site)
        model.validate_nodes_and_infer_types()
        shared = SharedParts(self._branch, num_tokens)
        lowered = [_lower(site, shared) for site in sites]
        for site, outputs in zip(sites, lowered, strict=True):
            for old, new in zip(site.gqa.node.outputs(), outputs, strict=True):
                take_over(old, new)
        self.lowered = len(sites)
        model.validate_nodes_and_infer_types()
        return True

    def _read_site(self, gqa: GQANode) -> Site:
        layout = self._key_layout
        if not isinstance(layout, KeyLayout):
            layout = layout.get(gqa.name, KeyLayout.LINEAR)
        return read_site(gqa, self._branch, layout)

    def _check_layout_names(self, names: list[str]) -> None:
        if isinstance(self._key_layout, KeyLayout):
            return
        unknown = sorted(set(self._key_layout) - set(names))
        if unknown:
            raise DecompositionError(
                f"key_layout names {unknown}, which the model does not have; its nodes are {names}"
            )


def _check_arguments(
    branch: Branch, key_layout: KeyLayout | Mapping[str, KeyLayout], block_tokens: BlockTokens | None
) -> None:
    """A name in place of a member would silently be neither."""
    if not isinstance(branch, Branch):
        raise TypeError(f"branch={branch!r}; a member of Branch is needed")
    layouts = key_layout.values() if isinstance(key_layout, Mapping) else [key_layout]
    for layout in layouts:
        if not isinstance(layout, KeyLayout):
            raise TypeError(f"key_layout={key_layout!r}; members of KeyLayout are needed")
    if block_tokens is not None and not callable(block_tokens):
        raise TypeError(f"block_tokens={block_tokens!r}; a function from the model to an output is needed")


def _check_no_past(sites: list[Site]) -> None:
    """DecompositionError for partial blocks behind a past: one run has no place for padding in its midst."""
    for site in sites:
        if site.capacity:
            raise DecompositionError(
                f"{site.gqa.name}: Branch.PREFILL with block_tokens over a past of {site.capacity} slots; "
                "past and block are one right-aligned run there, in which blocks are always full. Leave "
                "block_tokens out, or use Branch.GENERATE"
            )


def _token_count(source: Output) -> Output:
    """What block_tokens gave, as an int32 of shape [1]."""
    if not isinstance(source, Output):
        raise DecompositionError(f"block_tokens gave {source!r}; an output of one integer is needed")
    shape, kind = source.get_partial_shape(), source.get_element_type()
    if shape.is_dynamic or math.prod(shape.to_shape()) != 1 or not kind.is_integral_number():
        raise DecompositionError(
            f"block_tokens gave {kind.get_type_name()} of shape {shape}; one integer is needed"
        )
    return scalar_i32(source)


def _lower(site: Site, shared: SharedParts) -> tuple[Output, Output, Output]:
    """Attention [1, S, H D] and the presents [1, KV, C + S, D] of one node."""
    gqa = site.gqa
    query = shared.rotated(site, _split_heads(site))
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
        scalar(gqa.scale, gqa.element_type),
    ]
    if gqa.has_sink:
        inputs.append(sink_logits(gqa))
    attention = _FACTORY.create("ScaledDotProductAttention", inputs, {"causal": False})
    attention.set_friendly_name(gqa.name)
    return _merge_heads(site, attention.output(0)), keys.present, values.present


def _split_heads(site: Site) -> Output:
    """The query [1, H, S, D]; where it comes from a transpose, transposed in three dimensions instead.

    Why is told at _merge_heads.
    """
    gqa = site.gqa
    rows_first = before_head_transpose(gqa.query)
    if rows_first is None:
        return gqa.query
    rows, heads, size = site.sequence_length, gqa.num_heads, gqa.head_size
    flat = reshape(rows_first, [rows, heads, size])
    return reshape(ops.transpose(flat, i32([1, 0, 2])).output(0), [1, heads, rows, size])


def _merge_heads(site: Site, attention: Output) -> Output:
    """[1, H, S, D] -> [1, S, H D].

    Transposed in three dimensions: OpenVINO's CPU plugin fuses a transpose in four, of the query or of the
    output, into the attention kernel and, where S == H makes the shapes of query and output equal, lets the
    kernel overwrite the query it is still reading. That is sound only if both are fused or none.
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
