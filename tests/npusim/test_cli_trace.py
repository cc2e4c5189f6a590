"""`npusim run --trace` and `npusim replay`."""

import json
from pathlib import Path

from cli_driving import LLAMA, PROMPT, TARGET

from npusim.cli.main import main


def test_a_trace_is_replayed_bit_for_bit(run_json, tmp_path):
    trace = str(tmp_path / "run.jsonl")
    run_json(
        *("run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "20"),
        *("--draft", "lookup", "--num-draft", "3", "--trace", trace, "-c", "NPUSIM_COMMIT=DEFERRED"),
    )
    lines = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    assert lines[0]["config"]["NPUSIM_COMMIT"] == "DEFERRED"
    assert lines[0]["config"]["NPUW_LLM_MAX_GENERATION_TOKEN_LEN"] == "4"
    assert [line["stage"] for line in lines[1:3]] == ["prefill", "generate"]
    result = run_json("replay", trace, TARGET)
    assert result["records"] == result["num_equal"] == len(lines) - 2
    assert result["difference"] is None


def test_the_first_difference_is_named(tmp_path, capsys):
    trace = tmp_path / "run.jsonl"
    assert main(["run", LLAMA, "--prompt-ids", "4,5", "--max-new-tokens", "6", "--trace", str(trace)]) == 0
    assert main(["replay", str(trace), LLAMA]) == 0
    assert "all 6 calls came out the same, bit for bit" in capsys.readouterr().out
    lines = trace.read_text().splitlines()
    lines[4] = lines[4].replace('"logits_sha256": "', '"logits_sha256": "0')
    trace.write_text("\n".join(lines))
    assert main(["replay", str(trace), LLAMA]) == 1
    assert "DIFFERENT after 3 of 6 calls: record 3, logits_sha256" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_refused(tmp_path, error_of, capsys):
    trace = tmp_path / "run.jsonl"
    assert main(["run", LLAMA, "--prompt-ids", "4,5", "--max-new-tokens", "2", "--trace", str(trace)]) == 0
    capsys.readouterr()
    assert "the trace was made with" in error_of("replay", str(trace), TARGET)
    assert "cannot be opened" in error_of("replay", str(trace), "absent.onnx")
    assert "cannot be opened" in error_of("replay", str(tmp_path / "absent.jsonl"), LLAMA)
    trace.write_text(trace.read_text()[:-20])
    assert "line 3" in error_of("replay", str(trace), LLAMA)
    assert "no trace can be written there" in error_of(
        "run", LLAMA, "--prompt-ids", "4,5", "--trace", str(tmp_path / "absent" / "run.jsonl")
    )
