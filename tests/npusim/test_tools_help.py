"""The help texts of the tools: they fit into 80 columns, teach by examples and say how the commands end."""

from __future__ import annotations

import pytest

from npusim.cli.main import main
from npusim.config_options import OPTIONS

EXIT_CODES = {"check": "012", "compare": "012", "plan": "02", "export": "02", "bench": "012"}


def help_of(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", EXIT_CODES)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(command, monkeypatch, capsys)
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    assert f"examples:\n  npusim {command} " in printed
    ending = printed[printed.index("exit code:") :].split("\n\n")[0]
    assert "".join(filter(str.isdigit, ending)) == EXIT_CODES[command]


@pytest.mark.parametrize("command", ["compare", "plan", "bench"])
def test_every_setting_is_explained(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = help_of(command, monkeypatch, capsys).split()
    text = " ".join(words)
    for option in OPTIONS:
        assert f"{option.key} (default {option.default}) {option.meaning}" in text
