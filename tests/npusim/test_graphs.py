"""The static graphs that a model becomes."""

from __future__ import annotations

import openvino as ov
import pytest
from tiny_llm import SIZES, config_of
from tiny_model import TinyModel, build

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
