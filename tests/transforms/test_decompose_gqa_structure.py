"""What the lowering leaves in the graph: one SDPA a node, ports kept, a count, and nothing to do twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import openvino as ov
import openvino.opset13 as ops
import pytest
from gqa_models import GQA, Bias, RotaryTable, TokenCount
from lowered_op import read_layers
from openvino.passes import Manager

from transforms import Branch, DecomposeGQA, KeyLayout

SINK = (0.5, -1.0, 2.0, 0.25)
STATIC = GQA(sequence_length=3, capacity=5)
MIXED = (
    replace(STATIC, local_window_size=4, rotary=RotaryTable()),
    replace(STATIC, head_sink=SINK, local_window_size=2),
    replace(STATIC, smooth_softmax=True, bias=Bias.SHARED, bias_length=9),
    replace(STATIC, num_heads=3, kv_num_heads=3, rotary=RotaryTable(interleaved=True), position_ids=True),
)


def count(model: ov.Model) -> Counter[str]:
    return Counter(node.get_type_name() for node in model.get_ordered_ops())


def ports(model: ov.Model) -> list[tuple[frozenset[str], str, str]]:
    return [
        (frozenset(port.get_names()), str(port.get_element_type()), str(port.get_partial_shape()))
        for port in [*model.inputs, *model.outputs]
    ]


def lowered(layers: Sequence[GQA], branch: Branch = Branch.GENERATE) -> ov.Model:
    model = read_layers(layers)
    assert DecomposeGQA(branch).run_on_model(model)
    return model


@pytest.mark.parametrize("branch", Branch)
def test_every_node_becomes_one_sdpa(branch: Branch) -> None:
    model = lowered(MIXED, branch)
    assert count(model)["ScaledDotProductAttention"] == len(MIXED)
    assert count(model)["GroupQueryAttention"] == 0


def test_a_sink_is_the_sixth_input_and_otherwise_there_are_five() -> None:
    nodes = {
        node.get_friendly_name(): node
        for node in lowered(MIXED).get_ordered_ops()
        if node.get_type_name() == "ScaledDotProductAttention"
    }
    sizes = {name: node.get_input_size() for name, node in nodes.items()}
    assert sizes == {
        "layers.0.attention": 5,
        "layers.1.attention": 6,
        "layers.2.attention": 6,
        "layers.3.attention": 5,
    }
    for index in (1, 2):
        sink = nodes[f"layers.{index}.attention"].input_value(5)
        assert str(sink.get_partial_shape()) == "[1,4,1,1]"


def test_names_types_and_order_of_the_ports_are_kept() -> None:
    before = read_layers(MIXED, TokenCount())
    names = [set(port.get_names()) for port in [*before.inputs, *before.outputs]]
    inputs = ports(before)[: len(before.inputs)]
    DecomposeGQA(Branch.GENERATE).run_on_model(before)
    assert [set(port.get_names()) for port in [*before.inputs, *before.outputs]] == names
    assert ports(before)[: len(before.inputs)] == inputs


def test_present_outputs_are_past_and_block() -> None:
    model = lowered([STATIC])
    shapes = {port.get_any_name(): str(port.get_partial_shape()) for port in model.outputs}
    assert shapes == {"attention": "[1,3,64]", "present_key": "[1,2,8,16]", "present_value": "[1,2,8,16]"}


def test_a_second_run_lowers_nothing() -> None:
    model = read_layers(MIXED)
    decompose = DecomposeGQA(Branch.GENERATE)
    assert decompose.run_on_model(model) is True
    assert decompose.lowered == len(MIXED)
    before = count(model)
    assert decompose.run_on_model(model) is False
    assert decompose.lowered == 0
    assert count(model) == before


def test_one_pass_object_serves_several_models() -> None:
    decompose = DecomposeGQA(Branch.GENERATE)
    for layers in (MIXED, MIXED[:1]):
        decompose.run_on_model(read_layers(layers))
        assert decompose.lowered == len(layers)


def test_a_manager_runs_it() -> None:
    model, manager = read_layers(MIXED[:2]), Manager()
    manager.register_pass(DecomposeGQA(Branch.PREFILL))
    manager.run_passes(model)
    assert count(model)["ScaledDotProductAttention"] == 2
    assert count(model)["GroupQueryAttention"] == 0


def test_a_model_without_the_op_is_left_alone() -> None:
    value = ops.parameter([2, 3], ov.Type.f32)
    model = ov.Model([ops.relu(value)], [value])
    before = count(model)
    decompose = DecomposeGQA(Branch.GENERATE)
    assert decompose.run_on_model(model) is False
    assert decompose.lowered == 0
    assert count(model) == before


def test_a_lowered_model_survives_being_saved(tmp_path: object) -> None:
    model = lowered(MIXED)
    path = f"{tmp_path}/lowered.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    again = ov.Core().read_model(path)
    assert ports(again) == ports(model)
    assert count(again)["ScaledDotProductAttention"] == len(MIXED)


@pytest.mark.parametrize(
    ("windows", "masks"), [((4, -1, 4, 6), 3), ((-1,) * 5, 1), ((8, -1, 8, -1, 8, -1), 2)]
)
@pytest.mark.parametrize("branch", Branch)
def test_one_mask_for_each_distinct_window(windows: tuple[int, ...], masks: int, branch: Branch) -> None:
    layers = [replace(STATIC, capacity=9, local_window_size=window) for window in windows]
    model = lowered(layers, branch)
    assert count(model)["Select"] == masks
    planes: dict[int, set[str]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            window = windows[int(node.get_friendly_name().split(".")[1])]
            planes.setdefault(window, set()).add(node.input_value(3).get_node().get_name())
    assert {window: len(names) for window, names in planes.items()} == dict.fromkeys(windows, 1)
    assert len(set.union(*planes.values())) == masks


@pytest.mark.parametrize("layout", [KeyLayout.RING, KeyLayout.ROLLING, KeyLayout.GATHERED])
def test_masks_are_shared_in_every_layout(layout: KeyLayout) -> None:
    layers = [replace(STATIC, capacity=9, local_window_size=window) for window in (4, 6, 4, 6, 4)]
    model = read_layers(layers)
    DecomposeGQA(Branch.GENERATE, key_layout=layout).run_on_model(model)
    assert count(model)["Select"] == 2


def test_layers_with_their_own_bias_or_capacity_have_their_own_mask() -> None:
    biased = replace(STATIC, bias=Bias.SHARED, bias_length=9)
    layers = [STATIC, biased, biased, replace(STATIC, capacity=6), STATIC]
    assert count(lowered(layers))["Select"] == 4


def test_masks_of_causal_and_free_layers_are_not_mixed_up() -> None:
    layers = [STATIC, replace(STATIC, causal=False), STATIC]
    assert count(lowered(layers))["Select"] == 2
