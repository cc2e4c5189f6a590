"""From a model that is handed its KV cache to one that keeps it, with GroupQueryAttention lowered."""

from dataclasses import dataclass, field

import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Output
from openvino.op.util import Variable, VariableInfo
from openvino.passes import ModelPass
from openvino.utils.node_factory import NodeFactory

from transforms.attention_parts import before_head_transpose, scalar, sink_logits, take_over
from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode, find_gqa, read_gqa
from transforms.opset import OutputKey, concat, i64, key_of
from transforms.splits_to_slices import SplitsToSlices
from transforms.stateful_mask import StatefulStep, additive_mask, read_step
from transforms.stateful_rotary import rotate, table_rows

_FACTORY = NodeFactory("opset13")


class StatefulGQA(ModelPass):
    """Lower every GroupQueryAttention to one SDPA over a cache in states; `lowered` counts the last run.

    The model: inputs input_ids [B, S], attention_mask [B, T], one past per key and value; outputs logits and
    one present each. It comes out with inputs input_ids, attention_mask, position_ids [B, S] and beam_idx [B]
    and the output logits, any lengths: the form that OpenVINO's plugins, NPUW and openvino_genai take. Where
    keys and queries lie is read from attention_mask and position_ids alone (`transforms.stateful_mask`), so
    it is exact in a static cache too. Layers with one window share a mask, those with one table its rows.
    Splits of packed projections become slices (`transforms.splits_to_slices`).

    Raises DecompositionError, with the model unchanged, for a model or node that cannot be lowered exactly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lowered = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Lower all nodes or none; True when the model changed."""
        self.lowered = 0
        if not _read_sites(model):
            return False
        inputs = _Inputs(model)
        SplitsToSlices().run_on_model(model)
        sites = _read_sites(model)
        shared = _SharedParts(inputs)
        lowered = [_lower(site, shared) for site in sites]
        for site, parts in zip(sites, lowered, strict=True):
            take_over(site.gqa.node.output(0), parts.attention)
        model.add_parameters(inputs.added)
        model.add_variables([state.variable for parts in lowered for state in parts.states])
        model.add_sinks([state.write for parts in lowered for state in parts.states])
        for site in sites:
            for port in (site.key, site.value):
                model.remove_result(port.present)
                model.remove_parameter(port.past)
        self.lowered = len(sites)
        model.validate_nodes_and_infer_types()
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class _CachePort:
    """One cache of the model as it was: the input that brought it and the output that took it."""

    past: Node = field(repr=False)
    present: Node = field(repr=False)
    name: str

    @classmethod
    def read(cls, gqa: GQANode, past: Output, port: int) -> "_CachePort":
        node = past.get_node()
        if node.get_type_name() != "Parameter" or len(past.get_target_inputs()) != 1:
            raise DecompositionError(
                f"{gqa.name}: its past comes from {node.get_friendly_name()}; a model input that only this "
                "node reads is needed to make it a state"
            )
        if past.get_element_type() != gqa.element_type:
            raise DecompositionError(
                f"{gqa.name}: {past.get_any_name()} is {past.get_element_type()}, query is "
                f"{gqa.element_type}; convert the past to the query's type"
            )
        readers = [target.get_node() for target in gqa.node.output(port).get_target_inputs()]
        if len(readers) != 1 or readers[0].get_type_name() != "Result":
            raise DecompositionError(
                f"{gqa.name}: output {port} (present) goes to {[r.get_friendly_name() for r in readers]}; "
                "one model output is needed to make it a state"
            )
        present = gqa.node.output(port).get_any_name()
        # OpenVINO's passes back to the stateless form find both names in the variable's.
        return cls(past=node, present=readers[0], name=f"{past.get_any_name()}{present}")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Site:
    """One node and its two caches."""

    gqa: GQANode
    key: _CachePort
    value: _CachePort


def _read_sites(model: ov.Model) -> list[_Site]:
    return [_read_site(read_gqa(node)) for node in find_gqa(model)]


