"""Whole models with quantized caches on the simulated NPU, held against ONNX Runtime step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from gqa_models import Quantized
from model_files import READABLE
from quantized_models import OrtSteps, codes_of, layered, quantized, read

import npusim
import transforms.shared_parts
from npusim.cache_plan import allocate_groups, group_caches, plan_caches
from npusim.config import LLMConfig
from npusim.model_spec import read_spec

INT8 = Quantized()
INT8_CHANNELS = Quantized(kind="PER_CHANNEL")
INT4 = Quantized(bits=4)
INT4_CHANNELS = Quantized(bits=4, kind="PER_CHANNEL")
FLOAT8 = Quantized(float8=True)

CONFIG = {
    "NPUW_LLM_MAX_PROMPT_LEN": 21,
    "NPUW_LLM_MIN_RESPONSE_LEN": 26,
    "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 4,
    "NPUW_LLM_PREFILL_CHUNK_SIZE": 7,
}
PROMPT = 18
BLOCKS = ((18, 1), (19, 4), (21, 3), (24, 4), (25, 2), (27, 4), (31, 4), (32, 1))
"""Start and length; three of them take back a part of the block before."""

TOKENS = np.random.default_rng(8).integers(0, 256, 60)


@dataclass
class StoredRows:
    """Every KV row of a request as it was first seen, by layer and position; later looks must agree."""

    request: npusim.LLMInferRequest
    rows: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def forget(self, start: int) -> None:
        """Rows from position `start` on are about to be replaced."""
        self.rows = {key: row for key, row in self.rows.items() if key[1] < start}

    def look(self) -> None:
        """Compare the resident rows with how they looked when they were new."""
        kv = self.request.kv
        for group in kv.groups:
            for layer in group.layers:
                for position in group.layout.readable_positions(kv.num_committed_tokens):
                    slot = group.layout.slot_of(position, kv.num_committed_tokens)
                    row = group.key(layer)[:, :, slot].tobytes() + group.value(layer)[:, :, slot].tobytes()
                    assert self.rows.setdefault((layer, position), row) == row, (layer, position)


def _infer(request: npusim.LLMInferRequest, start: int, length: int) -> np.ndarray:
    positions = np.arange(start, start + length)
    return request.infer({"input_ids": TOKENS[None, positions], "position_ids": positions[None]})["logits"]


def _differing_codes(request: npusim.LLMInferRequest, ort: OrtSteps, form: Quantized) -> int:
    """How many codes of resident rows are not ONNX Runtime's; none by more than one."""
    count, kv = 0, request.kv
    stored = kv.num_committed_tokens
    for group in kv.groups:
        positions = group.layout.readable_positions(stored)
        slots = [group.layout.slot_of(position, stored) for position in positions]
        for layer in group.layers:
            for part, buffer in (("key", group.key(layer)), ("value", group.value(layer))):
                other = ort.past[f"past_key_values.{layer}.{part}"][:, :, positions.start : positions.stop]
                difference = codes_of(buffer[:, :, slots], form.bits) - codes_of(other, form.bits)
                assert np.abs(difference).max(initial=0) <= 1
                count += np.count_nonzero(difference)
    return count


def _converse(
    model: onnx.ModelProto, config: dict[str, str | int], form: Quantized
) -> npusim.LLMInferRequest:
    """The same conversation in both; a code may differ where the row before it was within 1e-6 of a tie."""
    request = npusim.compile_model(read(model), CONFIG | config).create_infer_request()
    ort, seen, rewinds = OrtSteps(model), StoredRows(request), 0
    for start, length in ((0, PROMPT), *BLOCKS):
        seen.forget(start)
        rewinds += start < request.num_stored_tokens
        logits, expected = _infer(request, start, length), ort.feed(TOKENS[start : start + length], start)
        differing = _differing_codes(request, ort, form)
        assert differing <= 8
        np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-3 if differing else 5e-6)
        seen.look()
    assert rewinds == 3
    return request


