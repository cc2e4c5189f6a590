"""What npusim export writes: loads, computes the same, and openvino_genai runs it on every backend."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import pytest
import stateful_runs as runs
from model_files import READABLE, UNREADABLE
from onnx_edits import of_float16
from ort_runner import OrtModel

import npusim
from npusim import npuw
from npusim.byte_tokenizer import build_detokenizer, build_tokenizer
from npusim.byte_vocabulary import BEGIN_TOKEN, END_TOKEN, decode, encode
from npusim.errors import ConfigError, ModelError
from npusim.export import NOT_ASKED, Tokenizer, export
from npusim.npuw_probe import NativeVerdict

TEXTS = ["Return a list of the ", "", "naïve 😀", "a"]
PROMPT = "Return a list of the "
NEW_TOKENS = 40


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_and_summary(tmp_path: Path) -> None:
    summary = export(READABLE["gptoss_attention"], tmp_path / "out", tokenizer=Tokenizer.NONE)
    expected = ["config.json", "generation_config.json", "openvino_model.bin", "openvino_model.xml"]
    assert sorted(summary.files) == files_in(summary.folder) == expected
    assert [exported.layer.local_window_size for exported in summary.layers] == [8, -1, 8, -1]
    assert summary.layers[0].lowered == (
        "one ScaledDotProductAttention, a full cache, a mask of 8 positions, the sink as its sixth input, "
        "rotary from position_ids"
    )
    assert "a causal mask" in summary.layers[1].lowered
    asked = NativeVerdict.NOT_PROBED if npuw.unavailable_reason() else None
    verdicts = [exported.native.verdict for exported in summary.layers]
    assert verdicts[::2] == verdicts[:1] * 2
    assert all((verdict is NativeVerdict.NOT_PROBED) == (asked is not None) for verdict in verdicts)
    assert NOT_ASKED not in [exported.native for exported in summary.layers]
    assert "the pipeline takes token ids" in summary.notes[0]
    assert "give max_new_tokens or eos_token_id" in summary.notes[1]
    assert "NPUW_ONLINE_PIPELINE=NONE" in summary.notes[2]
    generation = json.loads((summary.folder / "generation_config.json").read_text())
    assert generation == {"max_length": 512}
    config = json.loads((summary.folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["sliding_window"] == 8
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)


@pytest.mark.parametrize("name", ["gemma3_alternating", "swa_target"])
def test_the_written_model_computes_the_same(name: str, tmp_path: Path) -> None:
    export(READABLE[name], tmp_path, probe_native=False)
    target = runs.cpu_target(ov.Core().read_model(tmp_path / "openvino_model.xml"))
    oracle = OrtModel(READABLE[name])
    for block in (17, 1, 4, 20):
        tokens = np.random.default_rng(block).integers(0, 256, (1, block))
        expected = oracle.feed(tokens)
        logits = target.infer({"input_ids": tokens})["logits"]
        np.testing.assert_allclose(logits, expected, atol=1e-5 * max(10, np.abs(expected).max()), rtol=0)


def test_byte_tokenizer_agrees_with_the_byte_vocabulary() -> None:
    tokenizer = ov.compile_model(build_tokenizer(), "CPU")
    for text in TEXTS:
        outputs = tokenizer([text])
        assert outputs["input_ids"].tolist() == [encode(text)]
        assert outputs["attention_mask"].tolist() == [[1] * len(encode(text))]
    outputs = tokenizer(TEXTS)
    for text, ids, mask in zip(TEXTS, outputs["input_ids"], outputs["attention_mask"], strict=True):
        assert ids[mask == 1].tolist() == encode(text)
        assert (ids[mask == 0] == END_TOKEN).all()


def test_byte_detokenizer_leaves_marks_out() -> None:
    detokenizer = ov.compile_model(build_detokenizer(), "CPU")
    rows = [[BEGIN_TOKEN, *b"ab", END_TOKEN], [*b"x", END_TOKEN, END_TOKEN, END_TOKEN], [END_TOKEN] * 4]
    assert detokenizer(np.array(rows))["string_output"].tolist() == [decode(row) for row in rows]
    assert detokenizer(np.array([encode("naïve 😀")]))["string_output"].tolist() == ["naïve 😀"]


def test_a_tokenizer_folder_comes_along(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for kind in ("xml", "bin"):
            (given / f"{name}.{kind}").write_text(f"{name}.{kind}")
    (given / "generation_config.json").write_text('{"eos_token_id": 7}')
    (given / "unrelated.txt").write_text("x")
    summary = export(READABLE["qwen3"], tmp_path / "out", tokenizer=given, probe_native=False)
    assert (tmp_path / "out" / "openvino_detokenizer.bin").read_text() == "openvino_detokenizer.bin"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert sorted(summary.files) == files_in(tmp_path / "out")
    assert "unrelated.txt" not in summary.files


def test_special_tokens_of_the_model_builder_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    source.write_bytes(READABLE["llama"].read_bytes())
    noted = tmp_path / "genai_config.json"
    noted.write_text(json.dumps({"model": {"bos_token_id": 3, "eos_token_id": [4, 5], "vocab_size": 259}}))
    export(source, tmp_path / "out", tokenizer=Tokenizer.NONE, probe_native=False)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 3, "eos_token_id": [4, 5], "max_length": 512}
    noted.write_text("{")
    with pytest.raises(ModelError, match="not a configuration of onnxruntime-genai"):
        export(source, tmp_path / "second", tokenizer=Tokenizer.NONE, probe_native=False)
    assert not (tmp_path / "second").exists()


def test_what_cannot_be_exported_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="softcap=50: only softcap=0 is lowered"):
        export(UNREADABLE["gemma2_softcap"], out, probe_native=False)
    with pytest.raises(ModelError, match="no such file"):
        export(tmp_path / "missing.onnx", out, probe_native=False)
    with pytest.raises(ConfigError, match=r"no openvino_tokenizer\.xml there"):
        export(READABLE["llama"], out, tokenizer=tmp_path, probe_native=False)
    assert not out.exists()


def test_a_folder_in_use_is_not_overwritten_unasked(tmp_path: Path) -> None:
    export(READABLE["llama"], tmp_path, probe_native=False)
    before = (tmp_path / "openvino_model.bin").stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"holds a file openvino_model\.xml already"):
        export(READABLE["swa_draft"], tmp_path, probe_native=False)
    assert (tmp_path / "openvino_model.bin").stat().st_mtime_ns == before
    export(READABLE["swa_draft"], tmp_path, overwrite=True, probe_native=False)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
    summary = export(
        READABLE["swa_draft"], tmp_path, overwrite=True, tokenizer=Tokenizer.NONE, probe_native=False
    )
    assert "the tokenizer that was in the folder was left there" in summary.notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "a file; give a folder"),
        ("file/below", r"cannot be written \(Not a directory\)"),
        ("x" * 300, r"cannot be written \(File name too long\)"),
        ("taken", r"taken: cannot be written \(.*openvino_model\.xml"),
    ],
)
def test_folders_that_cannot_be_written_to(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "openvino_model.xml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        export(READABLE["llama"], tmp_path / name, overwrite=True, probe_native=False)


def test_a_folder_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no name"):
        export(READABLE["llama"], "", probe_native=False)
    assert files_in(tmp_path) == []


NPU: Mapping[str, str | int] = {
    "NPU_USE_NPUW": "YES",
    "NPUW_DEVICES": "CPU",
    "MAX_PROMPT_LEN": 64,
    "MIN_RESPONSE_LEN": 64,
    "INFERENCE_PRECISION_HINT": "f32",
    "NPUW_ONLINE_PIPELINE": "NONE",
}
F32: Mapping[str, str | int] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trained target and its draft, exported."""
    folder = tmp_path_factory.mktemp("pair")
    export(READABLE["swa_target"], folder / "target", probe_native=False)
    export(READABLE["swa_draft"], folder / "draft", probe_native=False)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def expected() -> str:
    request = npusim.compile_model(
        READABLE["swa_target"], {"NPUW_LLM_MAX_PROMPT_LEN": 64}
    ).create_infer_request()
    tokens = npusim.generate(
        request, encode(PROMPT), max_new_tokens=NEW_TOKENS, eos_token_id=END_TOKEN
    ).tokens
    return decode(tokens)


