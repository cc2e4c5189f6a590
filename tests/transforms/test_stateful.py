"""The stateful form: exact wherever the rows lie, one SDPA per node, nothing lowered that cannot be."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
import stateful_runs as runs
from llama_like import LlamaLike
from model_files import READABLE
from openvino import Node, Output
from openvino._offline_transformations import paged_attention_transformation
from ort_runner import OrtModel

import transforms.stateful as stateful
import transforms.stateful_mask as stateful_mask
from transforms import find_gqa
from transforms.stateful import StatefulGQA

WINDOWS = {
    "llama": [-1, -1, -1, -1],
    "phi3_window8": [8, 8, 8, 8],
    "qwen3": [-1, -1, -1, -1],
    "gemma3_alternating": [8, 8, -1, 8],
    "gptoss_attention": [8, -1, 8, -1],
    "swa_target": [32, -1, 32, -1],
    "swa_draft": [32, -1],
}
# (tokens fed, tokens kept): blocks of 1 to 8, some of them partly or wholly rejected.
SPECULATIVE = [(8, 8), (5, 3), (8, 1), (1, 1), (7, 0), (3, 2), (8, 8), (6, 5), (4, 4), (2, 1), (8, 6), (8, 8)]


def tolerance(expected: np.ndarray) -> float:
    """1e-4 for logits below 1; the trained pair has logits up to 30."""
    return 1e-4 * max(1.0, float(np.abs(expected).max()) / 10)


def tokens_of(count: int) -> list[int]:
    return np.random.default_rng(3).integers(0, 60, count).tolist()


def oracle(tiny: LlamaLike, tmp_path: Path) -> OrtModel:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny.serialized)
    return OrtModel(path)


def of_type(model: ov.Model, kind: str) -> list[Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


@pytest.mark.parametrize("blocks", [[40], [13, 1, 1, 3, 5, 1, 8, 8], [1, 1, 20, 2, 16]], ids=str)
@pytest.mark.parametrize("name", READABLE)
def test_dynamic_cpu_matches_onnx_runtime_block_by_block(name: str, blocks: list[int]) -> None:
    oracle, target = OrtModel(READABLE[name]), runs.cpu_target(runs.lowered(READABLE[name]))
    tokens, at = tokens_of(sum(blocks)), 0
    for block in blocks:
        expected = oracle.feed(tokens[at : at + block])
        ids = np.array([tokens[at : at + block]])
        logits = target.infer({"input_ids": ids, "position_ids": np.arange(at, at + block)[None]})["logits"]
        np.testing.assert_allclose(logits, expected, atol=tolerance(expected), rtol=0)
        at += block


@pytest.mark.parametrize("name", READABLE)
def test_static_frame_matches_onnx_runtime_through_rejections(name: str) -> None:
    frame = runs.StaticFrame(runs.lowered(READABLE[name]), capacity=57, rows=8)
    check_speculative(frame, OrtModel(READABLE[name]))


def check_speculative(frame: runs.StaticFrame, oracle: OrtModel) -> None:
    rng = np.random.default_rng(11)
    for fed, kept in SPECULATIVE:
        block = rng.integers(0, 60, fed).tolist()
        expected = oracle.feed(block)
        oracle.rewind(oracle.num_stored_tokens - fed + kept)
        logits = frame.feed(block, keep=kept)
        np.testing.assert_allclose(logits, expected, atol=tolerance(expected), rtol=0)


@pytest.mark.parametrize(
    "tiny",
    [
        LlamaLike(windows=(3, -1, 5), head_size=32, rotary_half=8),
        LlamaLike(windows=(4,), interleaved=True),
        LlamaLike(windows=(1, 6), head_size=32, rotary_half=8, interleaved=True, packed=False),
        LlamaLike(windows=(4, -1), smooth_softmax=True),
        LlamaLike(windows=(4, -1), sinks=True, smooth_softmax=True, num_heads=6, kv_num_heads=3),
        LlamaLike(windows=(70,), num_heads=3, kv_num_heads=3),
        LlamaLike(windows=(5, -1), num_heads=8),
        LlamaLike(windows=(5, -1), num_heads=8, packed=False),
        LlamaLike(windows=(5, -1), num_heads=8, rotary=False),
        LlamaLike(windows=(5, -1), num_heads=8, rotary=False, packed=False),
    ],
    ids=[
        "partial",
        "interleaved",
        "partial-interleaved",
        "smooth",
        "sink",
        "mha",
        "S==H",
        "S==H-separate",
        "S==H-plain",
        "S==H-plain-separate",
    ],
)
def test_every_form_of_the_op_in_both_frames(tiny: LlamaLike, tmp_path: Path) -> None:
    model = runs.lowered(tiny.serialized)
    check_speculative(runs.StaticFrame(model, capacity=57, rows=8), oracle(tiny, tmp_path))
    reference, target = oracle(tiny, tmp_path), runs.cpu_target(model)
    for block in (8, 1, 8, 3, 12):
        tokens = tokens_of(block)
        expected = reference.feed(tokens)
        logits = target.infer({"input_ids": np.array([tokens])})["logits"]
        np.testing.assert_allclose(logits, expected, atol=tolerance(expected), rtol=0)


def test_beams_attend_to_their_own_history() -> None:
    """Two beams of which both continue the second: both must answer as one sequence of its tokens."""
    model = runs.lowered(LlamaLike(windows=(3, -1)).serialized)
    request = ov.compile_model(model, "CPU", runs.F32).create_infer_request()
    first, second, tail = [5, 9, 2, 40, 7], [8, 8, 31, 3, 20], [11, 12, 13]

    def run(ids: list[list[int]], start: int, beams: list[int]) -> np.ndarray:
        length = len(ids[0])
        positions = np.tile(np.arange(start, start + length), (len(ids), 1))
        inputs = {
            "input_ids": np.array(ids),
            "attention_mask": np.ones((len(ids), start + length), np.int64),
            "position_ids": positions,
            "beam_idx": np.array(beams, np.int32),
        }
        return request.infer(inputs)["logits"]

    run([first, second], 0, [0, 1])
    beams = run([tail, tail], 5, [1, 1])
    request.reset_state()
    alone = run([second + tail], 0, [0])[:, 5:]
    np.testing.assert_allclose(beams, np.concatenate([alone, alone]), atol=1e-5)


def test_left_padded_rows_are_finite_and_change_nothing() -> None:
    frame = runs.StaticFrame(runs.lowered(READABLE["gptoss_attention"]), capacity=20, rows=8)
    oracle = OrtModel(READABLE["gptoss_attention"])
    tokens = tokens_of(3)
    np.testing.assert_allclose(frame.feed(tokens), oracle.feed(tokens), atol=1e-4)
    assert all(np.isfinite(rows).all() for rows in frame._past.values())


@pytest.mark.parametrize("name", READABLE)
def test_one_attention_per_node_and_one_mask_per_window(name: str) -> None:
    model = ov.Core().read_model(READABLE[name])
    nodes = len(find_gqa(model))
    lowering = StatefulGQA()
    assert lowering.run_on_model(model)
    assert lowering.lowered == nodes == len(WINDOWS[name])
    assert not find_gqa(model)
    assert not of_type(model, "VariadicSplit")
    attention = of_type(model, "ScaledDotProductAttention")
    assert len(attention) == nodes
    masks = {node.input_value(3).get_node().get_name() for node in attention}
    assert len(masks) == len(set(WINDOWS[name]))
    has_sink = name == "gptoss_attention"
    assert {node.get_input_size() for node in attention} == {6 if has_sink else 5}
    assert not lowering.run_on_model(model)
    assert lowering.lowered == 0


def test_a_hidden_key_stays_finite_in_every_type_it_may_pass_through() -> None:
    """NPUW hands tensors on in float16; a row that sees nothing must not become NaN there."""
    for mask in masks_of(runs.lowered(READABLE["gemma3_alternating"])):
        hidden = mask.input_value(2).get_node().data
        assert hidden == np.float16(hidden)
        assert np.isfinite(np.float16(hidden) - np.float16(1000))
        assert hidden < -1e4


def masks_of(model: ov.Model) -> list[Node]:
    """The selects that make the masks."""
    masks = [node.input_value(3).get_node() for node in of_type(model, "ScaledDotProductAttention")]
    return [mask if mask.get_type_name() == "Select" else mask.input_value(0).get_node() for mask in masks]


def test_rotary_rows_are_gathered_once_per_table() -> None:
    """gemma3 has two pairs of tables (local and global), read by four layers."""
    model = runs.lowered(READABLE["gemma3_alternating"])
    gathers = [
        node
        for node in of_type(model, "Gather")
        if "cos_cache" in node.input_value(0).get_node().get_friendly_name()
    ]
    assert len(gathers) == 2


def test_ports_are_those_of_a_stateful_language_model() -> None:
    model = runs.lowered(READABLE["llama"])
    ports = {port.get_any_name(): port.get_element_type() for port in model.inputs}
    i64, i32 = ov.Type.i64, ov.Type.i32
    assert ports == {"input_ids": i64, "attention_mask": i64, "position_ids": i64, "beam_idx": i32}
    assert [port.get_any_name() for port in model.outputs] == ["logits"]
    variables = Counter(sink.get_variable_id() for sink in model.get_sinks())
    expected = [
        f"past_key_values.{layer}.{part}present.{layer}.{part}"
        for layer in range(4)
        for part in ("key", "value")
    ]
    assert variables == Counter(expected)


@pytest.mark.parametrize("name", ["phi3_window8", "gemma3_alternating", "gptoss_attention", "swa_target"])
def test_paged_attention_keeps_windows_and_sinks(name: str) -> None:
    """What openvino_genai does to a model on the CPU by default; a mask it does not know is dropped there."""
    model = runs.lowered(READABLE[name])
    paged_attention_transformation(model)
    paged = of_type(model, "PagedAttentionExtension")
    sliding_window, sinks = 10, 20
    assert [window_of(node.input_value(sliding_window)) for node in paged] == [
        max(window, 0) for window in WINDOWS[name]
    ]
    expected = [1, 4, 1, 1] if name == "gptoss_attention" else [0, 0, 0, 0]
    assert all(list(node.input_value(sinks).get_shape()) == expected for node in paged)
    positions = [node for node in model.get_parameters() if "position_ids" in node.output(0).get_names()]
    assert len(positions) == 1
    assert len(positions[0].output(0).get_target_inputs()) > 0


def window_of(source: Output) -> int:
    """The value of a scalar that is computed from constants."""
    node = source.get_node()
    if node.get_type_name() == "Constant":
        return int(node.data)
    assert node.get_type_name() in ("Convert", "Multiply")
    value = 1
    for port in node.input_values():
        value *= window_of(port)
    return value


def test_a_window_by_slots_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: slot distance for the window is right in a whole prompt and wrong in the cache."""
    read_step = stateful_mask.read_step

    def by_slot(input_ids: Output, attention_mask: Output, position_ids: Output) -> object:
        every_slot = ops.broadcast(ops.constant(np.int64(1)), ops.shape_of(attention_mask, "i64")).output(0)
        slots = ops.subtract(ops.cum_sum(every_slot, ops.constant(np.int64(1))), ops.constant(np.int64(1)))
        length = ops.gather(ops.shape_of(input_ids, "i64"), ops.constant([1]), ops.constant(0))
        own = ops.slice(
            slots, ops.negative(length), ops.constant([2**31 - 1]), ops.constant([1]), ops.constant([1])
        )
        step = read_step(input_ids, attention_mask, position_ids)
        return stateful_mask.StatefulStep(
            query_position=ops.unsqueeze(own, ops.constant([1, 3])).output(0),
            key_position=ops.unsqueeze(slots, ops.constant([1, 2])).output(0),
            key_filled=step.key_filled,
            causal=step.causal,
            shape=step.shape,
            num_slots=step.num_slots,
        )

    monkeypatch.setattr(stateful, "read_step", by_slot)
    frame = runs.StaticFrame(runs.lowered(READABLE["phi3_window8"]), capacity=57, rows=16)
    oracle, tokens = OrtModel(READABLE["phi3_window8"]), tokens_of(19)
    assert np.abs(frame.feed(tokens[:16]) - oracle.feed(tokens[:16])).max() < 1e-4
    assert np.abs(frame.feed(tokens[16:]) - oracle.feed(tokens[16:])).max() > 0.1


def test_a_dropped_sink_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ov.Core().read_model(READABLE["gptoss_attention"])
    read_gqa = stateful.read_gqa

    def without_sink(node: Node) -> stateful.GQANode:
        return replace(read_gqa(node), has_sink=False)

    monkeypatch.setattr(stateful, "read_gqa", without_sink)
    StatefulGQA().run_on_model(model)
    target, oracle = runs.cpu_target(model), OrtModel(READABLE["gptoss_attention"])
    logits = target.infer({"input_ids": np.array([tokens_of(6)])})["logits"]
    assert np.abs(logits - oracle.feed(tokens_of(6))).max() > 0.05
