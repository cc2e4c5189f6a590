"""The tools on files that are no model or a refused one: one line that says why, and nothing from below."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import READABLE, UNREADABLE

from npusim.cli.main import main


def _cut(path: Path) -> None:
    path.write_bytes(READABLE["llama"].read_bytes()[:5000])


def _copy(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(UNREADABLE[name].read_bytes())


def _damaged(text: bytes) -> Callable[[Path], object]:
    """One byte of a name is no UTF-8."""

    def make(path: Path) -> None:
        data = bytearray(READABLE["swa_draft"].read_bytes())
        data[data.find(text) + 1] = 0xFF
        path.write_bytes(data)

    return make


# By name of the file how it is made, and what is said of it.
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text.onnx": (lambda path: path.write_text("some text\n"), "no ONNX model"),
    "text": (lambda path: path.write_text("some text\n"), "no ONNX model"),
    "picture.png": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + 50 * b"\0"), "no ONNX model"),
    "cut.onnx": (_cut, "no ONNX model, or a truncated one"),
    "input.onnx": (_damaged(b"input_ids"), "is no UTF-8, the file is damaged"),
    "op.onnx": (_damaged(b"MatMul"), "is no UTF-8, the file is damaged"),
    "cache.onnx": (_damaged(b"present.0.key"), "is no UTF-8, the file is damaged"),
    "empty.onnx": (lambda path: path.touch(), "holds no graph"),
    "folder.onnx": (lambda path: path.mkdir(), "is a directory"),
    "pipe.onnx": (os.mkfifo, "no regular file"),
    "missing.onnx": (lambda _: None, "no such file"),
    "softcap.onnx": (_copy("gemma2_softcap"), "GroupQueryAttention/output_0: softcap=50: only softcap=0 is"),
    "moe.onnx": (_copy("gptoss_moe"), "no rule for com.microsoft.MoE"),
}


def said(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr, whoever wrote it."""
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("npusim: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["plan", "export", "compare", "bench"])
def test_the_tools(command: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, reason = FILES[name]
    path, target = tmp_path / name, tmp_path / "exported"
    make(path)
    message = said([command, str(path), *([str(target)] if command == "export" else [])], capfd)
    assert f"{path}: " in message
    assert reason in message
    assert not target.exists()


@pytest.mark.parametrize(
    ("against", "name"),
    [
        (against, name)
        for against in ("ort", "openvino")
        for name in FILES
        if against != "ort" or name not in ("softcap.onnx", "moe.onnx")  # which ONNX Runtime runs
    ],
)
def test_candidates(against: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, reason = FILES[name]
    make(tmp_path / name)
    options = ["--candidate", str(tmp_path / name), "--against", against, "--steps", "1"]
    message = said(["compare", str(READABLE["llama"]), *options], capfd)
    assert f"{tmp_path / name}: " in message
    assert reason in message
