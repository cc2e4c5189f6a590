"""The static graphs that a model becomes."""

from __future__ import annotations

import openvino as ov
import pytest
from model_files import READABLE
from tiny_llm import SIZES, config_of
from tiny_model import TinyModel, build

import npusim
from npusim.cache_plan import plan_caches
from npusim.config import LLMConfig
from npusim.config_choices import KVLayout
from npusim.graphs import lower_block, lower_whole_prefill
from npusim.model_spec import read_spec


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("window", [4, 1])
def test_24_layers_of_two_kinds_have_two_masks(layout: KVLayout, window: int) -> None:
    """In the graph of a step and in that of a whole prompt, whatever the layout of the windowed layers."""
    model = ov.Core().read_model(build(TinyModel(windows=(window, -1) * 12)))
    spec = read_spec(model)
    config = LLMConfig.from_mapping(config_of({**SIZES, "layout": layout.value, "commit": "DEFERRED"}))
    caches = plan_caches(spec, config)
    for lowered in (
        lower_block(model, caches, config.max_generation_token_len, config.capacity),
        lower_whole_prefill(model, caches, 20),
    ):
        nodes = [n for n in lowered.get_ordered_ops() if n.get_type_name() == "ScaledDotProductAttention"]
        masks = [node.input_value(3).get_node().get_name() for node in nodes]
        assert len(nodes) == 24
        assert len(set(masks)) == 2
        assert masks == masks[:2] * 12
        assert sum(node.get_type_name() == "Select" for node in lowered.get_ops()) == 2


@pytest.mark.parametrize("rows", [1, 3])
def test_the_new_rows_of_a_group_leave_a_compiled_graph_as_one_output(rows: int) -> None:
    """And in one go: put each in its place, the CPU plugin would reorder every one of them before."""
    sizes = {"NPUW_LLM_MAX_PROMPT_LEN": 24, "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": rows}
    llm = npusim.compile_model(READABLE["gptoss_attention"], {**sizes, "NPUSIM_KV_LAYOUT": "RING"})
    (graph,) = llm.compiled_generates.values()
    assert [port.get_any_name() for port in graph.outputs] == ["logits", "new_rows.0", "new_rows.1"]
    assert all(port.element_type != ov.Type.i64 for port in graph.inputs)
    (rows_of_windowed,) = [port for port in graph.outputs if "new_rows.0" in port.get_names()]
    assert list(rows_of_windowed.shape) == [1, 2, 2 * 2 * rows, 16]
    executed = [
        (node.get_rt_info()["layerType"].astype(str), node.output(0).get_element_type())
        for node in graph.get_runtime_model().get_ops()
        if node.outputs()
    ]
    assert ("Reorder", ov.Type.f32) not in executed
    presents = [port for port in llm.generate_model.outputs if "present" in port.get_any_name()]
    assert len(presents) == 8  # as an NPU compiler is given it
