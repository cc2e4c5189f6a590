"""Layers go by the numbers in the names of their caches, in all that is printed of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from llama_like import LlamaLike
from onnx_edits import with_numbers_of_layers
from onnx_variants import write_variant

from npusim.cli.main import main
from npusim.layer_numbers import layer_numbers


@pytest.mark.parametrize(
    ("presents", "numbers"),
    [
        (["present.0.key", "present.1.key"], (0, 1)),
        (["present.7.key", "present.3.key"], (7, 3)),
        (["present_key_12", "present_key_4"], (12, 4)),
        (["present.3.key", "present.3.key.copy"], (0, 1)),  # one number for two layers
        (["present.3.key", "cache"], (0, 1)),
        (["model.1.present.0.key", "model.1.present.1.key"], (0, 1)),  # which of the two?
        ([], ()),
    ],
)
def test_numbers(presents: list[str], numbers: tuple[int, ...]) -> None:
    assert layer_numbers(presents) == numbers


def model_with(numbers: Sequence[int], path: Path) -> Path:
    model = onnx.load_from_string(LlamaLike(windows=(6, -1, 4), vocab_size=259).serialized)
    with_numbers_of_layers(numbers)(model)
    onnx.save(model, path)
    return path


def numbers_printed(capsys: pytest.CaptureFixture[str]) -> dict[int, int]:
    """By number the window of a layer."""
    layers = json.loads(capsys.readouterr().out)["layers"]
    return {layer["number"]: layer["local_window_size"] for layer in layers}


@pytest.mark.parametrize("numbers", [(3, 7, 11), (2, 1, 0)])
def test_tools_name_a_layer_alike(
    numbers: tuple[int, int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_with(numbers, tmp_path / "model.onnx")
    windows = dict(zip(numbers, (6, -1, 4), strict=True))
    for arguments in (["check"], ["plan"], ["export", str(tmp_path / "out"), "--no-probe"]):
        command, *options = arguments
        assert main([command, str(path), *options, "--json"]) == 0
        assert numbers_printed(capsys) == windows


def test_the_first_layer_that_differs_goes_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_with((3, 7, 11), tmp_path / "model.onnx")
    candidate = write_variant(path, tmp_path / "other.onnx", layers=[2], local_window_size=-1)
    options = ["--candidate", str(candidate), "--against", "ort", "--layers", "--steps", "1"]
    assert main(["compare", str(path), *options]) == 1
    printed = capsys.readouterr().out
    assert "ort: layer 11 (layer2.attention) is the first whose attention DIFFERS" in printed
    rows = [line.split()[:2] for line in printed.splitlines()]
    assert all([number, window] in rows for number, window in (("3", "6"), ("7", "-"), ("11", "4")))
