"""`npusim plan` and the buffers of a request agree to the byte."""

import json
from pathlib import Path

import pytest

import npusim
from npusim.cli.main import main

GEMMA = Path(__file__).parents[1] / "models" / "gemma3_alternating.onnx"


@pytest.mark.parametrize("layout", ["LINEAR", "ROLLING", "RING", "GATHERED"])
@pytest.mark.parametrize("precision", ["F32", "F16"])
def test_the_plan_is_what_a_request_allocates(
    layout: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "NPUW_LLM_MAX_PROMPT_LEN": "37",
        "NPUW_LLM_MIN_RESPONSE_LEN": "12",
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": "3",
        "NPUSIM_KV_SLACK": "5",
        "NPUSIM_KV_PRECISION": precision,
    }
    arguments = [text for key, value in settings.items() for text in ("-c", f"{key}={value}")]
    assert main(["plan", str(GEMMA), "--layout", layout, "--json", *arguments]) == 0
    plan = json.loads(capsys.readouterr().out)
    compiled = npusim.compile_model(GEMMA, {**settings, "NPUSIM_KV_LAYOUT": layout})
    request = compiled.create_infer_request()
    assert plan["total_nbytes"] == request.kv_nbytes == compiled.kv_nbytes
    allocated = [
        group.key(layer).nbytes + group.value(layer).nbytes
        for layer in range(len(compiled.caches))
        for group in request.kv.groups
        if layer in group.layers
    ]
    assert [layer["nbytes"] for layer in plan["layers"]] == allocated
    linear = 4 * 2 * 2 * 48 * 16 * (2 if precision == "F16" else 4)
    assert plan["linear_nbytes"] == linear


@pytest.mark.parametrize(
    ("layout", "commit", "slots"),
    [("ROLLING", "EAGER", 8 + 5), ("RING", "EAGER", 8 + 3 - 1 + 5), ("RING", "DEFERRED", 8 - 1 + 5)],
)
def test_a_windowed_layer_takes_its_bound_and_the_slack_at_any_length(
    layout: str, commit: str, slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in (64, 1_000_000):
        arguments = ["-c", "NPUSIM_KV_SLACK=5", "-c", f"NPUSIM_COMMIT={commit}"]
        arguments += ["-c", "NPUW_LLM_MAX_GENERATION_TOKEN_LEN=3", "--max-length", str(length), "--json"]
        assert main(["plan", str(GEMMA), "--layout", layout, *arguments]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert [layer["slots"] for layer in plan["layers"]] == [slots, slots, length, slots]


@pytest.mark.parametrize(("length", "noted"), [(512, False), (513, True)])
def test_a_length_beyond_the_position_tables_is_noted(
    length: int, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(GEMMA), "--max-length", str(length)]) == 0
    assert ("note: the model's position tables have 512 rows" in capsys.readouterr().out) is noted
    assert main(["plan", str(GEMMA), "--max-length", str(length), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_positions"] == 512


def test_a_window_beyond_the_capacity_stays_linear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(GEMMA), "--max-length", "7", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {layer["layout"] for layer in plan["layers"]} == {"LINEAR"}
    assert plan["total_nbytes"] == plan["linear_nbytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--layout RING -c NPUSIM_KV_LAYOUT=ROLLING",
            "--layout and -c NPUSIM_KV_LAYOUT=ROLLING set the same",
        ),
        (
            "--max-length 9 -c NPUW_LLM_MAX_PROMPT_LEN=9",
            "--max-length and -c NPUW_LLM_MAX_PROMPT_LEN=9 set the same",
        ),
        (
            "--max-length 9 -c NPUW_LLM_MIN_RESPONSE_LEN=2",
            "--max-length and -c NPUW_LLM_MIN_RESPONSE_LEN=2 set the same",
        ),
    ],
)
def test_what_is_set_twice_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(GEMMA), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [([], "RING"), (["--layout", "rolling"], "ROLLING"), (["-c", "NPUSIM_KV_LAYOUT=GATHERED"], "GATHERED")],
)
def test_the_layout_is_that_of_either_place(
    arguments: list[str], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(GEMMA), "--json", *arguments]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["layout"] for layer in layers] == [layout, layout, "LINEAR", layout]
