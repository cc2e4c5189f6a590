"""Which models and configurations the real NPUW takes, and that it is right on each."""

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from llama_like import LlamaLike
from model_files import READABLE
from npuw_calls import LENGTHS, WHOLE_GRAPH, call, tokens_of, tolerance
from ort_runner import OrtModel

from npusim import npuw
from npusim.errors import CapacityError, ConfigError, ModelError
from npusim.npuw_config import read_config
from npusim.npuw_keys import check_keys

_UNAVAILABLE = npuw.unavailable_reason()
pytestmark = pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))


@pytest.mark.parametrize(
    ("layers", "packed"), [*((layers, True) for layers in range(1, 9)), (2, False), (3, False), (5, False)]
)
def test_every_depth_compiles(layers: int, packed: bool, tmp_path: Path) -> None:
    """As NPUW partitions by default; a retreat to one subgraph is noted, never needed for a packed model."""
    tiny = LlamaLike(windows=(-1,) * layers, packed=packed)
    compiled = npuw.compile_model(ov.Core().read_model(tiny.serialized), LENGTHS)
    if packed:
        assert compiled.notes == ()
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny.serialized)
    request, oracle = compiled.create_infer_request(), OrtModel(path)
    for start, count in ((0, 9), (9, 4), (11, 3)):
        oracle.rewind(start)
        expected = oracle.feed(tokens_of(count))
        logits = call(request, tokens_of(count), start)
        rows = logits.shape[1]
        np.testing.assert_allclose(
            logits, expected[:, -rows:], atol=tolerance(expected, partitioned=True), rtol=0
        )


@pytest.mark.parametrize("options", [WHOLE_GRAPH, {}], ids=["whole-graph", "partitioned"])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("heads", [8, 16])
def test_blocks_of_as_many_rows_as_heads(
    heads: int, rotary: bool, options: dict[str, str], tmp_path: Path
) -> None:
    """8 rows a block, 16 a chunk: where S == H the CPU plugin may write attention over its query."""
    tiny = LlamaLike(windows=(4, -1), num_heads=heads, packed=rotary, rotary=rotary)
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny.serialized)
    config = {**LENGTHS, **options, "NPUW_LLM_MAX_PROMPT_LEN": 64, "NPUW_LLM_PREFILL_CHUNK_SIZE": 16}
    request, oracle = npuw.compile_model(path, config).create_infer_request(), OrtModel(path)
    for at, (start, count) in enumerate([(0, 16), (16, 8), (20, 8), (27, 1), (0, 45), (45, 8)]):
        oracle.rewind(start)
        tokens = tokens_of(count, seed=at)
        expected = oracle.feed(tokens)
        logits = call(request, tokens, start)
        expected = expected[:, -logits.shape[1] :]
        np.testing.assert_allclose(
            logits, expected, atol=tolerance(expected, partitioned=not options), rtol=0
        )


def test_a_model_that_the_partitioner_loses_is_compiled_whole() -> None:
    compiled = npuw.compile_model(READABLE["swa_draft"], LENGTHS)
    assert len(compiled.notes) == 1
    assert "NPUW_ONLINE_PIPELINE=NONE" in compiled.notes[0]


def test_a_pipeline_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(ModelError, match=r"NPUW does not compile the model: .*undeclared parameters"):
        npuw.compile_model(READABLE["swa_draft"], {**LENGTHS, "NPUW_ONLINE_PIPELINE": "REP"})


def test_bad_configurations_are_refused() -> None:
    path = READABLE["llama"]
    with pytest.raises(ConfigError, match="NPUSIM_KV_LAYOUT is an option of the simulator"):
        npuw.compile_model(path, {"NPUSIM_KV_LAYOUT": "RING"})
    with pytest.raises(ConfigError, match="NPUW takes powers of two"):
        npuw.compile_model(path, {"NPUW_LLM_MAX_PROMPT_LEN": 100, "NPUW_LLM_PREFILL_CHUNK_SIZE": 24})
    with pytest.raises(ConfigError, match=r"NPU_USE_NPUW='NO'; .* YES is the only choice"):
        npuw.compile_model(path, {"NPU_USE_NPUW": "NO"})
    with pytest.raises(ModelError, match="NPUW does not compile the model"):
        npuw.compile_model(path, {**LENGTHS, "NPUW_DEVICES": "NONE_SUCH"})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("npuw_llm_max_prompt_len", "NPUW_LLM_MAX_PROMPT_LEN"),
        ("npuw_f16ic", "NPUW_F16IC"),
        ("NPWU_LLM_MAX_PROMPT_LEN", "NPUW_LLM_MAX_PROMPT_LEN"),
        ("inference_precision_hint", "INFERENCE_PRECISION_HINT"),
        ("INFERENCE_NUM_THREAD", "INFERENCE_NUM_THREADS"),
        ("CACHE_DIRS", "CACHE_DIR"),
        ("FULL_DEVICE_NAME", ""),
        ("WHATEVER", ""),
    ],
)
def test_a_key_that_nobody_knows_is_refused(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown config key '{key}'; the nearest known one is {nearest}"):
        npuw.compile_model(READABLE["llama"], {key: "64"})


def test_keys_of_the_devices_are_known() -> None:
    """Of the CPU, listed or not, of the NPU, and of NPUW."""
    check_keys({"INFERENCE_NUM_THREADS": 1, "SNIPPETS_MODE": "DISABLE", "CACHE_DIR": "", "NPUW_F16IC": False})


def test_an_option_of_its_own_that_npuw_does_not_know_is_refused() -> None:
    with pytest.raises(ModelError, match="Option 'NPUW_TYPO' is not supported"):
        npuw.compile_model(READABLE["llama"], {**LENGTHS, **WHOLE_GRAPH, "NPUW_TYPO": "1"})


def test_switches_are_handed_on_as_openvino_spells_them() -> None:
    given = {"NPU_USE_NPUW": True, "NPUW_LLM": "YES", "NPUW_DEVICES": "NPU,CPU", "NPUW_F16IC": False}
    properties = read_config(given, max_positions=None).properties
    assert [properties[key] for key in given] == ["YES", "YES", "NPU,CPU", "NO"]


def test_rotary_tables_bound_the_capacity() -> None:
    """The tables of the file cover 512 positions; NPUW would store more and answer nonsense."""
    config = {**LENGTHS, **WHOLE_GRAPH, "NPUW_LLM_MAX_PROMPT_LEN": 640}
    request = npuw.compile_model(READABLE["qwen3"], config).create_infer_request()
    assert (request.capacity, request.max_prompt_len) == (512, 512)
    with pytest.raises(CapacityError, match="a prompt of 513 tokens; NPUW was compiled for 512"):
        call(request, tokens_of(513), 0)
