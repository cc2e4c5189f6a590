"""Benchmarks at tiny sizes: that they run what they say and report what they measured; no time is judged."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ort_runner import OrtModel

import npusim
from npusim import ConfigError, ModelError, npuw, onnxruntime_backend
from npusim.bench import goals
from npusim.bench.conversation import Conversation, NpusimSteps, NPUWSteps, OrtSteps, Runtime, start
from npusim.bench.goal import GoalRow, GoalSetting, GoalSizes, at_least, at_most
from npusim.bench.goal_models import start_goals
from npusim.bench.layers import LayerCase, LoweredLayers, OrtLayers
from npusim.bench.machine import describe_machine
from npusim.bench.report import measure_contexts
from npusim.bench.synthetic import AttentionShape, ModelShape, build_model, save
from npusim.bench.timing import Plan, Samples, Verdict, interleave, ratio_of
from npusim.cli.main import main
from npusim.model_file import read_model
from npusim.model_spec import read_spec
from transforms import KeyLayout

SHAPE = ModelShape(
    attention=AttentionShape(num_heads=6, kv_num_heads=2, head_size=16, local_window_size=5),
    hidden_size=24,
    num_layers=3,
    intermediate_size=40,
    vocab_size=31,
    max_positions=80,
    seed=4,
)
SIZES = GoalSizes(
    layer=AttentionShape(num_heads=6, kv_num_heads=2, head_size=8),
    layer_contexts=(16, 24),
    window=4,
    chain_length=2,
    model=replace(SHAPE, attention=replace(SHAPE.attention, local_window_size=-1)),
    prompt=9,
    num_steps=12,
    flat_contexts=(12, 20, 30),
    large_model=replace(SHAPE, num_layers=2, max_positions=300),
    new_tokens=7,
    plan=Plan(rounds=2, burst=2),
)
TINY_MODEL = "--layers 2 --hidden 16 --heads 2 --kv-heads 1 --head-size 16 --vocab 20 --rounds 2 --tokens 6"


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
        ({"local_window_size": 0}, "window 0; give 1 or more"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionShape(**{"num_heads": 6, "kv_num_heads": 2, "head_size": 8, **changes})


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
    samples = interleave(candidates, Plan(rounds=4, burst=3, warmup=2))
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


def test_the_suite_measures_every_goal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("npusim.cli.bench.FULL_SIZES", SIZES)
    code = main(["bench", "--suite", "goals", "--json"])
    report = json.loads(capsys.readouterr().out)
    rows = report["goals"]
    assert len(rows) == 18
    assert len({row["name"] for row in rows}) == 18
    assert code == (0 if all(row["reached"] for row in rows) else 1)
    for row in rows:
        assert set(row) == {"name", "ratio", "spread", "best", "goal", "reached", "note"}
        assert row["note"] or row["ratio"] > -1
        if "peak memory" in row["name"]:
            assert row["ratio"] > 10  # the plugin alone is larger than this model
        sense, limit, *_ = row["goal"].split()
        if row["ratio"] is not None:
            reached = row["ratio"] >= float(limit) if sense == ">=" else row["ratio"] <= float(limit)
            assert row["reached"] == reached


def test_the_suite_in_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("npusim.cli.bench.FULL_SIZES", SIZES)
    monkeypatch.setitem(goals.GROUPS, "flat", lambda _: [GoalRow(name="one", goal=at_least(3), ratio=3.5)])
    assert main(["bench", "--suite", "goals", "--groups", "flat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["one", "3.5", ">=", "3", "x", "yes"]


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        str(model),
        "--context",
        "8,20",
        "--against",
        "device,ort",
        "--rounds",
        "2",
        "--json",
    ]
    assert main([*arguments, "--tokens", "6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["context"] for each in report["contexts"]] == [8, 20]
    for context in report["contexts"]:
        names = [each["runtime"] for each in context["runtimes"]]
        assert names == ["npusim", "device", "ort"]
        assert context["limit_seconds"] == context["bytes_per_step"] / report["machine"]["bandwidth"]
        ours, device, ort = context["runtimes"]
        assert (ours["ratio"], ours["verdict"]) == (1, "no difference")
        assert 0 < ours["host_share"] < 1
        assert 0 < device["host_share"] < 1
        assert ort["host_share"] is None
        assert ort["tokens_per_second"] == 1 / ort["seconds"]


def test_a_synthetic_model_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"bench {TINY_MODEL} --window 3 --context 9 -c NPUSIM_KV_LAYOUT=RING".split()
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["9", "npusim"], ["9", "device"], ["9", "limit"]]
    assert "npusim" in lines[2].split()[2:]


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    assert main(f"bench {TINY_MODEL} --context 4,8 --plot {path}".split()) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "limit" in capsys.readouterr().out


def test_matplotlib_is_loaded_for_pictures_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "x.png"]) == 2
    assert "pip install 'npusim[plot]'" in capsys.readouterr().err


def test_without_onnxruntime(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnxruntime_backend, "unavailable_reason", lambda: "onnxruntime is not installed")
    assert main(["bench", str(model), "--against", "ort"]) == 2
    assert "ort: onnxruntime is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--against cuda", "--groups warp", "--context 8,x", "--context 0"])
def test_wrong_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments.split()])
    assert "error: argument" in capsys.readouterr().err


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    sizes = replace(SIZES, large_model=SHAPE)  # rotary tables of 80 positions do not hold the prompt
    with pytest.raises(ModelError, match=r"loads large.onnx failed: .* need 255 positions"):
        start_goals(GoalSetting(sizes=sizes, folder=tmp_path))
