"""`npusim compare`: what agrees is said to agree, every fault put into the other side is found and named."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import pytest
from llama_like import LlamaLike
from model_files import READABLE
from onnx import numpy_helper
from onnx_variants import write_variant
from slot_distance import lower_by_slot_distance

from npusim import npuw, onnxruntime_backend
from npusim.cli.main import main
from npusim.compare import BackendKind, Comparison, compare
from npusim.export import MODEL_FILE, export

_UNAVAILABLE = npuw.unavailable_reason()
needs_npuw = pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))

# What a model drafts that was trained on English is mostly wrong for models of random weights.
DRAFTED = ("--draft", str(READABLE["swa_draft"]), "--num-draft", "3", "--steps", "5")
PROMPT = ",".join(map(str, [7, 91, 30, 12, 200, 41, 7, 91, 30, 12, 33, 5, 7, 91, 30]))  # > windows of 8
SMALL = LlamaLike(windows=(6, -1), sinks=True, vocab_size=259)

Compared = Callable[..., dict]


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Compared:
    """The JSON of a comparison that ends with `code`."""

    def run(model: Path, *arguments: str, code: int = 0) -> dict:
        assert main(["compare", str(model), "--json", *arguments]) == code
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return run


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(model: Path, *arguments: str, code: int = 0) -> str:
        assert main(["compare", str(model), *arguments]) == code
        return capsys.readouterr().out

    return run


def backends(result: dict) -> dict[str, dict]:
    return {backend["name"]: backend for backend in result["backends"]}


def explanation(backend: dict) -> str:
    found: str = backend["layers"]["explanation"]["verdict"]
    return found.removeprefix("the other side behaves as if ")


class TestAgreement:
    @pytest.mark.parametrize("name", ["gemma3_alternating", "gptoss_attention"])
    def test_all_steps_and_layers_agree(self, compared: Compared, name: str) -> None:
        result = compared(
            READABLE[name], "--against", "ort,openvino", "--layers", "--prompt-ids", PROMPT, *DRAFTED
        )
        assert result["agrees"] is True
        assert [*backends(result)] == ["ort", "openvino"]
        calls = result["calls"]
        assert [call["stage"] for call in calls] == ["prefill"] + 5 * ["generate"]
        rejections = [call["proposed"] - call["accepted"] for call in calls]
        assert sum(rejections) > 0
        for before, call in pairwise(calls[1:]):
            assert call["position"] == before["position"] + 1 + before["accepted"]
        for backend in result["backends"]:
            assert [step["rows"] for step in backend["steps"]] == [len(call["tokens"]) for call in calls]
            assert 0 < backend["worst"] < 1e-5
            assert backend["allowed"] == 1e-4
            layers = backend["layers"]
            assert layers["first_divergence"] is None
            assert layers["explanation"] is None
            assert 0 < max(layer["max_abs_difference"] for layer in layers["layers"]) < 1e-5

    def test_a_drafting_model_and_a_text_prompt(self, compared: Compared) -> None:
        result = compared(
            READABLE["swa_target"],
            *("--against", "ort", "--draft", str(READABLE["swa_draft"]), "--steps", "5"),
            *("--prompt", "Return a list of the items of a "),
        )
        assert result["calls"][0]["tokens"][0] == 257
        assert result["calls"][0]["tokens"][1:] == list(b"Return a list of the items of a ")
        assert sum(call["accepted"] for call in result["calls"]) > 0

    def test_the_printed_table_and_verdict(self, printed: Callable[..., str]) -> None:
        text = printed(READABLE["llama"], "--against", "ort", "--prompt-ids", PROMPT, *DRAFTED, "--layers")
        lines = text.splitlines()
        assert lines[0] == "largest logits difference to the simulator"
        assert lines[1].split() == ["step", "stage", "positions", "tokens", "accepted", "ort"]
        assert lines[2].split()[:5] == ["0", "prefill", "0-14", "15", "-"]
        assert any(line.split()[3:7] == ["4", "0", "of", "3"] for line in lines)
        assert "ort: agrees at 6 of 6 steps (worst" in text
        assert "ort: the attention of all layers agrees" in text

    def test_a_rounded_cache_is_allowed_more(self, compared: Compared) -> None:
        result = compared(
            READABLE["llama"], "--against", "ort", "--steps", "3", "-c", "NPUSIM_KV_PRECISION=F16"
        )
        backend = backends(result)["ort"]
        assert 1e-6 < backend["worst"] < backend["allowed"]
        assert 1e-3 < backend["allowed"] < 4e-3  # 0.003 of the largest logit, which is about 0.7

    def test_a_stateful_model_is_a_candidate(self, compared: Compared, tmp_path: Path) -> None:
        export(READABLE["phi3_window8"], tmp_path / "out", probe_native=False)
        candidate = tmp_path / "out" / MODEL_FILE
        result = compared(
            READABLE["phi3_window8"],
            *("--against", "openvino", "--candidate", str(candidate), "--layers", "--steps", "3"),
        )
        assert backends(result)["openvino"]["worst"] < 1e-5


class TestWhatIsSaidOfTheTest:
    def test_windows_that_the_text_never_leaves(self, compared: Compared) -> None:
        arguments = ("--against", "ort", "--steps", "2")
        short = compared(READABLE["phi3_window8"], *arguments, "--prompt-ids", "9,8,7,6,5,4")
        assert short["unreached_windows"] == [8]  # 8 tokens: the last sees the first
        enough = compared(READABLE["phi3_window8"], *arguments, "--prompt-ids", "9,8,7,6,5,4,3")
        assert enough["unreached_windows"] == []  # 9 tokens: the last is 8 from the first
        chosen = compared(READABLE["swa_draft"], *arguments)
        assert len(chosen["calls"][0]["tokens"]) == 32 + 8

    def test_a_full_cache_ends_it(self, printed: Callable[..., str]) -> None:
        text = printed(
            READABLE["llama"],
            *("--against", "ort", "--steps", "9", "--prompt-ids", "5,6,7,8"),
            *("-c", "NPUW_LLM_MAX_PROMPT_LEN=4", "-c", "NPUW_LLM_MIN_RESPONSE_LEN=4"),
        )
        assert "ort: agrees at 4 of 4 steps" in text
        assert "3 of 9 steps were made: the cache is full" in text

    def test_backends_that_cannot_be_used_are_left_out_with_the_reason(
        self, compared: Compared, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(onnxruntime_backend, "find_spec", lambda _: None)
        monkeypatch.setattr(npuw, "unavailable_reason", lambda: "no plugin today")
        result = compared(READABLE["llama"], "--steps", "2")
        assert [*backends(result)] == ["openvino"]
        assert "pip install onnxruntime" in result["left_out"]["ort"]
        assert result["left_out"]["npuw"] == "cannot be used here: no plugin today"

    def test_likeliest_tokens_that_differ_and_ties(self, compared: Compared, tmp_path: Path) -> None:
        candidate = write_variant(READABLE["phi3_window8"], tmp_path / "x.onnx", local_window_size=-1)
        arguments = ("--candidate", str(candidate), "--against", "ort", "--steps", "4")
        result = compared(READABLE["phi3_window8"], *arguments, code=1)
        flips = [flip for step in backends(result)["ort"]["steps"] for flip in step["argmax"]]
        assert flips
        assert all(flip["simulator"] != flip["backend"] and flip["margin"] > 0 for flip in flips)


class TestFaultsAreNamed:
    @pytest.mark.parametrize("against", ["ort", "openvino"])
    def test_window_dropped(self, compared: Compared, tmp_path: Path, against: str) -> None:
        original = READABLE["phi3_window8"]
        candidate = write_variant(original, tmp_path / "x.onnx", local_window_size=-1, layers=[2, 3])
        arguments = ("--candidate", str(candidate), "--against", against, "--layers", *DRAFTED)
        backend = backends(compared(original, *arguments, "--prompt-ids", PROMPT, code=1))[against]
        assert backend["agrees"] is False
        assert backend["first_divergence"] == 0
        assert backend["layers"]["first_divergence"] == 2
        assert explanation(backend) == "local_window_size (8) were dropped"
        found = backend["layers"]["explanation"]
        position = found["position"]
        assert position >= 8
        assert found["visible"] == f"{position - 7}-{position}"
        assert found["visible_there"] == f"0-{position}"

    def test_sink_dropped(self, printed: Callable[..., str], tmp_path: Path) -> None:
        original = READABLE["gptoss_attention"]
        candidate = write_variant(original, tmp_path / "x.onnx", drop_sink=True, layers=[1, 3])
        text = printed(
            original, "--candidate", str(candidate), "--against", "ort", "--layers", "--steps", "3", code=1
        )
        assert "ort: DIFFERS at 4 of 4 steps, first at step 0 (prefill, positions 0-23)" in text
        assert "ort: layer 1: the other side behaves as if the sink (head_sink) were dropped" in text
        assert "layer 0" not in text

    def test_window_and_sink_dropped(self, compared: Compared, tmp_path: Path) -> None:
        original = READABLE["gptoss_attention"]
        candidate = write_variant(
            original, tmp_path / "x.onnx", drop_sink=True, local_window_size=-1, sliding_window_cache=0
        )
        arguments = ("--candidate", str(candidate), "--against", "ort", "--layers", "--steps", "3")
        backend = backends(compared(original, *arguments, code=1))["ort"]
        assert explanation(backend) == "local_window_size (8) and the sink (head_sink) were both dropped"

    def test_a_fault_too_small_for_the_logits_is_found_in_the_layers(
        self, compared: Compared, tmp_path: Path
    ) -> None:
        candidate = write_variant(READABLE["llama"], tmp_path / "x.onnx", scale=0.26)
        arguments = ("--candidate", str(candidate), "--against", "ort", "--steps", "2")
        arguments += ("--tolerance", "0.01")
        assert compared(READABLE["llama"], *arguments)["agrees"] is True
        found = compared(READABLE["llama"], *arguments, "--layers", code=1)
        backend = backends(found)["ort"]
        assert backend["first_divergence"] is None
        assert backend["layers"]["first_divergence"] == 0

    def test_what_comes_after_attention_is_not_blamed_on_it(
        self, printed: Callable[..., str], tmp_path: Path
    ) -> None:
        original, other = tmp_path / "a.onnx", tmp_path / "b.onnx"
        original.write_bytes(LlamaLike(windows=(6,), seed=1).serialized)
        other.write_bytes(_with_another_head(LlamaLike(windows=(6,), seed=1).serialized))
        text = printed(
            original, "--candidate", str(other), "--against", "ort", "--layers", "--steps", "2", code=1
        )
        assert "the attention of all layers agrees: what differs comes after the last of them" in text


@needs_npuw
class TestNPUW:
    def test_agrees_over_chunks_blocks_and_rejections(self, compared: Compared, tmp_path: Path) -> None:
        original = tmp_path / "a.onnx"
        original.write_bytes(SMALL.serialized)
        result = compared(
            original,
            *("--against", "npuw", "--layers", "--prompt-ids", ",".join(map(str, range(40, 75)))),
            *("-c", "NPUW_LLM_PREFILL_CHUNK_SIZE=16", *DRAFTED),
        )
        backend = backends(result)["npuw"]
        assert 1e-6 < backend["worst"] < backend["allowed"]
        assert backend["steps"][0]["rows"] == 3  # of the last chunk: 35 = 16 + 16 + 3
        assert sum(call["proposed"] - call["accepted"] for call in result["calls"]) > 0
        assert backend["layers"]["first_divergence"] is None

    def test_slot_distance_is_named(self, compared: Compared, tmp_path: Path) -> None:
        """Right while a prompt fills the graph, on the CPU plugin always; wrong in NPUW's static cache."""
        original, candidate = tmp_path / "a.onnx", tmp_path / "slots.xml"
        original.write_bytes(SMALL.serialized)
        ov.save_model(lower_by_slot_distance(original), candidate, compress_to_fp16=False)
        arguments = ("--candidate", str(candidate), "--layers", "--prompt-ids", PROMPT, *DRAFTED)
        found = backends(compared(original, "--against", "npuw,openvino", *arguments, code=1))
        assert found["openvino"]["agrees"] is True
        backend = found["npuw"]
        assert backend["first_divergence"] == 1
        assert backend["layers"]["first_divergence"] == 0
        assert explanation(backend).startswith("slot distance were used as window")
        visible = backend["layers"]["explanation"]
        first_here, first_there = (int(visible[side].split("-")[0]) for side in ("visible", "visible_there"))
        assert first_there > first_here

    def test_a_call_that_npuw_cannot_make_ends_the_comparison_there(
        self, printed: Callable[..., str], tmp_path: Path
    ) -> None:
        original = tmp_path / "a.onnx"
        original.write_bytes(SMALL.serialized)
        text = printed(
            original,
            *("--against", "npuw", "--prompt-ids", ",".join(map(str, range(60, 120)))),
            *("-c", "NPUW_LLM_MAX_PROMPT_LEN=60", "-c", "NPUW_LLM_MIN_RESPONSE_LEN=64"),
            *("-c", "NPUW_LLM_MAX_GENERATION_TOKEN_LEN=4", "--draft", "lookup", "--num-draft", "3"),
            *("--steps", "63"),
            code=1,
        )
        assert "npuw: STOPPED at step" in text
        assert "cache full" in text


def _with_another_head(model: bytes) -> bytes:
    changed = onnx.load_from_string(model)
    for tensor in changed.graph.initializer:
        if tensor.name == "head":
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.roll(values, 1, axis=1), "head"))
    return changed.SerializeToString()


def test_a_report_says_in_words_what_it_came_to() -> None:
    asked = Comparison(
        model=READABLE["llama"],
        prompt=[3, 1, 4, 1, 5],
        num_steps=2,
        kinds=[BackendKind.ORT],
        config={"NPUW_LLM_MAX_PROMPT_LEN": 8},
    )
    assert str(compare(asked)).startswith("ort: agrees at 3 of 3 steps (worst ")
    text = str(compare(replace(asked, max_abs_difference=0)))
    assert text.startswith("ort: DIFFERS at 3 of 3 steps, first at step 0 (prefill, positions 0-4), most at ")
    assert text.endswith("allowed 0.0e+00")
