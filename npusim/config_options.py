"""Every configuration key: its name, how its value is read, and what it means."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from npusim.config_choices import (
    Execution,
    GenerateHint,
    KVLayout,
    KVPrecision,
    PrefillHint,
    Profile,
)
from npusim.config_values import ConfigValue, parse_bool, parse_enum, parse_int
from npusim.errors import ConfigError
from npusim.layout import CommitPolicy


@dataclass(frozen=True)
class Option:
    """One configuration key; field: of `LLMConfig`, None for a key of NPUW's that has no effect here."""

    key: str
    field: str | None
    parse: Callable[[str, ConfigValue], object]
    default: str
    meaning: str


MAX_PROMPT_LEN = "NPUW_LLM_MAX_PROMPT_LEN"
MIN_RESPONSE_LEN = "NPUW_LLM_MIN_RESPONSE_LEN"
MAX_GENERATION_TOKEN_LEN = "NPUW_LLM_MAX_GENERATION_TOKEN_LEN"
PREFILL_CHUNK_SIZE = "NPUW_LLM_PREFILL_CHUNK_SIZE"

NO_EFFECT = "for NPUW alone: checked, without effect on the simulator"


def _parse_yes(key: str, value: ConfigValue) -> bool:
    if not parse_bool(key, value):
        raise ConfigError(f"{key}={value!r}; what is simulated is NPUW, so YES is the only choice")
    return True


def _parse_devices(key: str, value: ConfigValue) -> str:
    devices = str(value)
    if not re.fullmatch(r"[A-Z_]+(\.\d+)?(,[A-Z_]+(\.\d+)?)*", devices):
        raise ConfigError(f"{key}={value!r}; a list of devices is needed, such as CPU or NPU,CPU")
    return devices


def _parse_kv_precision(key: str, value: ConfigValue) -> KVPrecision:
    if str(value).upper() in ("I8", "U8", "I4", "U4", "F8E4M3"):
        raise ConfigError(
            f"{key}={value!r}: codes need scales, and those come with the model; give one that was exported "
            "with a quantized cache (k_quant_type, k_scale, ...) and leave MODEL"
        )
    return parse_enum(KVPrecision)(key, value)


OPTIONS = (
    Option(
        MAX_PROMPT_LEN,
        "max_prompt_len",
        parse_int,
        "1024, or what the rotary tables allow",
        "longest prompt, in tokens",
    ),
    Option(
        MIN_RESPONSE_LEN,
        "min_response_len",
        parse_int,
        "128",
        "tokens that can be generated after the longest prompt",
    ),
    Option(
        MAX_GENERATION_TOKEN_LEN,
        "max_generation_token_len",
        parse_int,
        "1",
        "rows of the generate graph: the largest block of one step (1 + drafts)",
    ),
    Option(
        "NPUW_LLM_PREFILL_HINT",
        "prefill_hint",
        parse_enum(PrefillHint),
        "DYNAMIC",
        "STATIC: whole prompt in one graph; DYNAMIC: chunk by chunk over the cache",
    ),
    Option(
        PREFILL_CHUNK_SIZE,
        "prefill_chunk_size",
        parse_int,
        "1024, or the longest prompt",
        "rows of the chunked prefill graph",
    ),
    Option(
        "NPUW_LLM_GENERATE_HINT",
        "generate_hint",
        parse_enum(GenerateHint),
        "FAST_COMPILE",
        "FAST_COMPILE or BEST_PERF; accepted as NPUW does, one generate graph serves both",
    ),
    Option(
        "NPUW_LLM_GENERATE_PYRAMID",
        "generate_pyramid",
        parse_bool,
        "NO",
        "YES: generate graphs of several capacities, each step on the smallest that holds it",
    ),
    Option("NPU_USE_NPUW", None, _parse_yes, "YES", f"YES; {NO_EFFECT}"),
    Option("NPUW_LLM", None, _parse_yes, "YES", f"YES; {NO_EFFECT}"),
    Option("NPUW_DEVICES", None, _parse_devices, "CPU", f"any list of devices; {NO_EFFECT}"),
    Option(
        "NPUSIM_PYRAMID_BASE",
        "pyramid_base",
        parse_int,
        "1024",
        "prompt that the smallest graph of a pyramid has room for; each further one has twice that",
    ),
    Option(
        "NPUSIM_KV_PRECISION",
        "kv_precision",
        _parse_kv_precision,
        "MODEL",
        "element type of the KV cache: MODEL, F32 or F16 (a quantized cache keeps its own)",
    ),
    Option(
        "NPUSIM_KV_LAYOUT",
        "kv_layout",
        parse_enum(KVLayout),
        "LINEAR",
        "slots of windowed layers: LINEAR, ROLLING, RING or GATHERED",
    ),
    Option(
        "NPUSIM_KV_SLACK",
        "kv_slack",
        parse_int,
        "0",
        "rows of a ROLLING or RING layer above the least that is sound",
    ),
    Option(
        "NPUSIM_COMMIT",
        "commit",
        parse_enum(CommitPolicy),
        "EAGER",
        "EAGER: store a block at once, trim later; DEFERRED: store what the next call accepts",
    ),
    Option(
        "NPUSIM_EXECUTION",
        "execution",
        parse_enum(Execution),
        "FAST",
        "form of the attention that runs: FAST on a CPU, or DEVICE as an NPU compiler is given it",
    ),
    Option(
        "NPUSIM_PROFILE",
        "profile",
        parse_enum(Profile),
        "NPUSIM",
        "NPUW: lengths and capacity rounded as NPUW rounds them; NPUSIM: as given",
    ),
    Option(
        "NPUSIM_SANITIZE",
        "sanitize",
        parse_bool,
        "NO",
        "YES: fill every slot that may not be read with a pattern and stop when it leaks",
    ),
)
"""Every key, in the order in which help texts list them."""
