"""The execution form against the device form it is made from: the same numbers, for every form and size."""

from dataclasses import replace

import model_files
import numpy as np
import openvino as ov
import pytest
from execution_cases import Case, make_case, run, sinks, types
from gqa_models import Bias, RotaryTable
from numpy._core import _multiarray_umath as cpu
from numpy.typing import NDArray

from transforms import (
    Branch,
    DecomposeGQA,
    ExecutionForm,
    KeepNewRows,
    KeyLayout,
    RemoveEmptyPast,
    StaticShapes,
    find_gqa,
    tokens_in_attention_mask,
)
from transforms.form_choice import AttentionForm

FORMS = list(AttentionForm)
HEADS = [(4, 2), (6, 2), (8, 1), (3, 3)]
GRID = {
    **{
        f"H{h} KV{kv} S{s} C{c}": make_case((h, kv), s, c)
        for h, kv in HEADS
        for s, c in ((1, 7), (2, 13), (3, 7), (4, 13), (5, 9))
    },
    **{f"sinks H{h} KV{kv} S{s}": sinks(make_case((h, kv), s, 11)) for h, kv in HEADS for s in (1, 3)},
    "S equals H": make_case((6, 2), 6, 13),
    "S equals H, rotary": make_case((4, 2), 4, 13, rotary=RotaryTable(channels=16)),
    "S equals H, rotary, one group": make_case((6, 1), 6, 13, rotary=RotaryTable(channels=16)),
    "S equals H, rotary, no groups": make_case((3, 3), 3, 9, rotary=RotaryTable(channels=16)),
    "sinks, S equals H": sinks(make_case((4, 2), 4, 9)),
    "smooth softmax": make_case((6, 2), 2, 7, smooth_softmax=True),
    "window": make_case((6, 2), 4, 13, local_window_size=5),
    "window of one": make_case((4, 2), 3, 9, local_window_size=1),
    "bidirectional": make_case((6, 2), 3, 7, causal=False),
    "bias for all heads": make_case((6, 2), 3, 7, bias=Bias.SHARED, bias_length=10),
    "bias per head": make_case((6, 2), 3, 7, bias=Bias.PER_HEAD, bias_length=10),
    "bias per head, sinks": sinks(make_case((6, 2), 2, 7, bias=Bias.PER_HEAD, bias_length=9)),
    "ring": replace(
        make_case((6, 2), 3, 7, local_window_size=6), layout=KeyLayout.RING, stored=23, num_tokens=3
    ),
    "rolling": replace(make_case((4, 2), 3, 7, local_window_size=5), layout=KeyLayout.ROLLING, stored=23),
    "gathered": replace(make_case((6, 2), 3, 29, local_window_size=6), layout=KeyLayout.GATHERED),
    "gathered, sinks": sinks(
        replace(make_case((8, 1), 2, 29, local_window_size=6), layout=KeyLayout.GATHERED)
    ),
    "gathered, window of one": replace(
        make_case((6, 2), 3, 29, local_window_size=1), layout=KeyLayout.GATHERED
    ),
    "past beyond the capacity": replace(make_case((6, 2), 2, 7), stored=12),
    "empty past": replace(make_case((6, 2), 3, 7), stored=0),
    "block without past": replace(make_case((6, 2), 5, 0), stored=0),
    "prefill": replace(make_case((6, 2), 11, 0, local_window_size=4), branch=Branch.PREFILL),
    "prefill, sinks": sinks(replace(make_case((4, 2), 7, 0), branch=Branch.PREFILL)),
    "prefill over a past": replace(make_case((8, 1), 5, 9), branch=Branch.PREFILL),
    "one real row of many": replace(make_case((6, 2), 5, 7), num_tokens=1),
}


@pytest.mark.parametrize("case", GRID.values(), ids=GRID.keys())
def test_every_form_computes_what_the_device_form_computes(case: Case) -> None:
    device = case.device_form()
    feeds = case.feeds(device)
    expected = run(device, feeds)
    for form in FORMS:
        model = case.device_form()
        ExecutionForm(lambda _sizes, form=form: form).run_on_model(model)
        for got, want in zip(run(model, feeds), expected, strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5, err_msg=form.name)


