"""How a command ends where it is not left to end by itself."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_driving import LLAMA, SOFTCAP, TARGET

from npusim.cli import check as check_command
from npusim.cli.main import main
from npusim.cli.output import print_json

FULL = Path("/dev/full")


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check_command, "check_model", interrupted)
    assert main(["check", LLAMA]) == 130
    assert capsys.readouterr().err == "npusim: interrupted\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_error(options):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "npusim", "check", SOFTCAP, *options],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_is_one_message(monkeypatch, capsys, options):
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["check", LLAMA, *options]) == 2
    assert capsys.readouterr().err == "npusim: error: the output: No space left on device\n"


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_help_that_cannot_be_written_is_one_message(monkeypatch, capsys):
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 2
    assert capsys.readouterr().err == "npusim: error: the output: No space left on device\n"


def test_a_closed_output_is_one_message(monkeypatch, capsys):
    """As Python has it under `npusim ... >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["check", LLAMA]) == 2
    assert "the output is closed" in capsys.readouterr().err


def test_closed_messages_are_no_error(monkeypatch, capsys):
    """As Python has it under `npusim ... 2>&-`."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["run", LLAMA, "--prompt-ids", "1", "--max-new-tokens", "1"]) == 0
    assert "finished" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["check", "absent.onnx"]) == 2
    assert capsys.readouterr().out == ""


def test_text_fits_any_encoding(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main(["run", TARGET, "--prompt", "Zähle – ", "--max-new-tokens", "1"]) == 0
    assert b"Z\\xe4hle \\u2013 " in output.getvalue()


def test_json_fits_any_encoding(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii", write_through=True))
    print_json({"text": "Zähle – "})
    assert json.loads(output.getvalue()) == {"text": "Zähle – "}
