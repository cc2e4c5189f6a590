"""The execution form against the device form it is made from: the same numbers, for every form and size."""

from collections import Counter
from dataclasses import dataclass, replace

import gqa_models
import model_files
import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from gqa_models import GQA, Bias, RotaryTable, TokenCount
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

SINKS = (0.7, -1.1, 2.3, 0.2, -0.4, 1.6, 0.9, -2.0)
FORMS = list(AttentionForm)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One lowered op and the step it is run at: P stored tokens, n real rows."""

    gqa: GQA
    stored: int
    num_tokens: int
    branch: Branch = Branch.GENERATE
    layout: KeyLayout = KeyLayout.LINEAR

    def device_form(self, layers: int = 1) -> ov.Model:
        """The op lowered by DecomposeGQA, presents cut to the new rows."""
        source = gqa_models.build_layers([self.gqa] * layers, num_tokens=TokenCount())
        model = ov.Core().read_model(source)
        DecomposeGQA(
            self.branch,
            key_layout=self.layout,
            block_tokens=lambda lowered: lowered.input("num_tokens").get_node().output(0),
        ).run_on_model(model)
        KeepNewRows().run_on_model(model)
        return model

    def feeds(self, model: ov.Model) -> dict[str, NDArray[np.generic]]:
        """Random rows for every input, the step's lengths, rotary positions far from 0, 1, 2."""
        rng = np.random.default_rng(self.stored + 17 * self.num_tokens)
        total = self.stored + self.num_tokens
        fixed = {
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "num_tokens": np.array(self.num_tokens, np.int32),
        }
        feeds: dict[str, NDArray[np.generic]] = {}
        for port in model.inputs:
            name, kind = port.get_any_name(), port.element_type.to_dtype()
            drawn = (1.3 * rng.normal(size=port.shape)).astype(kind)
            feeds[name] = fixed.get(name, drawn)
        return feeds


# The CPU plugin computes the device form wrongly where S == H: it fuses the SDPA with the transposition that
# follows and runs both in place over the query. Without its code generator it is right.
RIGHT = {"SNIPPETS_MODE": "DISABLE"}


def run(
    model: ov.Model, feeds: dict[str, NDArray[np.generic]], extra: dict[str, str] | None = None
) -> list[NDArray[np.floating]]:
    """All outputs of a model on one thread, computed in float32."""
    config = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", **(extra or {})}
    compiled = ov.Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    request.infer(feeds)
    return [np.array(request.get_output_tensor(i).data) for i in range(len(compiled.outputs))]


def types(model: ov.Model) -> Counter[str]:
    """How often each op type occurs."""
    return Counter(node.get_type_name() for node in model.get_ops())


def make_case(heads: tuple[int, int], rows: int, past: int, **options: object) -> Case:
    """A case with values that differ from the op's defaults; the block lacks one row where it can."""
    gqa = GQA(
        num_heads=heads[0],
        kv_num_heads=heads[1],
        sequence_length=rows,
        capacity=past,
        scale=0.31,
        **options,
    )
    return Case(gqa=gqa, stored=max(past - 2, 0), num_tokens=max(rows - 1, 1))


def sinks(case: Case) -> Case:
    """The case with a different sink for every head."""
    return replace(case, gqa=replace(case.gqa, head_sink=SINKS[: case.gqa.num_heads]))


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
    expected = run(device, feeds, RIGHT)
    for form in FORMS:
        model = case.device_form()
        ExecutionForm(lambda _sizes, form=form: form).run_on_model(model)
        for got, want in zip(run(model, feeds), expected, strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5, err_msg=form.name)


