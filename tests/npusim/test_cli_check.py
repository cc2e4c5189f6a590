"""`npusim check`: the table of layers, and what is refused."""

import openvino as ov
import pytest
from cli_driving import SOFTCAP, TARGET, TESTS
from model_files import READABLE

from npusim.cli.main import main
from transforms import find_gqa, node_label


def test_a_model_that_runs(capsys):
    assert main(["check", TARGET]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["0", "6/2", "x", "16", "32", "half-split,", "1024", "yes", "float32"],
        ["1", "6/2", "x", "16", "-", "half-split,", "1024", "-", "float32"],
        ["2", "6/2", "x", "16", "32", "half-split,", "1024", "yes", "float32"],
        ["3", "6/2", "x", "16", "-", "half-split,", "1024", "-", "float32"],
    ]
    assert lines[5] == "4 attention layers, all run"


def test_a_refused_model(capsys):
    assert main(["check", SOFTCAP]) == 1
    printed = capsys.readouterr().out
    assert printed.count("softcap=50: only softcap=0 is lowered") == 4
    assert "4 attention layers, 4 refused: the model does not run" in printed


def test_json(run_json):
    report = run_json("check", str(TESTS / "models" / "gptoss_attention.onnx"))
    assert report["runs"] is True
    assert report["layers"][2] == {
        "index": 2,
        "number": 2,
        "name": "/model/layers.2/attn/GroupQueryAttention/output_0",
        "node_name": "/model/layers.2/attn/GroupQueryAttention",
        "num_heads": 4,
        "kv_num_heads": 2,
        "head_size": 16,
        "local_window_size": 8,
        "causal": True,
        "sink": "head_sink",
        "rotary": {"form": "half-split", "rotated_channels": 16, "partial": False, "table_length": 512},
        "sliding_window_cache": True,
        "kv_cache_type": "float32",
        "softcap": 0.0,
        "refusals": [],
    }
    refused = run_json("check", SOFTCAP, code=1)
    assert refused["layers"][0]["softcap"] == 50
    assert refused["layers"][3]["refusals"] == ["softcap=50: only softcap=0 is lowered"]


@pytest.mark.parametrize("path", [str(path) for path in READABLE.values()], ids=list(READABLE))
def test_layers_go_by_the_names_that_passes_take(run_json, path):
    names = sorted(node_label(node) for node in find_gqa(ov.Core().read_model(path)))
    for command in ("check", "plan"):
        assert sorted(layer["name"] for layer in run_json(command, path)["layers"]) == names
