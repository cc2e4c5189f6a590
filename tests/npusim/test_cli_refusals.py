"""Wrong usage and unusable files: one message, exit code 2."""

from pathlib import Path

import pytest
from cli_driving import LLAMA

from npusim import byte_vocabulary
from npusim.cli.main import main
from npusim.cli.parsers import parse_config, sized_config


@pytest.mark.parametrize("command", [["check"], ["run", "--prompt-ids", "1,2"]])
def test_unusable_files(error_of, tmp_path, command):
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(Path(LLAMA).read_bytes()[:5000])
    name, *options = command
    assert "absent.onnx" in error_of(name, str(tmp_path / "absent.onnx"), *options)
    assert "cut.onnx" in error_of(name, str(cut), *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "NPUW_LLM_MAX_PROMPT=5"], "NPUW_LLM_MAX_PROMPT_LEN"),
        (["-c", "NPUSIM_SANITIZE"], "a setting is KEY=VALUE"),
        (["-c", "=3"], "a setting is KEY=VALUE"),
        (["-c", "NPUSIM_SANITIZE=NO", "-c", "NPUSIM_SANITIZE=YES"], "NPUSIM_SANITIZE is given twice"),
        (["-c", "NPUW_LLM_MAX_PROMPT_LEN=2"], "NPUW_LLM_MAX_PROMPT_LEN"),
        (["-c", "NPUSIM_KV_LAYOUT=SPIRAL"], "SPIRAL"),
        (["--eos", "999"], "999"),
        (["--draft", "absent.onnx"], "absent.onnx"),
    ],
)
def test_bad_settings(error_of, options, message):
    assert message in error_of("run", LLAMA, "--prompt-ids", "1,2,3", "--max-new-tokens", "4", *options)


def test_tokens_outside_the_vocabulary(error_of):
    assert "259" in error_of("run", LLAMA, "--prompt-ids", "1,259", "--max-new-tokens", "4")


def test_text_for_another_vocabulary(error_of, monkeypatch):
    monkeypatch.setattr(byte_vocabulary, "VOCAB_SIZE", 300)
    message = error_of("run", LLAMA, "--prompt", "abc", "--max-new-tokens", "4")
    assert "tokenize elsewhere and give --prompt-ids" in message


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["walk"],
        ["run", LLAMA],
        ["run", LLAMA, "--prompt-ids", ""],
        ["run", LLAMA, "--prompt-ids", "1,x"],
        ["run", LLAMA, "--prompt-ids", "1", "--prompt", "a"],
        ["run", LLAMA, "--prompt-ids", "1", "--max-new-tokens", "0"],
        ["run", LLAMA, "--prompt-ids", "1", "--num-draft", "two"],
        ["check"],
    ],
)
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: npusim" in captured.err


def test_sizes_left_open_fit_the_run_and_given_ones_stay():
    sizes = sized_config({}, prompt_len=65, max_new_tokens=7, block_len=3)
    assert sizes == {
        "NPUW_LLM_MAX_PROMPT_LEN": 128,
        "NPUW_LLM_MIN_RESPONSE_LEN": 7,
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 3,
    }
    assert sized_config({}, prompt_len=64, max_new_tokens=1)["NPUW_LLM_MAX_PROMPT_LEN"] == 64
    given = parse_config(["NPUW_LLM_MIN_RESPONSE_LEN=5", "NPUSIM_SANITIZE = YES"])
    sizes = sized_config(given, prompt_len=1, max_new_tokens=7)
    assert (sizes["NPUW_LLM_MIN_RESPONSE_LEN"], sizes["NPUSIM_SANITIZE"]) == ("5", "YES")