needs_genai = pytest.mark.skipif(
    find_spec("openvino_genai") is None, reason="openvino_genai is not installed"
)
needs_npuw = pytest.mark.skipif(npuw.unavailable_reason() is not None, reason=str(npuw.unavailable_reason()))


@needs_genai
@pytest.mark.parametrize("backend", ["PA", "SDPA"])
def test_genai_on_the_cpu_gives_the_simulator_s_text(
    backend: str, pair: tuple[Path, Path], expected: str
) -> None:
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(pair[0], "CPU", ATTENTION_BACKEND=backend, **F32)
    assert pipeline.generate(PROMPT, max_new_tokens=NEW_TOKENS, apply_chat_template=False) == expected


@needs_genai
def test_what_was_exported_ends_by_itself(tmp_path: Path) -> None:
    """A model of random weights never says the end token; its positions are the limit."""
    import openvino_genai

    export(READABLE["llama"], tmp_path, probe_native=False)
    pipeline = openvino_genai.LLMPipeline(tmp_path, "CPU", ATTENTION_BACKEND="SDPA", **F32)
    config = pipeline.get_generation_config()
    assert (config.max_length, config.eos_token_id) == (512, END_TOKEN)


@needs_genai
@pytest.mark.parametrize("device", ["CPU", pytest.param("NPU", marks=needs_npuw)])
def test_a_float16_model(device: str, tmp_path: Path) -> None:
    import openvino_genai

    path = tmp_path / "half.onnx"
    model = onnx.load(READABLE["swa_target"])
    of_float16(model)
    onnx.save(model, path)
    export(path, tmp_path / "out", probe_native=False)
    request = npusim.compile_model(path, {"NPUW_LLM_MAX_PROMPT_LEN": 64}).create_infer_request()
    tokens = npusim.generate(request, encode(PROMPT), max_new_tokens=12).tokens
    properties = F32 if device == "CPU" else NPU
    pipeline = openvino_genai.LLMPipeline(tmp_path / "out", device, **properties)
    text = pipeline.generate(PROMPT, max_new_tokens=12, apply_chat_template=False)
    assert str(text) == decode(tokens)


@needs_genai
@needs_npuw
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_genai_on_npuw_gives_the_simulator_s_text(
    drafted: bool, pair: tuple[Path, Path], expected: str
) -> None:
    import openvino_genai

    target, draft = pair
    models = {"draft_model": openvino_genai.draft_model(draft, "NPU", **NPU)} if drafted else {}
    pipeline = openvino_genai.LLMPipeline(target, "NPU", **NPU, **models)
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, apply_chat_template=False)
    if drafted:
        config.num_assistant_tokens = 4
    assert str(pipeline.generate(PROMPT, config)) == expected