@pytest.mark.parametrize("form", FORMS)
def test_scores_that_fit_float32_by_their_scale_alone_are_numbers(form: AttentionForm) -> None:
    """|q k| is 5.8e38, beyond float32; times the scale it is 1.8e38."""
    case = make_case((6, 2), 3, 7)
    device = case.device_form()
    feeds = case.feeds(device)
    for name, values in feeds.items():
        if name.endswith(("query", "key")):
            values[...] = 6e18
        if name.endswith("past_key"):
            values[:, :, ::2] *= -1
    model = case.device_form()
    ExecutionForm(lambda _sizes: form).run_on_model(model)
    (got, *_), (want, *_) = run(model, feeds), run(device, feeds)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_float16_models_agree_within_their_precision(form: AttentionForm) -> None:
    case = sinks(make_case((6, 2), 3, 7, float16=True))
    device = case.device_form()
    feeds = case.feeds(device)
    model = case.device_form()
    ExecutionForm(lambda _sizes: form).run_on_model(model)
    assert all(node.get_output_element_type(0) != ov.Type.f32 for node in model.get_ops())
    np.testing.assert_allclose(run(model, feeds)[0], run(device, feeds)[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_every_attention_is_rewritten_once(form: AttentionForm) -> None:
    model = make_case((6, 2), 3, 7).device_form(layers=2)
    rewrite = ExecutionForm(lambda _sizes: form)
    assert rewrite.run_on_model(model)
    assert rewrite.rewritten == 2
    assert types(model)["ScaledDotProductAttention"] == 0
    assert not rewrite.run_on_model(model)
    assert rewrite.rewritten == 0


def test_a_choice_that_is_no_form_changes_nothing() -> None:
    model = make_case((6, 2), 3, 7).device_form(layers=2)
    before = types(model)
    choices = iter([AttentionForm.SPLIT, "SPLIT"])
    with pytest.raises(TypeError, match="the rule chose 'SPLIT'; an AttentionForm is needed"):
        ExecutionForm(lambda _sizes: next(choices)).run_on_model(model)
    assert types(model) == before


def test_split_neither_repeats_nor_joins_the_cache() -> None:
    model = make_case((6, 2), 3, 7).device_form()
    ExecutionForm(lambda _sizes: AttentionForm.SPLIT).run_on_model(model)
    wide = [node for node in model.get_ops() if len(node.get_output_partial_shape(0)) == 5]
    assert not wide  # the repetition for query heads has five dimensions
    for name in ("past_key", "past_value"):
        readers = [target.get_node() for target in model.input(name).get_target_inputs()]
        assert [reader.get_type_name() for reader in readers] == ["MatMul"]


def test_joined_copies_the_cache_at_the_size_of_kv_heads() -> None:
    model = make_case((6, 2), 3, 7).device_form()
    ExecutionForm(lambda _sizes: AttentionForm.JOINED).run_on_model(model)
    joined = [node for node in model.get_ops() if node.get_type_name() == "Concat" and len(node.shape) == 4]
    assert [list(node.shape) for node in joined] == [[1, 2, 10, 16]] * 2


@pytest.mark.parametrize(
    ("form", "has_sink", "prepared"),
    [
        (AttentionForm.SPLIT, True, [1, 1, 9, 11]),  # with a column for the sink
        (AttentionForm.JOINED, False, [1, 1, 9, 10]),  # repeated for the three heads of a KV head
    ],
)
def test_layers_share_one_mask_in_every_shape(
    form: AttentionForm, has_sink: bool, prepared: list[int]
) -> None:
    case = make_case((6, 2), 3, 7)
    model = (sinks(case) if has_sink else case).device_form(layers=3)
    ExecutionForm(lambda _sizes: form).run_on_model(model)
    assert types(model)["Select"] == 1
    shapes = [str(node.get_output_partial_shape(0)) for node in model.get_ops()]
    assert shapes.count(str(ov.PartialShape(prepared))) == 1


@pytest.mark.skipif(not cpu.__cpu_features__["AVX512F"], reason="the kernel is for CPUs with AVX-512")
def test_joined_attention_is_one_kernel_of_the_cpu_plugin() -> None:
    """The scores times a single scale would be the keys times that, in a pass over all of them."""
    model = make_case((6, 2), 3, 29).device_form(layers=2)
    ExecutionForm(lambda _sizes: AttentionForm.JOINED).run_on_model(model)
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = [
        (node.get_rt_info()["layerType"].astype(str), [list(port.shape) for port in node.outputs()])
        for node in compiled.get_runtime_model().get_ops()
    ]
    assert not {"MatMul", "Softmax"} & {kind for kind, _ in kinds}
    assert ("Subgraph", [[1, 2, 32, 16]]) not in kinds  # a pass over past and block
    assert kinds.count(("Subgraph", [[1, 2, 9, 16]])) == 2  # the attention of each layer


def test_the_rewritten_attention_keeps_its_name() -> None:
    model = make_case((6, 2), 3, 7).device_form()
    (before,) = [n for n in model.get_ops() if n.get_type_name() == "ScaledDotProductAttention"]
    name = before.get_friendly_name()
    ExecutionForm().run_on_model(model)
    (after,) = [n for n in model.get_ops() if n.get_friendly_name() == name]
    assert list(after.get_output_shape(0)) == [1, 6, 3, 16]


# -- whole models --------------------------------------------------------------------------------------


def num_heads(name: str) -> int:
    (node, *_) = find_gqa(ov.Core().read_model(model_files.READABLE[name]))
    return int(node.get_attributes()["num_heads"])


def lowered_model(name: str, branch: Branch, rows: int, past: int) -> ov.Model:
    model = ov.Core().read_model(model_files.READABLE[name])
    StaticShapes(sequence_length=rows, past_length=past).run_on_model(model)
    DecomposeGQA(branch, block_tokens=tokens_in_attention_mask).run_on_model(model)
    KeepNewRows().run_on_model(model)
    RemoveEmptyPast().run_on_model(model)
    return model


@pytest.mark.parametrize("name", model_files.READABLE)
@pytest.mark.parametrize(
    ("branch", "rows", "past"),
    [(Branch.PREFILL, 11, 0), (Branch.GENERATE, 1, 23), (Branch.GENERATE, None, 23)],
)
def test_whole_models_give_the_same_logits_and_rows(
    name: str, branch: Branch, rows: int | None, past: int
) -> None:
    if rows is None:  # S == H, where fusions of the plugin mistake one for the other
        rows = num_heads(name)
    device = lowered_model(name, branch, rows, past)
    rng = np.random.default_rng(rows)
    feeds: dict[str, NDArray[np.generic]] = {}
    for port in device.inputs:
        kind = port.element_type.to_dtype()
        feeds[port.get_any_name()] = (1.2 * rng.normal(size=port.shape)).astype(kind)
    length = past + rows
    stored, real = min(past, 19), max(rows - 2, 1)
    mask = np.zeros((1, length), np.int64)
    mask[:, :stored], mask[:, length - real :] = 1, 1
    feeds["attention_mask"] = mask
    feeds["input_ids"] = rng.integers(0, 256, (1, rows))
    if "position_ids" in feeds:
        feeds["position_ids"] = stored + np.arange(rows)[np.newaxis]
    fast = lowered_model(name, branch, rows, past)
    rewrite = ExecutionForm()
    rewrite.run_on_model(fast)
    assert rewrite.rewritten == types(device)["ScaledDotProductAttention"] > 0
    assert types(fast)["ScaledDotProductAttention"] == 0
    for got, want in zip(run(fast, feeds), run(device, feeds), strict=True):
        # Rows of padding carry numbers that nobody reads; they are compared all the same.
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
