"""`npusim run --trace` and `npusim replay`."""

import errno
import json
import os
from pathlib import Path

import onnx
import pytest
from cli_driving import DRAFT, LLAMA, PROMPT, TARGET

from npusim.cli.main import main
from npusim.trace import TraceWriter


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


def traced_run(trace: Path, *options: str) -> None:
    """Two calls of the small model, recorded."""
    arguments = ["run", LLAMA, "--prompt-ids", "4,5", "--max-new-tokens", "2", "--trace", str(trace)]
    assert main([*arguments, *options]) == 0


def test_what_cannot_be_replayed_is_refused(tmp_path, error_of, capsys):
    trace = tmp_path / "run.jsonl"
    traced_run(trace)
    capsys.readouterr()
    assert "the trace was made with" in error_of("replay", str(trace), TARGET)
    assert "absent.onnx" in error_of("replay", str(trace), "absent.onnx")
    assert "cannot be opened" in error_of("replay", str(tmp_path / "absent.jsonl"), LLAMA)
    for other in (str(tmp_path), os.devnull):
        assert "no regular file" in error_of("replay", other, LLAMA)
    trace.write_text(trace.read_text().replace('"steps": 2', '"steps": 3'))
    assert "line 4: the end counts 3 steps, here are 2" in error_of("replay", str(trace), LLAMA)
    trace.write_text(trace.read_text().splitlines()[0] + "\n")
    assert "there is no call in this trace" in error_of("replay", str(trace), LLAMA)


@pytest.mark.parametrize("missing", ["the end", "half a step"])
def test_a_trace_that_was_cut_is_called_incomplete(tmp_path, run_json, capsys, missing):
    trace = tmp_path / "run.jsonl"
    traced_run(trace)
    lines = trace.read_text().splitlines(keepends=True)
    trace.write_text("".join(lines[:-1]) if missing == "the end" else "".join(lines[:2]) + lines[2][:50])
    capsys.readouterr()
    result = run_json("replay", str(trace), LLAMA, code=1)
    records = 2 if missing == "the end" else 1
    assert (result["complete"], result["records"], result["num_equal"]) == (False, records, records)
    assert main(["replay", str(trace), LLAMA]) == 1
    assert "INCOMPLETE: the trace has no end" in capsys.readouterr().out


def test_other_weights_beside_the_same_file_are_refused(tmp_path, error_of, capsys):
    model, trace = tmp_path / "model.onnx", tmp_path / "run.jsonl"
    onnx.save(onnx.load(LLAMA), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    run = ("run", str(model), "--prompt-ids", "4,5", "--max-new-tokens", "2", "--trace", str(trace))
    assert main(run) == 0
    assert main(["replay", str(trace), str(model)]) == 0
    weights = bytearray((tmp_path / "w.bin").read_bytes())
    weights[100] ^= 1
    (tmp_path / "w.bin").write_bytes(weights)
    capsys.readouterr()
    assert f"error: {tmp_path / 'w.bin'} has SHA-256" in error_of("replay", str(trace), str(model))


def test_the_calls_of_a_draft_model_have_a_trace_of_their_own(tmp_path, run_json):
    traces = [str(tmp_path / name) for name in ("target.jsonl", "draft.jsonl")]
    run_json(
        *("run", TARGET, "--prompt", PROMPT, "--max-new-tokens", "9", "--draft", DRAFT),
        *("--trace", traces[0], "--draft-trace", traces[1]),
    )
    results = [run_json("replay", trace, model) for trace, model in zip(traces, (TARGET, DRAFT), strict=True)]
    assert all(result["complete"] for result in results)
    assert results[1]["records"] > results[0]["records"] > 1  # a call of the draft model per token


def test_nothing_but_a_trace_is_overwritten(tmp_path, error_of, capsys):
    model, draft, link = tmp_path / "model.onnx", tmp_path / "draft.onnx", tmp_path / "link"
    model.write_bytes(Path(LLAMA).read_bytes())
    draft.hardlink_to(model)
    link.symlink_to(draft)
    notes = tmp_path / "notes.txt"
    notes.write_text("do not lose\n")
    start = ("run", str(model), "--prompt-ids", "4,5", "--draft", str(draft))
    for trace, reason in [
        (model, "it is the same file as"),
        (draft, "it is the same file as"),
        (link, "it is the same file as"),
        (notes, "it holds something else than a trace"),
        (tmp_path, "it is no regular file"),
        (Path(os.devnull), "it is no regular file"),
        (tmp_path / "absent" / "run.jsonl", "cannot be written to"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        for option in ("--trace", "--draft-trace"):
            assert reason in error_of(*start, option, str(trace))
    new = str(tmp_path / "new.jsonl")
    assert "it is the same file as" in error_of(*start, "--trace", new, "--draft-trace", new)
    assert not Path(new).exists()
    traced_run(old := tmp_path / "old.jsonl")
    (tmp_path / "again.jsonl").hardlink_to(old)
    capsys.readouterr()
    assert "it is the same file as" in error_of(
        *start, "--trace", str(old), "--draft-trace", str(tmp_path / "again.jsonl")
    )
    assert model.read_bytes() == Path(LLAMA).read_bytes()
    assert notes.read_text() == "do not lose\n"


def test_an_empty_file_and_a_trace_are_overwritten(tmp_path):
    trace = tmp_path / "run.jsonl"
    trace.touch()
    traced_run(trace)
    first = trace.read_text()
    traced_run(trace, "--max-new-tokens", "5")
    assert len(trace.read_text()) > len(first)


def test_a_disk_that_fills_up_is_one_message(tmp_path, error_of, monkeypatch):
    def full(writer, record):
        del record
        raise writer._unwritable(OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(TraceWriter, "write", full)
    message = error_of("run", LLAMA, "--prompt-ids", "4,5", "--trace", str(tmp_path / "run.jsonl"))
    assert "run.jsonl: cannot be written (No space left on device)" in message
