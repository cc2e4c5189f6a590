"""How the tests run a command: with --json, or to see it refused."""

import json

import pytest

from npusim.cli.main import main


@pytest.fixture
def run_json(capsys):
    """Run a command that must succeed with --json; its object, when it is all of stdout."""

    def call(*arguments: str, code: int = 0) -> dict:
        assert main([*arguments, "--json"]) == code
        captured = capsys.readouterr()
        assert captured.err == ""  # no progress bar where stderr is no terminal
        return json.loads(captured.out)

    return call


@pytest.fixture
def error_of(capsys):
    """Run a command that must be refused; its message."""

    def call(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("npusim: error: ")
        assert "Traceback" not in captured.err
        return captured.err

    return call
