"""What README.md says is so: its examples run, its table of settings is that of the configuration."""

import re
import shutil
from pathlib import Path

import openvino as ov

import npusim
from npusim.cli.config_help import settings_table
from transforms import StaticShapes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def op_types(model: ov.Model) -> list[str]:
    return [node.get_type_name() for node in model.get_ordered_ops()]


def test_the_library_example_runs(tmp_path, monkeypatch):
    shutil.copy(ROOT / "tests" / "models" / "llama.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    before_generate = python_blocks()[0].replace("npusim.generate", "generated = npusim.generate")
    exec(before_generate.replace("request.trim(3)", "trimmed = request.trim(3)"), names)
    assert names["trimmed"] == 1
    assert names["logits"].shape == (1, 1, 259)
    assert len(names["generated"]) == 20
    assert isinstance(names["compiled"], npusim.CompiledLLM)


def test_the_pass_example_lowers_every_node():
    model = ov.Core().read_model(ROOT / "tests" / "models" / "llama.onnx")
    StaticShapes(sequence_length=2, past_length=7, attention_length=9).run_on_model(model)
    exec(python_blocks()[1], {"model": model})
    assert "GroupQueryAttention" not in op_types(model)
    assert op_types(model).count("ScaledDotProductAttention") == 4


def test_the_settings_are_those_of_the_configuration():
    table = README.partition("<!-- settings -->")[2].partition("<!-- /settings -->")[0]
    assert table.strip() == settings_table(), "run tools/readme_settings.py"


def test_the_commands_named_are_there():
    for script in re.findall(r"bash ([\w./]+)", README):
        assert (ROOT / script).is_file(), script
