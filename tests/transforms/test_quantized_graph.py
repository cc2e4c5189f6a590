"""The graph of a quantized cache: one attention, decoded ranges, and the passes around the lowering."""

from dataclasses import replace

import numpy as np
import openvino as ov
import pytest
from gqa_models import GQA, Quantized
from openvino.passes import Manager
from quantized_steps import build, random_scales, read, stored_shape, types_of

from transforms import (
    Branch,
    ConvertCache,
    DecomposeGQA,
    DecompositionError,
    KeepNewRows,
    KeyLayout,
    RemoveEmptyPast,
    StaticShapes,
    find_gqa,
    read_gqa,
)
from transforms.cache_quantization import CacheForm, ScaleKind

INT8 = Quantized()
INT8_CHANNELS = Quantized(kind="PER_CHANNEL")
INT4 = Quantized(bits=4)
INT4_CHANNELS = Quantized(bits=4, kind="PER_CHANNEL")
FLOAT8 = Quantized(float8=True)


@pytest.mark.parametrize("form", [INT8, INT4_CHANNELS, FLOAT8], ids=["int8", "int4", "float8"])
def test_one_attention_and_only_new_rows_leave_the_graph(form):
    gqa = GQA(quantized=form, sequence_length=3, capacity=9, local_window_size=4)
    scales = random_scales(gqa, np.random.default_rng(1), largest=2.0)
    model = read(build(gqa, scales))
    decompose, keep = DecomposeGQA(Branch.GENERATE), KeepNewRows()
    manager = Manager()
    manager.register_pass(decompose)
    manager.register_pass(keep)
    manager.run_passes(model)
    assert (decompose.lowered, keep.changed) == (1, 2)
    assert types_of(model).count("ScaledDotProductAttention") == 1
    for name in ("present_key", "present_value"):
        port = model.output(name)
        assert list(port.get_shape()) == list(stored_shape(gqa, 3))
        assert port.get_element_type() == model.input("past_key").get_element_type()
    keep.run_on_model(model)
    assert keep.changed == 0


@pytest.mark.parametrize("layout", list(KeyLayout), ids=lambda layout: layout.value)
def test_the_past_is_decoded_apart_from_the_block(layout):
    gqa = GQA(quantized=INT8, sequence_length=3, capacity=9, local_window_size=4)
    scales = random_scales(gqa, np.random.default_rng(1), largest=2.0)
    model = read(build(gqa, scales))
    DecomposeGQA(Branch.GENERATE, key_layout=layout).run_on_model(model)
    past = 3 if layout is KeyLayout.GATHERED else 9
    assert _joined_rows(model) == [[[1, 2, past, 16], [1, 2, 3, 16]]] * 2


def test_a_float_cache_is_joined_once_for_attention_and_present():
    model = read(build_float(GQA(sequence_length=3, capacity=9)))
    DecomposeGQA(Branch.GENERATE).run_on_model(model)
    assert not {"Round", "Clamp"} & set(types_of(model))
    assert _joined_rows(model) == [[[1, 2, 9, 16], [1, 2, 3, 16]]] * 2


def _joined_rows(model: ov.Model) -> list[list[list[int]]]:
    """Shapes of the float ranges that are joined along the slots."""
    return [
        [list(node.get_input_shape(i)) for i in range(node.get_input_size())]
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Concat"
        and node.get_output_element_type(0) == ov.Type.f32
        and node.get_attributes()["axis"] == 2
    ]


def build_float(gqa: GQA) -> bytes:
    """A node with a float cache."""
    return build(replace(gqa, quantized=None))


@pytest.mark.parametrize(("form", "width"), [(INT8, 16), (INT4, 8)], ids=["int8", "int4"])
def test_shapes_follow_from_the_head_size_also_where_codes_share_bytes(form, width):
    gqa = GQA(quantized=form, symbolic_head_size=True, sequence_length=2)
    scales = random_scales(gqa, np.random.default_rng(1), largest=2.0)
    model = read(build(gqa, scales))
    StaticShapes(sequence_length=2, past_length=7).run_on_model(model)
    assert list(model.input("past_key").get_shape()) == [1, 2, 7, width]
    DecomposeGQA(Branch.GENERATE).run_on_model(model)
    assert list(model.output("present_value").get_shape()) == [1, 2, 9, width]


