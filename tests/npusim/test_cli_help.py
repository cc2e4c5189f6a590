"""`--help` of the commands."""

from importlib.metadata import version

import pytest

from npusim.cli.config_help import config_keys
from npusim.cli.main import main
from npusim.config import OPTIONS


@pytest.mark.parametrize("command", [[], ["run"], ["demo"], ["replay"]])
def test_help_teaches_within_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    printed = capsys.readouterr().out
    assert "examples:\n" in printed or "start here:\n" in printed
    assert "exit code" in printed
    assert max(map(len, printed.replace(config_keys(), "").splitlines())) <= 80


def test_without_a_command_the_help_is_shown_as_wrong_usage(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "start here:\n" in captured.err


@pytest.mark.parametrize("command", ["run", "demo"])
def test_every_setting_is_listed(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    printed = capsys.readouterr().out
    for option in OPTIONS:
        assert f"{option.key}  (default {option.default})" in printed


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"npusim {version('npusim')}\n"


def test_all_commands_are_listed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    for command in ("demo", "run", "check", "replay"):
        assert f"\n    {command} " in printed
