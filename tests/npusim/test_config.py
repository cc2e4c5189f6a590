"""The configuration: names, spellings, defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from model_files import READABLE

import npusim
from npusim.config import LLMConfig
from npusim.config_choices import Execution, GenerateHint, KVLayout, KVPrecision, PrefillHint, Profile
from npusim.config_options import OPTIONS
from npusim.errors import ConfigError
from npusim.layout import CommitPolicy

FULL = {
    "NPUW_LLM_MAX_PROMPT_LEN": "48",
    "NPUW_LLM_MIN_RESPONSE_LEN": "17",
    "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": "5",
    "NPUW_LLM_PREFILL_HINT": "STATIC",
    "NPUW_LLM_PREFILL_CHUNK_SIZE": "16",
    "NPUW_LLM_GENERATE_HINT": "BEST_PERF",
    "NPUW_LLM_GENERATE_PYRAMID": "YES",
    "NPUSIM_PYRAMID_BASE": "7",
    "NPUSIM_KV_PRECISION": "F16",
    "NPUSIM_KV_LAYOUT": "RING",
    "NPUSIM_KV_SLACK": "3",
    "NPUSIM_COMMIT": "DEFERRED",
    "NPUSIM_SANITIZE": "YES",
    "NPUSIM_EXECUTION": "DEVICE",
    "NPUSIM_PROFILE": "NPUW",
}


def parsed(key: str, value: object) -> LLMConfig:
    return LLMConfig.from_mapping({key: value})  # type: ignore[dict-item]


def test_every_key_is_read() -> None:
    assert set(FULL) == {option.key for option in OPTIONS if option.field is not None}
    assert LLMConfig.from_mapping(FULL) == LLMConfig(
        max_prompt_len=48,
        min_response_len=17,
        max_generation_token_len=5,
        prefill_hint=PrefillHint.STATIC,
        prefill_chunk_size=16,
        generate_hint=GenerateHint.BEST_PERF,
        generate_pyramid=True,
        pyramid_base=7,
        kv_precision=KVPrecision.F16,
        kv_layout=KVLayout.RING,
        kv_slack=3,
        commit=CommitPolicy.DEFERRED,
        sanitize=True,
        execution=Execution.DEVICE,
        profile=Profile.NPUW,
    )


def test_a_config_survives_being_spelled_out() -> None:
    config = LLMConfig.from_mapping(FULL)
    assert config.to_mapping() == FULL
    assert LLMConfig.from_mapping(config.to_mapping()) == config
    defaults = LLMConfig.from_mapping({})
    assert "NPUW_LLM_MAX_PROMPT_LEN" not in defaults.to_mapping()
    assert LLMConfig.from_mapping(defaults.to_mapping()) == defaults
    assert defaults.to_mapping()["NPUSIM_SANITIZE"] == "NO"


def test_the_defaults() -> None:
    config = LLMConfig.from_mapping({}).fitted(None)
    assert (config.max_prompt_len, config.min_response_len, config.max_generation_token_len) == (1024, 128, 1)
    assert (config.capacity, config.chunk_size) == (1151, 1024)
    assert config.prefill_hint is PrefillHint.DYNAMIC
    assert config.kv_precision is KVPrecision.MODEL
    assert (config.kv_layout, config.kv_slack) == (KVLayout.LINEAR, 0)
    assert (config.commit, config.sanitize) == (CommitPolicy.EAGER, False)
    assert config.execution is Execution.FAST


@pytest.mark.parametrize(
    "value", ["48", 48, 48.0, " 48 ", "+48", np.int16(48), np.float32(48), Fraction(96, 2), Decimal("48.0")]
)
def test_lengths_may_be_numbers_or_text(value: object) -> None:
    assert parsed("NPUW_LLM_MAX_PROMPT_LEN", value).max_prompt_len == 48


@pytest.mark.parametrize(
    "value",
    [
        *["", "many", "4.5", "48.0", "0x20", "4_8", "٤", b"48", None, [48], np.array(48), np.array([48])],
        *[True, False, np.bool_(True), 4.5, np.float32(4.5), Fraction(9, 2), Decimal("4.5"), 48j],
        *[float("nan"), float("inf"), Decimal("nan"), Decimal("inf"), np.float32("nan")],
    ],
)
def test_what_is_no_length(value: object) -> None:
    with pytest.raises(ConfigError, match=r"NPUW_LLM_MIN_RESPONSE_LEN=.*; a whole number is needed"):
        parsed("NPUW_LLM_MIN_RESPONSE_LEN", value)


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("NPUW_LLM_MAX_PROMPT_LEN", 1),
        ("NPUW_LLM_MIN_RESPONSE_LEN", 1),
        ("NPUW_LLM_MAX_GENERATION_TOKEN_LEN", 1),
        ("NPUW_LLM_PREFILL_CHUNK_SIZE", 1),
        ("NPUSIM_KV_SLACK", 0),
    ],
)
def test_the_least_of_each_length(key: str, least: int) -> None:
    parsed(key, least)
    for value in (least - 1, -7):
        with pytest.raises(ConfigError, match=f"{key}={value}; at least {least} is needed"):
            parsed(key, value)


@pytest.mark.parametrize("value", [2**31, 10**30, "1" + 100 * "0", 1e300, Decimal("1e12"), Decimal("1e5000")])
@pytest.mark.parametrize("key", ["NPUW_LLM_MAX_PROMPT_LEN", "NPUW_LLM_MIN_RESPONSE_LEN", "NPUSIM_KV_SLACK"])
def test_a_length_beyond_what_graphs_count_is_refused_with_the_limit(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=(\d+|<an integer of .*>); at most 2147483647 is possible"):
        parsed(key, value)


def test_lengths_that_graphs_count_only_one_by_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MIN_RESPONSE_LEN - 1=4000000000; at most 2147483647"):
        LLMConfig(max_prompt_len=2 * 10**9, min_response_len=2 * 10**9 + 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("YES", True), ("no", False), (True, True), (False, False), (1, True), ("0", False)],
)
def test_switches(value: object, expected: bool) -> None:
    assert parsed("NPUSIM_SANITIZE", value).sanitize is expected


@pytest.mark.parametrize("value", ["maybe", "", None, 2])
def test_what_is_no_switch(value: object) -> None:
    with pytest.raises(ConfigError, match=r"NPUSIM_SANITIZE=.*; YES or NO is needed"):
        parsed("NPUSIM_SANITIZE", value)


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("NPUW_LLM_PREFILL_HINT", "STATIC, DYNAMIC"),
        ("NPUW_LLM_GENERATE_HINT", "FAST_COMPILE, BEST_PERF"),
        ("NPUSIM_KV_PRECISION", "MODEL, F32, F16"),
        ("NPUSIM_KV_LAYOUT", "LINEAR, ROLLING, RING, GATHERED"),
        ("NPUSIM_COMMIT", "EAGER, DEFERRED"),
        ("NPUSIM_EXECUTION", "FAST, DEVICE"),
        ("NPUSIM_PROFILE", "NPUSIM, NPUW"),
    ],
)
def test_modes(key: str, allowed: str) -> None:
    for value in allowed.split(", "):
        assert parsed(key, value.lower()).to_mapping()[key] == value
    for wrong in ("OTHER", "", 3, None):
        with pytest.raises(ConfigError, match=f"{key}={wrong!r}; allowed: {allowed}"):
            parsed(key, wrong)


@pytest.mark.parametrize(
    ("key", "values", "wrong", "message"),
    [
        ("NPU_USE_NPUW", ["YES", "yes", True], "NO", "YES is the only choice"),
        ("NPUW_LLM", ["YES", "TRUE", 1], False, "YES is the only choice"),
        ("NPUW_LLM", ["1"], "perhaps", "YES or NO is needed"),
        ("NPUW_DEVICES", ["CPU", "NPU,CPU", "NPU.0,GPU.1"], "CPU,", "a list of devices is needed"),
        ("NPUW_DEVICES", ["GPU"], "", "a list of devices is needed"),
    ],
)
def test_keys_of_npuw_that_have_no_effect(
    key: str, values: list[object], wrong: object, message: str
) -> None:
    """They are no part of the configuration, so that one reads the same with and without them."""
    for value in values:
        assert parsed(key, value) == LLMConfig()
        assert key not in parsed(key, value).to_mapping()
    with pytest.raises(ConfigError, match=f"{key}={wrong!r}; .*{message}"):
        parsed(key, wrong)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("NPUW_LLM_MAX_PROMT_LEN", "NPUW_LLM_MAX_PROMPT_LEN"),
        ("npuw_llm_min_response_len", "NPUW_LLM_MIN_RESPONSE_LEN"),
        ("MAX_GENERATION_TOKEN_LEN", "NPUW_LLM_MAX_GENERATION_TOKEN_LEN"),
        ("NPUSIM_KV_LAYOUTS", "NPUSIM_KV_LAYOUT"),
        ("NPUSIM_COMMITS", "NPUSIM_COMMIT"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown config key '{key}'; the nearest known one is {nearest}$"):
        parsed(key, "4")


@pytest.mark.parametrize("compile_model", [npusim.compile_model, npusim.npuw.compile_model])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "the config is a list; give a mapping"),
        ("NPUSIM_COMMIT=EAGER", "the config is a str; give a mapping"),
        ({3: 4}, "config key 3 is a int; keys are text"),
    ],
)
def test_a_config_is_a_mapping_with_keys_of_text(
    compile_model: Callable[..., object], config: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compile_model(READABLE["llama"], config)


def test_a_chunk_must_fit_into_the_prompt() -> None:
    lengths = {"NPUW_LLM_MAX_PROMPT_LEN": 20, "NPUW_LLM_PREFILL_CHUNK_SIZE": 20}
    assert LLMConfig.from_mapping(lengths).chunk_size == 20
    with pytest.raises(ConfigError, match="CHUNK_SIZE=21 does not fit into NPUW_LLM_MAX_PROMPT_LEN=20; give"):
        LLMConfig.from_mapping({**lengths, "NPUW_LLM_PREFILL_CHUNK_SIZE": 21})
    whole = {"NPUW_LLM_PREFILL_HINT": "STATIC", "NPUW_LLM_PREFILL_CHUNK_SIZE": 4000}
    assert LLMConfig.from_mapping({**lengths, **whole}).chunk_size == 20, "no chunk is used"
    assert LLMConfig.from_mapping(whole).fitted(None).chunk_size == 1024


def test_a_block_must_fit_into_the_capacity() -> None:
    lengths = {"NPUW_LLM_MAX_PROMPT_LEN": 6, "NPUW_LLM_MIN_RESPONSE_LEN": 3}
    assert LLMConfig.from_mapping({**lengths, "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 8}).capacity == 8
    with pytest.raises(ConfigError, match="TOKEN_LEN=9 does not fit into the capacity of 8"):
        LLMConfig.from_mapping({**lengths, "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 9})
    with pytest.raises(ConfigError, match="TOKEN_LEN=2000 does not fit into the capacity of 1151"):
        parsed("NPUW_LLM_MAX_GENERATION_TOKEN_LEN", 2000).fitted(None)


def test_whole_prefill_has_the_rows_of_the_longest_prompt() -> None:
    config = LLMConfig.from_mapping({**FULL, "NPUW_LLM_PREFILL_HINT": "STATIC"})
    assert config.chunk_size == 48
    config = LLMConfig.from_mapping({**FULL, "NPUW_LLM_PREFILL_HINT": "DYNAMIC"})
    assert config.chunk_size == 16


def test_open_lengths_are_fitted_to_the_rotary_tables() -> None:
    response = LLMConfig(min_response_len=30)
    assert response.fitted(100).max_prompt_len == 71  # 71 + 30 - 1 = 100
    assert response.fitted(100).chunk_size == 71
    assert response.fitted(5000).max_prompt_len == 1024
    assert LLMConfig(min_response_len=30, prefill_chunk_size=40).fitted(100).chunk_size == 40
    given = LLMConfig(max_prompt_len=90, min_response_len=11)
    assert given.fitted(100) == LLMConfig(max_prompt_len=90, min_response_len=11, prefill_chunk_size=90)
    with pytest.raises(ConfigError, match=r"LEN=90 and .*LEN=11 need 100 positions, .* has 99; lower one"):
        given.fitted(99)
    with pytest.raises(ConfigError, match="need 30 positions, the model's shortest table has 29"):
        response.fitted(29)


@pytest.mark.parametrize("name", ["capacity", "chunk_size"])
def test_sizes_of_an_open_config_are_not_there_yet(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"NPUW_LLM_MAX_PROMPT_LEN is not chosen yet; call fitted\(\) first"
    ):
        getattr(LLMConfig(), name)


@pytest.mark.parametrize(
    ("prompt", "response", "block", "chunk", "expected"),
    [
        # prompt, response and capacity measured on the real runtime: (16, 16) 127, block 4 120, (65, 64) 191,
        # (200, 64) with a block of 8 312.
        (16, 16, 1, None, (64, 127, 1, 64)),
        (16, 16, 4, None, (64, 120, 8, 64)),
        (65, 64, 1, None, (128, 191, 1, 128)),
        (200, 64, 8, None, (256, 312, 8, 256)),
        (200, 64, 3, 128, (256, 312, 8, 128)),
    ],
)
def test_the_profile_of_npuw_rounds_as_npuw(
    prompt: int, response: int, block: int, chunk: int | None, expected: tuple[int, int, int, int]
) -> None:
    config = LLMConfig(
        profile=Profile.NPUW,
        max_prompt_len=prompt,
        min_response_len=response,
        max_generation_token_len=block,
        prefill_chunk_size=chunk,
    ).fitted(None)
    got = (config.max_prompt_len, config.capacity, config.max_generation_token_len, config.chunk_size)
    assert got == expected
    assert config.fitted(None) == config


def test_the_profile_of_npuw_refuses_a_block_without_room() -> None:
    config = LLMConfig(profile=Profile.NPUW, max_prompt_len=9, max_generation_token_len=130)
    with pytest.raises(ConfigError, match="MAX_GENERATION_TOKEN_LEN"):
        config.fitted(None)