@pytest.mark.parametrize("form", [INT8_CHANNELS, INT4], ids=["int8", "int4"])
def test_an_empty_past_is_removed(form):
    gqa = GQA(quantized=form, sequence_length=4, capacity=0)
    model = read(build(gqa, random_scales(gqa, np.random.default_rng(1), largest=2.0)))
    DecomposeGQA(Branch.PREFILL).run_on_model(model)
    removal = RemoveEmptyPast()
    removal.run_on_model(model)
    assert removal.removed == 2
    names = {port.get_any_name() for port in model.inputs}
    assert names == {"query", "key", "value", "seqlens_k", "total_sequence_length"}


def test_what_the_frontend_shows_of_a_node():
    gqa = read_gqa(find_gqa(read(build(GQA(quantized=INT4_CHANNELS, sequence_length=3, capacity=5))))[0])
    assert gqa.quantization is not None
    assert (gqa.quantization.form, gqa.quantization.kind) == (CacheForm.INT4, ScaleKind.PER_CHANNEL)
    assert (gqa.head_size, gqa.cache_channels) == (16, 8)
    assert gqa.past_key.get_element_type() == ov.Type.u8
    assert read_gqa(find_gqa(read(build_float(GQA())))[0]).quantization is None


# ConvertCache.


def test_the_cache_type_of_codes_is_kept_and_no_other_is_taken():
    gqa = GQA(quantized=INT8, sequence_length=3, capacity=5)
    model = read(build(gqa, random_scales(gqa, np.random.default_rng(1), largest=2.0)))
    keep = ConvertCache(ov.Type.i8)
    assert not keep.run_on_model(model)
    before = types_of(model)
    with pytest.raises(DecompositionError, match=r"attention: its cache is quantized \(i8 .* become f16"):
        ConvertCache(ov.Type.f16).run_on_model(model)
    assert types_of(model) == before


def test_cache_types_by_name_leave_the_other_nodes_alone():
    model = read(build_float(GQA(sequence_length=3, capacity=5)))
    assert not ConvertCache({}).run_on_model(model)
    named = ConvertCache({"attention": ov.Type.f16})
    assert named.run_on_model(model)
    assert named.changed == 2
    assert model.input("past_key").get_element_type() == ov.Type.f16
    assert model.output("present_key").get_element_type() == ov.Type.f16


@pytest.mark.parametrize(
    ("cache_type", "message"),
    [
        (ov.Type.i8, "attention: a float cache cannot become i8; allowed: f32, f16, bf16"),
        ({"attention": ov.Type.u8}, "a float cache cannot become u8"),
        ({"nobody": ov.Type.f16}, r"cache_type names \['nobody'\], .* its nodes are \['attention'\]"),
    ],
)
def test_cache_types_that_a_float_cache_cannot_have(cache_type, message):
    model = read(build_float(GQA(sequence_length=3, capacity=5)))
    before = types_of(model)
    with pytest.raises(DecompositionError, match=message):
        ConvertCache(cache_type).run_on_model(model)
    assert types_of(model) == before


def test_a_converted_cache_keeps_its_type():
    model = read(build_float(GQA(sequence_length=3, capacity=5)))
    ConvertCache(ov.Type.f16).run_on_model(model)
    before = types_of(model)
    assert not ConvertCache(ov.Type.f16).run_on_model(model)
    assert not ConvertCache({}).run_on_model(model)
    for other in (ov.Type.bf16, ov.Type.f32):
        with pytest.raises(DecompositionError, match=r"attention: its cache is converted already \(f16\)"):
            ConvertCache(other).run_on_model(model)
    assert types_of(model) == before


@pytest.mark.parametrize("cache_type", ["f16", None, {"attention": "f16"}])
def test_what_is_no_cache_type(cache_type):
    with pytest.raises(TypeError, match=r"cache_type=.*; an openvino.Type, or one for each name, is needed"):
        ConvertCache(cache_type)