@pytest.mark.parametrize(
    ("name", "form", "config"),
    [
        ("llama", INT8, {}),
        ("llama", INT4_CHANNELS, {"NPUSIM_EXECUTION": "DEVICE", "NPUW_LLM_PREFILL_HINT": "STATIC"}),
        ("qwen3", INT4, {"NPUW_LLM_PREFILL_HINT": "STATIC", "NPUSIM_COMMIT": "DEFERRED"}),
        ("gptoss_attention", INT4_CHANNELS, {"NPUSIM_KV_LAYOUT": "RING"}),
        ("gptoss_attention", INT8, {"NPUSIM_KV_LAYOUT": "GATHERED"}),
        ("gemma3_alternating", INT8_CHANNELS, {"NPUSIM_KV_LAYOUT": "ROLLING", "NPUSIM_COMMIT": "DEFERRED"}),
        ("gemma3_alternating", INT4, {"NPUSIM_KV_LAYOUT": "RING", "NPUSIM_COMMIT": "DEFERRED"}),
    ],
)
def test_a_conversation_with_rewinds_equals_onnx_runtime_and_no_row_changes(name, form, config):
    request = _converse(quantized(READABLE[name], form), config, form)
    windows = {group.layout.capacity for group in request.kv.groups}
    assert (min(windows) < 16) == (config.get("NPUSIM_KV_LAYOUT") in ("RING", "ROLLING"))


def test_layers_with_codes_and_layers_without_live_in_one_model():
    model = quantized(READABLE["gemma3_alternating"], INT8_CHANNELS, layers=(1, 2))
    compiled = npusim.compile_model(read(model), CONFIG | {"NPUSIM_KV_LAYOUT": "RING"})
    request, ort = compiled.create_infer_request(), OrtSteps(model)
    for start, length in ((0, PROMPT), (18, 3), (20, 4)):
        expected = ort.feed(TOKENS[start : start + length], start)
        np.testing.assert_allclose(_infer(request, start, length), expected, rtol=0, atol=5e-6)
    # Windows 8, 8, none, 8; 2 KV heads of 16; a ring of W + S - 1 rows, C = 46.
    ring, full = 11, 46
    codes = 2 * 2 * 16
    assert request.kv_nbytes == ring * 4 * codes + ring * codes + full * codes + ring * 4 * codes
    assert compiled.kv_nbytes == request.kv_nbytes


@pytest.mark.parametrize(("form", "row"), [(INT8, 64), (INT4_CHANNELS, 32), (FLOAT8, 64)])
def test_a_row_takes_a_byte_or_half_a_byte_for_each_number(form, row):
    compiled = npusim.compile_model(read(quantized(READABLE["llama"], form)), CONFIG)
    assert compiled.kv_nbytes == 4 * 46 * row
    assert compiled.create_infer_request().kv_nbytes == compiled.kv_nbytes


def test_float8_rows_are_the_same_however_they_come_and_close_to_float_rows():
    model = quantized(READABLE["gptoss_attention"], FLOAT8)
    floats = OrtSteps(onnx.load(READABLE["gptoss_attention"]))
    requests = [
        npusim.compile_model(read(model), CONFIG | config).create_infer_request()
        for config in (
            {},
            {"NPUW_LLM_PREFILL_HINT": "STATIC", "NPUSIM_EXECUTION": "DEVICE", "NPUSIM_KV_LAYOUT": "RING"},
        )
    ]
    seen = [StoredRows(request) for request in requests]
    for start, length in ((0, PROMPT), (18, 4), (20, 3)):
        one, other = (_infer(request, start, length) for request in requests)
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)
        expected = floats.feed(TOKENS[start : start + length], start)
        assert 1e-5 < np.abs(one - expected).max() < 0.1 * np.abs(expected).max()
        for rows in seen:
            rows.forget(start)
            rows.look()


# The sanitizer. Codes cannot be poisoned with a number that no honest row has.


@pytest.mark.parametrize(
    ("form", "layout", "commit"),
    [(INT8, "RING", "EAGER"), (INT4_CHANNELS, "ROLLING", "DEFERRED"), (FLOAT8, "LINEAR", "EAGER")],
)
def test_a_sanitized_run_of_a_right_graph_has_the_same_bits(form, layout, commit):
    model = quantized(READABLE["gptoss_attention"], form)
    config = CONFIG | {"NPUSIM_KV_LAYOUT": layout, "NPUSIM_COMMIT": commit}
    plain, checked = (
        npusim.compile_model(read(model), config | {"NPUSIM_SANITIZE": wanted}).create_infer_request()
        for wanted in ("NO", "YES")
    )
    for start, length in ((0, PROMPT), (18, 4), (20, 3), (23, 1)):
        one, other = (_infer(request, start, length) for request in (plain, checked))
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    for one, other in zip(plain.kv.groups, checked.kv.groups, strict=True):
        np.testing.assert_array_equal(one.past, other.past)


