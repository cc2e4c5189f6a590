"""How a command ends where it is not left to end by itself."""

import os
import subprocess
import sys

import pytest
from cli_driving import LLAMA, SOFTCAP

from npusim.cli import check as check_command
from npusim.cli.main import main


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
            [sys.executable, "-m", "npusim.cli.main", "check", SOFTCAP, *options],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