def _read_site(gqa: GQANode) -> _Site:
    if not gqa.causal:
        raise DecompositionError(f"{gqa.name}: causal=0; a cache that grows needs causal attention")
    if gqa.attention_bias is not None:
        raise DecompositionError(
            f"{gqa.name}: attention_bias is given; the stateful form has no table of positions to index, "
            "export without it"
        )
    if gqa.rotary is not None and gqa.rotary.position_ids is not None:
        origin = gqa.rotary.position_ids.get_node()
        while origin.get_type_name() in ("Convert", "Reshape", "Squeeze", "Unsqueeze"):
            origin = origin.input_value(0).get_node()
        if origin.get_type_name() != "Parameter" or "position_ids" not in origin.output(0).get_names():
            raise DecompositionError(
                f"{gqa.name}: its rotary position_ids are computed by {origin.get_friendly_name()}; only the "
                "model's own input position_ids is known to hold in a static cache"
            )
    return _Site(
        gqa=gqa,
        key=_CachePort.read(gqa, gqa.past_key, 1),
        value=_CachePort.read(gqa, gqa.past_value, 2),
    )


class _Inputs:
    """The four inputs of the stateful form; `added` are those the model lacked."""

    def __init__(self, model: ov.Model) -> None:
        given = {name: port for port in model.inputs for name in port.get_names()}
        if "beam_idx" in given:
            raise DecompositionError("the model has an input beam_idx: it is stateful already")
        for name in ("input_ids", "attention_mask"):
            if name not in given:
                raise DecompositionError(f"the model has no input {name}; its inputs are {sorted(given)}")
        for name in ("input_ids", "attention_mask", "position_ids"):
            _check_token_input(name, given.get(name))
        self.input_ids: Output = given["input_ids"].get_node().output(0)
        self.attention_mask: Output = given["attention_mask"].get_node().output(0)
        self.added: list[Node] = []
        self.position_ids: Output = (
            given["position_ids"].get_node().output(0)
            if "position_ids" in given
            else self._add("position_ids", [-1, -1], ov.Type.i64)
        )
        self.beam_idx: Output = self._add("beam_idx", [-1], ov.Type.i32)

    def _add(self, name: str, shape: list[int], element_type: ov.Type) -> Output:
        parameter = ops.parameter(shape, element_type)
        # OpenVINO's conversion to PagedAttention finds its inputs by the names of the nodes.
        parameter.set_friendly_name(name)
        parameter.output(0).get_tensor().set_names({name})
        self.added.append(parameter)
        return parameter.output(0)


def _check_token_input(name: str, port: Output | None) -> None:
    if port is None:
        return
    shape, element_type = port.get_partial_shape(), port.get_element_type()
    if shape.rank.is_dynamic or shape.rank.get_length() != 2 or element_type != ov.Type.i64:
        raise DecompositionError(f"input {name} is {element_type} {shape}; int64 of two dimensions is needed")


