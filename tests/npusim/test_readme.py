"""What README.md says is so: its examples run, its table of settings is that of the configuration."""

import re
import shlex
import shutil
from pathlib import Path

import openvino as ov
import pytest
from model_files import READABLE
from slot_distance import lower_by_slot_distance

import npusim
from npusim import npuw
from npusim.cli.config_help import settings_table
from npusim.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def op_types(model: ov.Model) -> list[str]:
    return [node.get_type_name() for node in model.get_ordered_ops()]


@pytest.fixture(autouse=True)
def models_of_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ROOT / "npusim" / "models"
    shutil.copy(models / "swa_target.onnx", tmp_path / "model.onnx")
    shutil.copy(models / "swa_draft.onnx", tmp_path / "draft.onnx")
    monkeypatch.chdir(tmp_path)


def run(block: str) -> dict[str, object]:
    """Run an example as it stands; its names afterwards."""
    names: dict[str, object] = {}
    exec(block, names)
    return names


def test_the_comparison_example_runs() -> None:
    report = run(python_blocks()[0])["report"]
    assert len(report.calls) == 13
    assert any(call.proposed > call.accepted for call in report.calls), "some were rejected"


def test_the_library_example_runs() -> None:
    names = run(python_blocks()[1])
    assert names["logits"].shape == (1, 1, 259)
    assert names["request"].num_stored_tokens == 22
    assert isinstance(names["compiled"], npusim.CompiledLLM)


def test_the_speculative_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(python_blocks()[2])
    assert len(names["result"].tokens) == 40
    assert names["result"].tokens_per_target_step > 1.5
    assert len(capsys.readouterr().out.splitlines()) == len(names["result"].steps) + 1


def test_the_pass_example_lowers_every_node() -> None:
    model = run(python_blocks()[3])["model"]
    assert "GroupQueryAttention" not in op_types(model)
    assert op_types(model).count("ScaledDotProductAttention") == 4
    assert model.input("attention_mask").shape == [1, 35]


@pytest.mark.skipif(npuw.unavailable_reason() is not None, reason=str(npuw.unavailable_reason()))
def test_the_comparison_prints_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(READABLE["phi3_window8"], tmp_path / "model.onnx")
    (tmp_path / "exported").mkdir()
    slots = lower_by_slot_distance(tmp_path / "model.onnx")
    ov.save_model(slots, tmp_path / "exported" / "openvino_model.xml", compress_to_fp16=False)
    example = re.search(r"^    npusim (compare .*?)\n\n(.*?)\n\n", README, re.DOTALL | re.MULTILINE)
    assert example is not None
    assert main(shlex.split(example[1].replace("\\\n", ""))) == 1
    printed = [line.split()[:-2] for line in capsys.readouterr().out.splitlines()]
    for line in example[2].splitlines():
        assert line.split()[:-2] in printed  # but for the two differences


def test_the_settings_are_those_of_the_configuration():
    table = README.partition("<!-- settings -->")[2].partition("<!-- /settings -->")[0]
    assert table.strip() == settings_table(), "run tools/readme_settings.py"


def test_the_commands_named_are_there():
    for script in re.findall(r"bash ([\w./]+)", README):
        assert (ROOT / script).is_file(), script
