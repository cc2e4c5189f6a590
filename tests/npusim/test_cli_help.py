"""`--help` of the commands."""

import pytest

from npusim.cli.main import main
from npusim.config import OPTIONS


@pytest.mark.parametrize("command", ["run", "demo", "check", "replay"])
def test_each_command_teaches(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert "examples:\n" in printed
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("command", ["run", "demo"])
def test_every_setting_is_listed(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    printed = capsys.readouterr().out
    for option in OPTIONS:
        assert f"{option.key}  (default {option.default})" in printed


def test_all_commands_are_listed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    for command in ("demo", "run", "check", "replay"):
        assert f"\n    {command} " in printed