class _SharedParts:
    """What nodes of one model have in common, built once: the step, masks, rotary rows."""

    def __init__(self, inputs: _Inputs) -> None:
        self.beam_idx = inputs.beam_idx
        self._position_ids = inputs.position_ids
        self._step: StatefulStep = read_step(inputs.input_ids, inputs.attention_mask, inputs.position_ids)
        self.batch: Output = ops.gather(ops.shape_of(inputs.input_ids, "i64"), i64([0]), i64(0)).output(0)
        self._masks: dict[tuple[int, str], Output] = {}
        self._tables: dict[OutputKey, Output] = {}

    def mask(self, gqa: GQANode) -> Output:
        """The additive mask [B, 1, S, K]: one per window."""
        key = (gqa.local_window_size, str(gqa.element_type))
        if key not in self._masks:
            self._masks[key] = additive_mask(self._step, gqa.local_window_size, gqa.element_type)
        return self._masks[key]

    def rotated(self, gqa: GQANode, source: Output) -> Output:
        """The rows with the node's rotary embedding, unchanged where it has none."""
        if gqa.rotary is None:
            return source
        cos, sin = (self._table(table) for table in (gqa.rotary.cos_cache, gqa.rotary.sin_cache))
        return rotate(source, cos, sin, interleaved=gqa.rotary.interleaved)

    def _table(self, table: Output) -> Output:
        key = key_of(table)
        if key not in self._tables:
            self._tables[key] = table_rows(table, self._position_ids)
        return self._tables[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    """A cache as a variable: all rows [B, KV, K, D], and the node that writes them back."""

    variable: Variable
    rows: Output
    write: Node


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lowered:
    """What replaces one node: attention [B, S, H D] and its two states."""

    attention: Output
    states: tuple[_State, _State]


def _lower(site: _Site, shared: _SharedParts) -> _Lowered:
    gqa = site.gqa
    keys = _append(site.key, gqa, shared.rotated(gqa, gqa.key), shared)
    values = _append(site.value, gqa, gqa.value, shared)
    inputs = [
        shared.rotated(gqa, _split_heads(gqa)),
        _broadcast_heads(gqa, keys.rows),
        _broadcast_heads(gqa, values.rows),
        shared.mask(gqa),
        scalar(gqa.scale, gqa.element_type),
    ]
    if gqa.has_sink:
        inputs.append(sink_logits(gqa))
    attention = _FACTORY.create("ScaledDotProductAttention", inputs, {"causal": False})
    attention.set_friendly_name(gqa.name)
    return _Lowered(attention=_merge_heads(gqa, attention.output(0)), states=(keys, values))


def _append(port: _CachePort, gqa: GQANode, new: Output, shared: _SharedParts) -> _State:
    """The stored rows, in the order of beam_idx, with the new ones behind them."""
    info = VariableInfo()
    info.data_shape = ov.PartialShape([-1, gqa.kv_num_heads, -1, gqa.head_size])
    info.data_type = gqa.element_type
    info.variable_id = port.name
    variable = Variable(info)
    sizes = [i64([size]).output(0) for size in (gqa.kv_num_heads, 0, gqa.head_size)]
    empty = ops.broadcast(scalar(0.0, gqa.element_type), concat([shared.batch, *sizes], 0))
    stored = ov.op.read_value(empty, variable)
    past = ops.gather(stored, shared.beam_idx, i64(0)).output(0)
    rows = ops.concat([past, new], 2)
    return _State(variable=variable, rows=rows.output(0), write=ov.op.assign(rows, variable))


def _broadcast_heads(gqa: GQANode, rows: Output) -> Output:
    """[B, KV, K, D] -> [B, H, K, D], each KV head repeated for the G query heads that read it."""
    if gqa.group == 1:
        return rows
    wide = ops.broadcast(
        ops.unsqueeze(rows, i64([2])), i64([1, 1, gqa.group, 1, 1]), broadcast_spec="BIDIRECTIONAL"
    )
    return ops.reshape(wide, i64([0, gqa.num_heads, -1, gqa.head_size]), True).output(0)


def _split_heads(gqa: GQANode) -> Output:
    """The query [B, H, S, D]; one that goes straight from a transpose to the attention is transposed anew.

    Why is told at _merge_heads. Rotary embedding stands between the two where a node has it.
    """
    rows = None if gqa.rotary is not None else before_head_transpose(gqa.query)
    if rows is None:
        return gqa.query
    return ops.reshape(_swap_heads_and_rows(rows), i64([0, 0, -1, gqa.head_size]), True).output(0)


def _merge_heads(gqa: GQANode, attention: Output) -> Output:
    """[B, H, S, D] -> [B, S, H D].

    Transposed in five dimensions: OpenVINO's CPU plugin fuses a transpose in four, of the query or of the
    output, into the attention kernel and, where S == H makes the shapes of query and output equal, lets the
    kernel overwrite the query it is still reading.
    """
    rows = _swap_heads_and_rows(attention)
    return ops.reshape(rows, i64([0, 0, gqa.num_heads * gqa.head_size]), True).output(0)


def _swap_heads_and_rows(source: Output) -> Output:
    """Axes 1 and 2 of four exchanged, in five dimensions: [B, M, N, D] -> [B, N, M, D, 1]."""
    return ops.transpose(ops.unsqueeze(source, i64([4])), i64([0, 2, 1, 3, 4])).output(0)