@pytest.mark.parametrize("form", FORMS)
def test_float16_models_agree_within_their_precision(form: AttentionForm) -> None:
    case = sinks(make_case((6, 2), 3, 7, float16=True))
    device = case.device_form()
    feeds = case.feeds(device)
    model = case.device_form()
    ExecutionForm(lambda _sizes: form).run_on_model(model)
    assert all(node.get_output_element_type(0) != ov.Type.f32 for node in model.get_ops())
    np.testing.assert_allclose(run(model, feeds)[0], run(device, feeds, RIGHT)[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_every_attention_is_rewritten_once(form: AttentionForm) -> None:
    model = make_case((6, 2), 3, 7).device_form(layers=2)
    rewrite = ExecutionForm(lambda _sizes: form)
    assert rewrite.run_on_model(model)
    assert rewrite.rewritten == 2
    if form is AttentionForm.FUSED:  # still an SDPA, but one over the rows of KV heads
        assert not rewrite.run_on_model(model)
        assert rewrite.rewritten == 0
    second = ExecutionForm()
    second.run_on_model(model)
    assert types(model)["ScaledDotProductAttention"] == 0
    assert second.rewritten == (2 if form is AttentionForm.FUSED else 0)


def test_split_neither_repeats_nor_joins_the_cache() -> None:
    model = make_case((6, 2), 3, 7).device_form()
    ExecutionForm(lambda _sizes: AttentionForm.SPLIT).run_on_model(model)
    assert types(model)["Broadcast"] == 0
    for name in ("past_key", "past_value"):
        readers = [target.get_node() for target in model.input(name).get_target_inputs()]
        assert [reader.get_type_name() for reader in readers] == ["MatMul"]


def test_fused_and_joined_copy_the_cache_at_the_size_of_kv_heads() -> None:
    for form in (AttentionForm.JOINED, AttentionForm.FUSED):
        model = make_case((6, 2), 3, 7).device_form()
        ExecutionForm(lambda _sizes, form=form: form).run_on_model(model)
        joined = [
            node for node in model.get_ops() if node.get_type_name() == "Concat" and len(node.shape) == 4
        ]
        assert [list(node.shape) for node in joined] == [[1, 2, 10, 16]] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_sink", [False, True])
def test_layers_share_one_mask_in_every_shape(form: AttentionForm, has_sink: bool) -> None:
    def count(layers: int) -> int:
        """Nodes of a model but for what each layer has of its own."""
        case = make_case((6, 2), 3, 7)
        model = (sinks(case) if has_sink else case).device_form(layers=layers)
        ExecutionForm(lambda _sizes: form).run_on_model(model)
        return len([node for node in model.get_ops() if node.get_type_name() != "Constant"])

    one, two, three = count(1), count(2), count(3)
    own = three - two
    assert two - one == own
    model = make_case((6, 2), 3, 7).device_form(layers=3)
    ExecutionForm(lambda _sizes: form).run_on_model(model)
    assert types(model)["Select"] == 1


def test_one_query_head_per_kv_head_has_its_fused_form_already() -> None:
    model = make_case((3, 3), 3, 7).device_form()
    rewrite = ExecutionForm(lambda _sizes: AttentionForm.FUSED)
    assert not rewrite.run_on_model(model)
    assert rewrite.rewritten == 0


def test_the_rewritten_attention_keeps_its_name() -> None:
    model = make_case((6, 2), 3, 7).device_form()
    (before,) = [n for n in model.get_ops() if n.get_type_name() == "ScaledDotProductAttention"]
    name = before.get_friendly_name()
    ExecutionForm().run_on_model(model)
    (after,) = [n for n in model.get_ops() if n.get_friendly_name() == name]
    assert list(after.get_output_shape(0)) == [1, 6, 3, 16]


# -- what is not of the device form --------------------------------------------------------------------


def plain_attention(**options: object) -> ov.Model:
    """An SDPA over 4 heads, S = 3, K = 5, D = 16, of which one detail can be changed."""
    key_shape = options.get("key_shape", [1, 4, 5, 16])
    mask_shape = options.get("mask_shape", [1, 1, 3, 5])
    mask_type = options.get("mask_type", np.float32)
    query = ops.parameter([1, 4, 3, 16], np.float32)
    key, value = (ops.parameter(key_shape, np.float32) for _ in range(2))
    mask = ops.parameter(mask_shape, mask_type)
    inputs = [query, key, value, mask]
    if options.get("scale", True):
        inputs.append(ops.constant(np.float32(0.3)))
    attention = ops.scaled_dot_product_attention(*inputs, causal=options.get("causal", False))
    return ov.Model([attention], [query, key, value, mask], "plain")


def test_an_attention_without_groups_or_past_is_rewritten_too() -> None:
    model = plain_attention()
    assert ExecutionForm().run_on_model(model)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"mask_type": bool},
        {"scale": False},
        {"mask_shape": [3, 5]},
        {"mask_shape": [1, 1, 1, 5]},
        {"key_shape": [-1, 4, 5, 16]},
        {"key_shape": [1, 1, 5, 16]},
    ],
    ids=str,
)
def test_another_attention_is_left_alone(options: dict[str, object]) -> None:
    model = plain_attention(**options)
    rewrite = ExecutionForm()
    assert not rewrite.run_on_model(model)
    assert rewrite.rewritten == 0
    assert types(model)["ScaledDotProductAttention"] == 1


def test_a_broadcast_that_is_no_repetition_of_heads_stays() -> None:
    """[1, 2, 5, 16] repeated behind the heads, h -> h mod 2, is not the order of grouped heads."""
    query = ops.parameter([1, 4, 3, 16], np.float32)
    rows = ops.parameter([1, 2, 5, 16], np.float32)
    mask = ops.parameter([1, 1, 3, 5], np.float32)
    lifted = ops.unsqueeze(rows, ops.constant(np.array([1])))
    repeated = ops.broadcast(lifted, ops.constant(np.array([1, 2, 2, 5, 16])))
    wide = ops.reshape(repeated, ops.constant(np.array([1, 4, 5, 16])), False)
    attention = ops.scaled_dot_product_attention(query, wide, wide, mask, ops.constant(np.float32(0.3)))
    model = ov.Model([attention], [query, rows, mask], "interleaved")
    feeds = {i: np.random.default_rng(i).normal(size=p.shape) for i, p in enumerate(model.inputs)}
    before = run(model, feeds)[0]
    ExecutionForm().run_on_model(model)
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=0, atol=1e-5)


# -- whole models --------------------------------------------------------------------------------------


def num_heads(name: str) -> int:
    (node, *_) = find_gqa(ov.Core().read_model(model_files.READABLE[name]))
    return int(node.get_attributes()["num_heads"])


def lowered_model(name: str, branch: Branch, rows: int, past: int) -> ov.Model:
    model = ov.Core().read_model(model_files.READABLE[name])
    StaticShapes(sequence_length=rows, past_length=past).run_on_model(model)
    DecomposeGQA(branch, block_tokens=tokens_in_attention_mask(rows)).run_on_model(model)
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
    for got, want in zip(run(fast, feeds), run(device, feeds, RIGHT), strict=True):
        # Rows of padding carry numbers that nobody reads; they are compared all the same.
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
