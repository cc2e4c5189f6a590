"""Benchmarks at tiny sizes: that they run what they say and report what they measured; no time is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_sizes import SHAPE, SIZES
from ort_runner import OrtModel

import npusim
from npusim import ConfigError, ModelError, NpuSimError, npuw
from npusim.bench.conversation import Conversation, NpusimSteps, NPUWSteps, OrtSteps, Runtime, start
from npusim.bench.goal import GoalRow, GoalSetting, at_least, at_most
from npusim.bench.goal_models import start_goals
from npusim.bench.layers import LayerCase, LoweredLayers, OrtLayers
from npusim.bench.machine import describe_machine
from npusim.bench.ort import OrtSession
from npusim.bench.report import measure_contexts
from npusim.bench.synthetic import AttentionShape, build_model, save
from npusim.bench.timing import Plan, Samples, Verdict, interleave, ratio_of
from npusim.model_file import read_model
from npusim.model_spec import read_spec
from transforms import KeyLayout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "synthetic.onnx"
    save(build_model(SHAPE), path)
    return path


def test_a_synthetic_model_has_the_shape_asked_for(model: Path) -> None:
    spec = read_spec(read_model(model))
    assert len(spec.layers) == 3
    assert {(layer.kv_num_heads, layer.head_size, layer.local_window_size) for layer in spec.layers} == {
        (2, 16, 5)
    }
    assert (spec.vocab_size, spec.num_embeddings, spec.max_positions) == (31, 31, 80)
    assert model.with_name("synthetic.onnx.data").is_file()


def test_npusim_and_onnxruntime_agree_on_it(model: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 31, 20)
    config = {"NPUW_LLM_MAX_PROMPT_LEN": 16, "NPUW_LLM_MIN_RESPONSE_LEN": 5}
    request = npusim.compile_model(model, config).create_infer_request()
    ort = OrtModel(model, max_length=32)
    logits = request.infer({"input_ids": tokens[None, :16]})["logits"][0]
    assert np.abs(logits).max() > 0.5
    np.testing.assert_allclose(logits, ort.feed(tokens[:16].tolist())[0], atol=1e-4)
    for token in tokens[16:].tolist():
        logits = request.infer({"input_ids": np.array([[token]])})["logits"][0]
        np.testing.assert_allclose(logits, ort.feed([token])[0], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "5 query heads, 2 key-value heads"),
        ({"head_size": 7}, "head size 7; rotary needs an even one"),
        ({"local_window_size": 0}, "window 0; give 1 to 2,147,483,647"),
        ({"local_window_size": 2**31}, "window 2147483648; give 1 to 2,147,483,647"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionShape(**{"num_heads": 6, "kv_num_heads": 2, "head_size": 8, **changes})


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 10**9}, {"vocab_size": 10**11}, {"max_positions": 10**11}]
)
def test_a_model_larger_than_the_machine_is_not_begun(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"a model of [\d,.]+ GiB; this machine has room for one of"):
        build_model(replace(SHAPE, **changes))


def test_layers_beyond_counting_are_refused() -> None:
    with pytest.raises(ConfigError, match="1,001 layers; at most 1,000 are made"):
        replace(SHAPE, num_layers=1001)


def test_the_size_of_a_model_is_known_beforehand(model: Path) -> None:
    written = model.with_name("synthetic.onnx.data").stat().st_size
    assert written <= SHAPE.nbytes < model.stat().st_size + written


def test_what_onnxruntime_refuses_is_said() -> None:
    with pytest.raises(ModelError, match="ONNX Runtime cannot load the model"):
        OrtSession(b"no model")
    case = LayerCase(shape=SIZES.layer, capacity=4, stored=2)
    session = OrtSession(case.build().SerializeToString())
    for name, array in case.inputs().items():
        session.bind(name, array[:, :0] if name == "query" else array)
    session.bind_output("attention", (1, 1, SIZES.layer.query_size))
    with pytest.raises(NpuSimError, match="ONNX Runtime failed"):
        session.run()


@pytest.mark.parametrize("layout", [KeyLayout.LINEAR, KeyLayout.GATHERED, KeyLayout.RING])
def test_layers_compute_the_same_everywhere(layout: KeyLayout) -> None:
    full = LayerCase(shape=SIZES.layer, capacity=24, stored=19, num_layers=2, sequence_length=1)
    ort = OrtLayers(full if layout is KeyLayout.LINEAR else full.with_window(4))
    case = full if layout is KeyLayout.LINEAR else full.with_window(4, key_layout=layout)
    layers = [LoweredLayers(case, fast=fast) for fast in (True, False)]
    for each in (*layers, ort):
        each()
    assert np.abs(ort.attention()).max() > 0.1
    if layout is KeyLayout.RING:  # random rows lie in other slots: only the two forms can agree
        np.testing.assert_allclose(layers[0].attention(), layers[1].attention(), atol=1e-5)
        return
    for each in layers:
        np.testing.assert_allclose(each.attention(), ort.attention(), atol=1e-5)


def test_every_runtime_takes_the_same_steps(model: Path) -> None:
    """The logits of a step, also after starting over."""
    conversation = Conversation(path=model, context=9, num_steps=4)
    steps = [start(runtime, conversation) for runtime in (Runtime.FAST, Runtime.DEVICE, Runtime.ORT)]
    for _ in range(11):
        for each in steps:
            each.prepare(1)
            each()
        for each in steps[1:]:
            np.testing.assert_allclose(steps[0].logits(), each.logits(), atol=1e-4)


@pytest.mark.skipif(npuw.unavailable_reason() is not None, reason="this OpenVINO has no NPUW")
def test_npuw_takes_the_same_steps(tmp_path: Path) -> None:
    shape = replace(SHAPE, attention=replace(SHAPE.attention, local_window_size=-1), num_layers=5)
    shape = replace(shape, max_positions=200)
    save(build_model(shape), tmp_path / "model.onnx")
    conversation = Conversation(path=tmp_path / "model.onnx", context=9, num_steps=70)
    theirs, ours = NPUWSteps(conversation), OrtSteps(conversation)
    for _ in range(3):
        for each in (theirs, ours):
            each.prepare(1)
            each()
    np.testing.assert_allclose(theirs.logits(), ours.logits(), atol=2e-2)  # its cache is float16


@pytest.mark.parametrize("layout", ["LINEAR", "ROLLING", "RING"])
def test_a_context_of_random_rows(model: Path, layout: str) -> None:
    conversation = Conversation(path=model, context=30, num_steps=5).with_settings(NPUSIM_KV_LAYOUT=layout)
    steps = NpusimSteps(conversation, prefill=False)
    assert steps.request.num_stored_tokens == 30
    assert all(np.abs(group.past).min(axis=3).max() > 0 for group in steps.request.kv.groups)
    for _ in range(7):
        steps.prepare(2)
        steps()
        steps()
    assert steps.request.num_stored_tokens in (32, 34)
    assert len(steps.host_shares) == 14
    assert all(0 < share < 1 for share in steps.host_shares)


class Counting:
    """A candidate that knows how often it was called."""

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.calls = 0

    def prepare(self, calls: int) -> None:
        self.prepared.append(calls)

    def __call__(self) -> None:
        self.calls += 1


def test_every_candidate_runs_in_every_round() -> None:
    candidates = {"a": Counting(), "b": Counting()}
    done: list[int] = []
    plan = Plan(rounds=4, burst=3, warmup=2)
    samples = interleave(candidates, plan, on_round=lambda: done.append(candidates["b"].calls))
    assert done == [5, 10, 15, 20]
    for name, candidate in candidates.items():
        assert candidate.prepared == [5] * 4
        assert candidate.calls == 20
        assert [len(calls) for calls in samples[name].rounds] == [3] * 4
        assert 0 <= samples[name].best <= samples[name].median


def test_ratios_are_taken_round_by_round() -> None:
    one = Samples(rounds=((2.0, 4.0, 6.0), (30.0, 40.0, 50.0), (6.0, 6.0, 6.0)))
    other = Samples(rounds=((1.0, 2.0, 3.0), (10.0, 10.0, 10.0), (1.0, 2.0, 9.0)))
    ratio = ratio_of(one, other)
    assert ratio.median == 3  # of 2, 4 and 3; the medians of all calls have 2
    assert ratio.spread == pytest.approx((2.2, 3.8))
    assert ratio.of_best == 2
    assert one.median == 6
    assert one.spread == pytest.approx((3.6, 42))


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (0.74, Verdict.SLOWER),
        (0.75, Verdict.NO_DIFFERENCE),
        (1.3, Verdict.NO_DIFFERENCE),
        (1.31, Verdict.FASTER),
    ],
)
def test_small_ratios_are_no_difference(factor: float, verdict: Verdict) -> None:
    one, other = Samples(rounds=((factor,),)), Samples(rounds=((1.0,),))
    assert ratio_of(one, other).verdict is verdict


def test_the_machine() -> None:
    machine = describe_machine(tries=1, buffer_bytes=2**20)
    assert machine.threads >= 1
    assert machine.load >= 0
    assert machine.bandwidth > 1e6


def test_bytes_of_a_step(model: Path) -> None:
    """Weights without tables that are looked up, and every slot; of a gathered layer its window."""
    per_layer = 24 * (6 + 4) * 16 + 96 * 24 + 3 * 24 * 40 + 2 * 24
    weights = 4 * (3 * per_layer + 24 + 24 * 31)
    slots = {"LINEAR": 20 + 6, "GATHERED": 5, "RING": 5}
    for layout, count in slots.items():
        conversation = Conversation(path=model, context=20, num_steps=6)
        (result,) = measure_contexts(
            conversation.with_settings(NPUSIM_KV_LAYOUT=layout), [20], [], Plan(rounds=1, burst=1)
        )
        kv = 3 * count * 2 * 2 * 16 * 4
        assert weights + kv <= result.bytes_per_step < weights + kv + 1500  # scalars and shapes besides


def test_goals_know_their_side() -> None:
    row = GoalRow(name="x", goal=at_least(2), ratio=2.0)
    assert row.reached
    assert not replace(row, ratio=1.99).reached
    assert not replace(row, ratio=None).reached
    assert replace(row, goal=at_most(2.0)).reached
    assert not replace(row, goal=at_most(1.9)).reached


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    sizes = replace(SIZES, large_model=SHAPE)  # rotary tables of 80 positions do not hold the prompt
    with pytest.raises(ModelError, match=r"loads large.onnx failed: .* need 255 positions"):
        start_goals(GoalSetting(sizes=sizes, folder=tmp_path))
