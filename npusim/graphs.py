"""The static graphs of a model: shapes, cache type, lowering, new rows only."""

import itertools

import openvino as ov
import openvino.opset13 as ops
from openvino.passes import Manager

from npusim.cache_plan import LayerCache
from npusim.errors import ModelError
from npusim.kv_manager import ROWS
from npusim.model_spec import ModelSpec
from npusim.static_graph import attention_tap, new_rows_name
from transforms import (
    Branch,
    ConvertCache,
    DecomposeGQA,
    DecompositionError,
    FloatLogits,
    KeepNewRows,
    RemoveEmptyPast,
    StaticShapes,
    tokens_in_attention_mask,
)


def lower_whole_prefill(model: ov.Model, caches: tuple[LayerCache, ...], rows: int) -> ov.Model:
    """A prompt of up to `rows` tokens, right-aligned, without a past: input_ids and mask [1, rows]."""
    return _lower(
        model,
        [
            ConvertCache(_cache_types(caches)),
            StaticShapes(sequence_length=rows, past_length=0),
            DecomposeGQA(Branch.PREFILL),
            KeepNewRows(),
            RemoveEmptyPast(),
        ],
    )


def lower_block(model: ov.Model, caches: tuple[LayerCache, ...], rows: int, capacity: int) -> ov.Model:
    """A block of up to `rows` tokens over the cache, a chunk or a step: mask [1, capacity + rows]."""
    lengths = {cache.layer.name: cache.layout.capacity for cache in caches}
    layouts = {cache.layer.name: cache.key_layout for cache in caches}
    return _lower(
        model,
        [
            ConvertCache(_cache_types(caches)),
            StaticShapes(sequence_length=rows, past_length=lengths, attention_length=capacity + rows),
            DecomposeGQA(Branch.GENERATE, key_layout=layouts, block_tokens=tokens_in_attention_mask),
            KeepNewRows(),
        ],
    )


def join_new_rows(model: ov.Model, groups: tuple[tuple[LayerCache, ...], ...]) -> None:
    """Replace the present outputs, [1, KV, S, D] each, by one per group of caches, [1, KV, 2 L S, D].

    Key and value of each of the L layers, in turn, behind one another. An output costs a step some 4 us,
    however small. Joined along the rows, as along an axis with no larger one before it the CPU plugin would
    have each row written in its place, for which it reorders every one of them.
    """
    results = model.get_results()
    presents = [
        [results[place] for cache in group for place in cache.layer.present_outputs] for group in groups
    ]
    for index, of_group in enumerate(presents):
        rows = ops.concat([present.input_value(0) for present in of_group], ROWS)
        rows.output(0).get_tensor().set_names({new_rows_name(index)})
        model.add_results([ops.result(rows)])
    for present in itertools.chain.from_iterable(presents):
        model.remove_result(present)


def take_int32(model: ov.Model) -> None:
    """Let token ids, mask and positions be int32, to which the CPU plugin converts int64 at each step."""
    for parameter in model.get_parameters():
        if parameter.get_element_type() == ov.Type.i64:
            targets = parameter.output(0).get_target_inputs()
            parameter.set_element_type(ov.Type.i32)
            parameter.validate_and_infer_types()
            wide = ops.convert(parameter, "i64").output(0)
            for target in targets:
                target.replace_source_output(wide)


def with_attention_taps(lowered: ov.Model, spec: ModelSpec) -> ov.Model:
    """A copy whose further outputs are the attention of each layer before the heads are merged."""
    tapped = lowered.clone()
    attention = {
        node.get_friendly_name(): node.output(0)
        for node in tapped.get_ordered_ops()
        if node.get_type_name() == "ScaledDotProductAttention"
    }
    for layer in spec.layers:
        output = attention[layer.name]
        output.get_tensor().add_names({attention_tap(layer.index)})
        tapped.add_outputs(output)
    return tapped


def _cache_types(caches: tuple[LayerCache, ...]) -> dict[str, ov.Type]:
    return {cache.layer.name: cache.cache_type for cache in caches}


def _lower(model: ov.Model, passes: list[ov.passes.ModelPass]) -> ov.Model:
    lowered = model.clone()
    manager = Manager()
    for step in (*passes, FloatLogits()):
        manager.register_pass(step)
    try:
        manager.run_passes(lowered)
    except DecompositionError as error:
        raise ModelError(str(error)) from error
    return lowered
