"""What `npusim compare` cannot do ends in one message that says why."""

from collections.abc import Callable
from pathlib import Path

import onnx
import openvino as ov
import pytest
from llama_like import LlamaLike
from model_files import READABLE, UNREADABLE
from slot_distance import lower_by_slot_distance

from npusim import npuw, onnxruntime_backend
from npusim.cli.main import main

_UNAVAILABLE = npuw.unavailable_reason()
needs_npuw = pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(model: Path, *arguments: str) -> str:
        assert main(["compare", str(model), *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run


def test_unusable_backends_that_were_asked_for(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_backend, "find_spec", lambda _: None)
    assert "ort: cannot be used here: the package onnxruntime" in refused(
        READABLE["llama"], "--against", "ort"
    )


def test_files(refused: Callable[..., str], tmp_path: Path) -> None:
    llama = READABLE["llama"]
    missing = refused(llama, "--candidate", "missing.xml")
    assert missing.endswith("error: missing.xml: no such file; give the path of a model\n")
    ir = tmp_path / "model.xml"
    ov.save_model(lower_by_slot_distance(llama), ir)
    assert "is OpenVINO IR; ONNX Runtime takes ONNX files" in refused(
        llama, "--against", "ort", "--candidate", str(ir)
    )
    assert "softcap=50: only softcap=0 is lowered" in refused(UNREADABLE["gemma2_softcap"])
    assert "no GroupQueryAttention" in refused(ir)


def test_prompts(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    path.write_bytes(LlamaLike(windows=(6,)).serialized)
    assert "--prompt: " in refused(path, "--prompt", "text", "--against", "ort")


def test_misspelt_settings_are_not_handed_to_npuw(refused: Callable[..., str]) -> None:
    message = refused(READABLE["llama"], "--against", "npuw", "-c", "NPUW_LLM_MAX_PROMPT=4")
    assert "the nearest known one is NPUW_LLM_MAX_PROMPT_LEN" in message


@pytest.mark.parametrize(
    ("names", "message"),
    [("ort,tpu", "choose from ort, openvino, npuw"), ("ort, ort", "a runtime is named twice")],
)
def test_names_of_backends(names: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(READABLE["llama"]), "--against", names])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-draft", "3"], "--num-draft does nothing without --draft"),
        (["--steps", "600"], "llama.onnx: a prompt of 24 tokens and 601 new ones need 624 positions"),
        (["--steps", "600"], "lower --steps"),
        (["--against", "ort", "-c", "NPUW_DEVICES=NPU"], "-c NPUW_DEVICES is for npuw, which --against"),
    ],
)
def test_options_of_which_nothing_would_come(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(READABLE["llama"], *arguments)


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-0.5"])
def test_tolerances(tolerance: str, refused: Callable[..., str]) -> None:
    message = refused(READABLE["llama"], "--tolerance", tolerance)
    assert f"a tolerance of {tolerance}; give a finite number of at least 0" in message


@pytest.mark.parametrize("vocab_size", [20, 500])
@pytest.mark.parametrize(
    "against", ["ort", "openvino", pytest.param("npuw", marks=needs_npuw)], ids=["ort", "openvino", "npuw"]
)
def test_models_of_another_vocabulary(
    against: str, vocab_size: int, refused: Callable[..., str], tmp_path: Path
) -> None:
    candidate = tmp_path / "other.onnx"
    candidate.write_bytes(LlamaLike(windows=(6,), vocab_size=vocab_size).serialized)
    message = refused(READABLE["llama"], "--candidate", str(candidate), "--against", against)
    assert (
        f"{against}: its logits are of {vocab_size} token ids, those of the simulated model of 259" in message
    )


def test_another_vocabulary_that_only_the_rows_tell(refused: Callable[..., str], tmp_path: Path) -> None:
    model = onnx.load_from_string(LlamaLike(windows=(6,), vocab_size=500).serialized)
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "vocabulary"
    onnx.save(model, tmp_path / "other.onnx")
    arguments = ("--candidate", str(tmp_path / "other.onnx"), "--against", "ort")
    assert "its logits are of 500 token ids" in refused(READABLE["llama"], *arguments)


def test_models_of_other_layers(refused: Callable[..., str], tmp_path: Path) -> None:
    original, other = tmp_path / "a.onnx", tmp_path / "b.onnx"
    original.write_bytes(LlamaLike(windows=(6,)).serialized)
    other.write_bytes(LlamaLike(windows=(6, 6)).serialized)
    arguments = ("--candidate", str(other), "--against", "ort", "--steps", "2", "--layers")
    assert "the two models do not have the same layers" in refused(original, *arguments)
