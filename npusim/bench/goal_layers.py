"""Goals of attention alone."""

from dataclasses import replace

from npusim.bench.goal import Goal, GoalRow, GoalSetting, at_least, row_of_ratio
from npusim.bench.layers import LayerCase, LoweredLayers, OrtLayers
from npusim.bench.timing import Candidate, Plan, interleave, ratio_of
from npusim.onnxruntime_backend import unavailable_reason
from transforms import KeyLayout

DEVICE_GOALS = (12.0, 15.0)
ORT_GOAL = 1.5
WINDOWED_GOAL = 20.0
CHAIN_GOAL = 0.9
RING_SLACK = 16


def layer_goals(setting: GoalSetting) -> list[GoalRow]:
    """Execution form against device form and ONNX Runtime, full and windowed."""
    rows: list[GoalRow] = []
    for context, device_goal in zip(setting.sizes.layer_contexts, DEVICE_GOALS, strict=True):
        rows += _full_layer(setting, context, device_goal)
    return [*rows, *_windowed_layer(setting), *_ring_chain(setting)]


def _full_layer(setting: GoalSetting, context: int, device_goal: float) -> list[GoalRow]:
    case = LayerCase(shape=setting.sizes.layer, capacity=context, stored=context - 2)
    name = f"layer {_heads(case)}, S=1, C={context}: "
    fast = LoweredLayers(case, fast=True)
    device = _against(
        name + "device form / execution form",
        at_least(device_goal),
        fast,
        LoweredLayers(case, fast=False),
        setting.sizes.plan,
    )
    return [device, _against_ort(name, at_least(ORT_GOAL), fast, case, setting.sizes.plan)]


def _windowed_layer(setting: GoalSetting) -> list[GoalRow]:
    sizes = setting.sizes
    context = sizes.layer_contexts[-1]
    full = LayerCase(shape=sizes.layer, capacity=context, stored=context - 2).with_window(sizes.window)
    gathered = replace(full, key_layout=KeyLayout.GATHERED)
    ring = replace(full, key_layout=KeyLayout.RING, capacity=sizes.window + RING_SLACK)
    return [
        _against_ort(
            f"layer W={sizes.window}, {case.key_layout.name.lower()}, context {context}: ",
            at_least(WINDOWED_GOAL),
            LoweredLayers(case, fast=True),
            full,
            sizes.plan,
        )
        for case in (gathered, ring)
    ]


def _ring_chain(setting: GoalSetting) -> list[GoalRow]:
    sizes = setting.sizes
    ring = LayerCase(
        shape=replace(sizes.layer, local_window_size=sizes.window),
        capacity=sizes.window + RING_SLACK,
        stored=sizes.layer_contexts[0],
        num_layers=sizes.chain_length,
        key_layout=KeyLayout.RING,
    )
    rolling = replace(ring, shape=replace(ring.shape, sliding_window_cache=True))
    name = f"{ring.num_layers} layers W={sizes.window}, ring C={ring.capacity}: "
    return [_against_ort(name, at_least(CHAIN_GOAL), LoweredLayers(ring, fast=True), rolling, sizes.plan)]


def _against_ort(name: str, goal: Goal, fast: LoweredLayers, case: LayerCase, plan: Plan) -> GoalRow:
    name += "ONNX Runtime / execution form"
    reason = unavailable_reason()
    if reason is not None:
        return GoalRow(name=name, goal=goal, ratio=None, note=reason)
    return _against(name, goal, fast, OrtLayers(case), plan)


def _against(name: str, goal: Goal, fast: Candidate, other: Candidate, plan: Plan) -> GoalRow:
    samples = interleave({"fast": fast, "other": other}, plan)
    return row_of_ratio(name, goal, ratio_of(samples["other"], samples["fast"]))


def _heads(case: LayerCase) -> str:
    shape = case.shape
    return f"{shape.num_heads}/{shape.kv_num_heads} x {shape.head_size}"