@pytest.mark.parametrize("form", [INT8, INT4, FLOAT8], ids=["int8", "int4", "float8"])
def test_a_window_too_wide_is_named_and_changes_nothing(form, monkeypatch):
    visible = transforms.shared_parts.visible

    def one_too_wide(frame, *, local_window_size, causal):
        wider = local_window_size + 1 if local_window_size > 0 else -1
        return visible(frame, local_window_size=wider, causal=causal)

    monkeypatch.setattr("transforms.shared_parts.visible", one_too_wide)
    model = quantized(READABLE["gptoss_attention"], form)
    request = npusim.compile_model(read(model), CONFIG | {"NPUSIM_SANITIZE": "YES"}).create_infer_request()
    _infer(request, 0, 7)
    _infer(request, 7, 1)
    before = [group.past.copy() for group in request.kv.groups]
    with pytest.raises(
        npusim.KVLeakError, match=r"layer 0: slot 0 .* position 0, outside local_window_size 8"
    ):
        _infer(request, 8, 1)
    assert request.num_stored_tokens == 8
    for group, bytes_before in zip(request.kv.groups, before, strict=True):
        np.testing.assert_array_equal(group.past, bytes_before)


# Configuration.


@pytest.mark.parametrize("precision", ["F16", "F32"])
def test_codes_keep_their_type(precision):
    model = read(quantized(READABLE["llama"], INT8, layers=(2,)))
    with pytest.raises(
        npusim.ConfigError, match=rf"NPUSIM_KV_PRECISION={precision}: .* quantized cache \(i8\)"
    ):
        npusim.compile_model(model, CONFIG | {"NPUSIM_KV_PRECISION": precision})


@pytest.mark.parametrize("precision", ["I8", "u8", "I4", "f8e4m3"])
def test_a_float_model_is_not_quantized_for_want_of_scales(precision):
    with pytest.raises(npusim.ConfigError, match=f"NPUSIM_KV_PRECISION='{precision}': codes need scales"):
        npusim.compile_model(READABLE["llama"], {"NPUSIM_KV_PRECISION": precision})


@pytest.mark.parametrize(("layout", "mebibytes"), [("LINEAR", 3072), ("RING", 1537.5), ("ROLLING", 1537.5)])
def test_window_sized_int8_caches_halve_a_model_of_alternating_layers(layout, mebibytes):
    # 24 layers, 12 of them W = 128, 8 KV heads x 64, 131072 tokens: arrays of that size, of which no page is
    # touched.
    model = read(layered([128, -1] * 12, kv_num_heads=8, head_size=64, form=INT8))
    config = LLMConfig.from_mapping(
        {
            "NPUW_LLM_MAX_PROMPT_LEN": 131072 - 127,
            "NPUW_LLM_MIN_RESPONSE_LEN": 128,
            "NPUSIM_KV_LAYOUT": layout,
        }
    )
    spec = read_spec(model)
    caches = plan_caches(spec, config.fitted(spec.max_positions))
    allocated = sum(group.past.nbytes for group in allocate_groups(group_caches(caches)))
    assert allocated == sum(cache.nbytes for cache in caches)
    assert allocated / 2**20 == pytest.approx(mebibytes, abs=0)


def test_a_layered_model_runs_in_its_window_sized_buffers():
    model = layered([6, -1, 6], kv_num_heads=3, head_size=32, form=INT4)
    config = CONFIG | {"NPUSIM_KV_LAYOUT": "RING"}
    request, ort = (
        npusim.compile_model(read(model), config).create_infer_request(),
        OrtSteps(model, head_size=32),
    )
    tokens = TOKENS % 16
    for start, length in ((0, PROMPT), (18, 4), (20, 2), (22, 4)):
        block = {
            "input_ids": tokens[None, start : start + length],
            "position_ids": [range(start, start + length)],
        }
        logits = request.infer(block)["logits"]
        np.testing.assert_allclose(logits, ort.feed(tokens[start : start + length], start), rtol=0, atol=1e-5)
    assert request.kv_nbytes == 2 * 3 * 16 * (2 * 9 + 46)
