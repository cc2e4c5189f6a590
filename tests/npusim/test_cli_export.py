"""`npusim export`: what the command prints of what it wrote."""

import io
import json
from pathlib import Path

import pytest
from model_files import READABLE
from rich.console import Console

import npusim.export
from npusim.cli import export as export_command
from npusim.cli.main import main
from npusim.npuw_probe import NativeProbe, NativeVerdict

REASON = "NPUW: an assertion that is too long for one line of a narrow terminal has failed"


def test_the_command_writes_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(READABLE["gptoss_attention"]), str(tmp_path / "out"), "--no-probe"]
    assert main([*arguments, "--json", "--tokenizer", "none"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert sorted(written["files"]) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [layer["local_window_size"] for layer in written["layers"]] == [8, -1, 8, -1]
    assert {layer["native"] for layer in written["layers"]} == {"NOT_PROBED"}
    assert main(arguments) == 2
    assert "holds a file openvino_model.xml already" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    table = capsys.readouterr().out
    assert "a mask of 8 positions" in table
    assert "openvino_tokenizer.xml" in table


@pytest.mark.parametrize("is_terminal", [True, False])
def test_reasons_are_said_once_and_broken_between_words(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = NativeProbe(verdict=NativeVerdict.REFUSES, reason=REASON)
    monkeypatch.setattr(npusim.export, "probe_layer", lambda _: probe)
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(export_command, "stdout", lambda: console)
    assert main(["export", str(READABLE["gptoss_attention"]), str(tmp_path / "out")]) == 0
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    whole = " ".join(line.rstrip() for line in lines)
    assert whole.count(f"natively, layers 0, 1, 2, 3: refuses: {REASON}") == 1
    assert whole.count("lowered, layers 0, 2: one ScaledDotProductAttention, a full cache, a mask of 8") == 1
    assert whole.count("lowered, layers 1, 3: one ScaledDotProductAttention, a full cache, a causal") == 1
    assert "openvino_model.xml, openvino_model.bin, openvino_tokenizer.xml, " in whole
    assert (max(map(len, lines)) <= 80) is is_terminal
    assert [line.split()[:2] for line in lines[1:5]] == [["0", "8"], ["1", "-"], ["2", "8"], ["3", "-"]]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "openvino_tokenizer.xml"])
def test_files_of_others_are_not_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    arguments = ["export", str(READABLE["swa_draft"]), str(tmp_path), "--no-probe"]
    assert main(arguments) == 2
    assert f"holds a file {name} already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == 0
