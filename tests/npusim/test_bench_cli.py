"""`npusim bench`: what it measures, prints, draws and refuses; no time is judged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench_sizes import SHAPE, SIZES

from npusim import ConfigError, onnxruntime_backend
from npusim.bench import goals, plot
from npusim.bench.conversation import Runtime
from npusim.bench.goal import GoalRow, at_least
from npusim.bench.machine import Machine
from npusim.bench.report import ContextResult, RuntimeResult
from npusim.bench.synthetic import build_model, save
from npusim.bench.timing import Samples, ratio_of
from npusim.cli.main import main

TINY_MODEL = "--layers 2 --hidden 16 --heads 2 --kv-heads 1 --head-size 16 --vocab 20 --rounds 2 --tokens 6"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "synthetic.onnx"
    save(build_model(SHAPE), path)
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert main(["bench", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run


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


def test_a_goal_that_cannot_be_measured_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [GoalRow(name=name, goal=at_least(3), ratio=None, note="no such thing") for name in "ab"]
    monkeypatch.setitem(goals.GROUPS, "flat", lambda _: missing)
    assert main(["bench", "--suite", "goals", "--groups", "flat"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        [name, "not", "measured", ">=", "3", "x", "NO"] for name in "ab"
    ]
    assert lines[3] == "not measured: no such thing"
    assert "no such thing" not in lines[4:]


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
    assert [line.split()[:2] for line in lines[1:4]] == [["9", "npusim"], ["9", "device"], ["9", "est."]]
    assert {"npusim", "difference"} & set(lines[2].split()[2:])  # npusim faster, or no difference


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    assert main(f"bench {TINY_MODEL} --context 4,8 --plot {path}".split()) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "est. limit" in printed.out
    assert f"npusim: wrote {path}" in printed.err


def test_a_picture_of_one_context_has_a_bar_for_each_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    bars: dict[str, tuple[float, list[list[float]]]] = {}
    limits: list[float] = []
    draw_bar, draw_limit = axes.Axes.bar, axes.Axes.axhline

    def bar(
        self: object, names: list[str], heights: list[float], *, yerr: list[list[float]], **how: object
    ) -> None:
        bars[names[0]] = heights[0], yerr
        draw_bar(self, names, heights, yerr=yerr, **how)

    def limit(self: object, height: float, **how: object) -> None:
        limits.append(height)
        draw_limit(self, height, **how)

    monkeypatch.setattr(axes.Axes, "bar", bar)
    monkeypatch.setattr(axes.Axes, "axhline", limit)
    samples = {
        Runtime.FAST: Samples(rounds=((0.002,) * 5, (0.003,) * 5)),
        Runtime.ORT: Samples(rounds=((0.005, 0.007, 0.006),)),
    }
    runtimes = tuple(
        RuntimeResult(
            runtime=it, samples=samples[it], ratio=ratio_of(samples[it], samples[it]), host_share=None
        )
        for it in samples
    )
    result = ContextResult(context=8, runtimes=runtimes, bytes_per_step=4_000_000)
    plot.draw(tmp_path / "x.png", [result], Machine(threads=3, load=0.5, bandwidth=1e9), "gemma.onnx")
    assert list(bars) == ["npusim", "ort"]
    assert bars["ort"][0] == pytest.approx(6)
    np.testing.assert_allclose(bars["ort"][1], [[0.8], [0.8]])
    assert limits == pytest.approx([4])


def test_a_picture_says_of_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    titles: list[str] = []
    monkeypatch.setattr(axes.Axes, "set_title", lambda _, title, **__: titles.append(title))
    samples = Samples(rounds=((1.0, 2.0),))
    runtime = RuntimeResult(
        runtime=Runtime.FAST, samples=samples, ratio=ratio_of(samples, samples), host_share=None
    )
    result = ContextResult(context=8, runtimes=(runtime,), bytes_per_step=9)
    machine = Machine(threads=3, load=0.5, bandwidth=1e9)
    plot.draw(tmp_path / "x.png", [result], machine, "gemma.onnx")
    assert titles == ["gemma.onnx: one token at a time, 3 threads"]
    with pytest.raises(ConfigError, match=r"x\.png: cannot be written"):
        plot.draw(tmp_path / "absent" / "x.png", [result], machine, "gemma.onnx")


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        ("sweep.svg", None, "give a name that ends in .png"),
        ("absent/sweep.png", None, "cannot be written (No such file or directory)"),
        ("x" * 300 + ".png", None, "cannot be written (File name too long)"),
        ("folder.png", _directory, "no regular file"),
        ("pipe.png", _pipe, "no regular file"),
    ],
)
def test_a_picture_without_a_place(
    name: str, made: Callable[[Path], None] | None, message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Known before a model is built, and nothing is left behind."""
    pytest.importorskip("matplotlib")
    if made is not None:
        made(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    assert message in refused("--hidden", "1000000000", "--plot", str(tmp_path / name))
    assert sorted(tmp_path.iterdir()) == before


def test_a_picture_that_is_there_is_kept_where_nothing_is_measured(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    pytest.importorskip("matplotlib")
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_bytes(b"old")
    for path in (old, new):
        assert "a model of" in refused("--hidden", "1000000000", "--plot", str(path))
    assert old.read_bytes() == b"old"
    assert not new.exists()


def test_matplotlib_is_loaded_for_pictures_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "x.png"]) == 2
    assert "pip install matplotlib, the extra plot" in capsys.readouterr().err


def test_without_onnxruntime(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnxruntime_backend, "unavailable_reason", lambda: "onnxruntime is not installed")
    assert main(["bench", str(model), "--against", "ort"]) == 2
    assert "ort: onnxruntime is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--groups flat", "--groups does nothing without --suite"),
        ("--suite goals --kv-heads 2", "--kv-heads: --suite chooses its own models"),
        ("--suite goals --rounds 3", "--rounds: --suite chooses its own models"),
        ("--suite goals -c NPUSIM_KV_SLACK=1", "-c: --suite chooses its own models"),
        ("model.onnx --suite goals", "MODEL: --suite chooses its own models"),
        ("model.onnx --layers 2", "--layers: MODEL has a shape already"),
        ("-c NPUW_LLM_MAX_PROMPT_LEN=9", "-c NPUW_LLM_MAX_PROMPT_LEN: --context and --tokens give"),
        ("model.onnx --ffn 2", "--ffn: MODEL has a shape already"),
    ],
)
def test_options_of_which_nothing_would_come(
    arguments: str, message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*arguments.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "--against cuda",
        "--against ort,ort",
        "--groups warp",
        "--context 8,x",
        "--context 0",
        "--context 8,8",
    ],
)
def test_wrong_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments.split()])
    assert "error: argument" in capsys.readouterr().err
