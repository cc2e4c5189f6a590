"""The column of `npusim check` that says what NPUW does with the op itself."""

import io
import json

import pytest
from model_files import READABLE, UNREADABLE
from rich.console import Console

from npusim.cli import check as check_command
from npusim.cli.main import main
from npusim.npuw_probe import NativeProbe, NativeVerdict
from npusim.onnx_attention import AttentionLayer

REFUSED = NativeProbe(verdict=NativeVerdict.REFUSES, reason="it has [no] window")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the layers that were probed; windowed ones are refused, others right."""
    indices: list[int] = []

    def probe(layer: AttentionLayer) -> NativeProbe:
        indices.append(layer.index)
        return REFUSED if layer.local_window_size > 0 else NativeProbe(verdict=NativeVerdict.RIGHT)

    monkeypatch.setattr(check_command, "probe_layer", probe)
    return indices


def test_the_column_and_what_npuw_said(capsys: pytest.CaptureFixture[str], asked: list[int]) -> None:
    assert main(["check", str(READABLE["gptoss_attention"]), "--probe-npuw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "native NPUW" in lines[0]
    column = lines[0].index("native NPUW")
    assert [line[column:].split()[0] for line in lines[1:5]] == ["refuses", "right", "refuses", "right"]
    assert lines[5] == "native NPUW, layers 0, 2: refuses: it has [no] window"
    assert asked == [0, 1, 2, 3]


def test_a_narrow_terminal_gets_every_column(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    monkeypatch.setattr(check_command, "stdout", lambda: console)
    assert main(["check", str(READABLE["gptoss_attention"]), "--probe-npuw"]) == 0
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].split()[-2:] == ["KV", "cache"]
    assert lines[6].split() == ["layer", "native", "NPUW"]  # and none is refused here
    assert [line.split() for line in lines[7:9]] == [["0", "refuses"], ["1", "right"]]
    assert asked == [0, 1, 2, 3]


def test_json(capsys: pytest.CaptureFixture[str], asked: list[int]) -> None:
    assert main(["check", str(READABLE["gptoss_attention"]), "--probe-npuw", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["native_npuw"]["verdict"] for layer in layers[:2]] == ["refuses", "right"]
    assert layers[0]["native_npuw"]["reason"] == "it has [no] window"
    assert asked == [0, 1, 2, 3]


def test_nothing_is_probed_unasked(capsys: pytest.CaptureFixture[str], asked: list[int]) -> None:
    assert main(["check", str(READABLE["gptoss_attention"])]) == 0
    assert "native NPUW" not in capsys.readouterr().out
    assert main(["check", str(READABLE["gptoss_attention"]), "--json"]) == 0
    assert "native_npuw" not in json.loads(capsys.readouterr().out)["layers"][0]
    assert asked == []


def test_layers_that_are_refused_here_are_not_probed(
    capsys: pytest.CaptureFixture[str], asked: list[int]
) -> None:
    assert main(["check", str(UNREADABLE["gemma2_softcap"]), "--probe-npuw", "--json"]) == 1
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["native_npuw"] for layer in layers] == [None] * 4
    assert asked == []
