"""From a configuration to what NPUW is compiled with, and the lengths that come of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from npusim.config import LLMConfig
from npusim.config_choices import PrefillHint
from npusim.config_options import OPTIONS
from npusim.config_values import ConfigValue, spell
from npusim.errors import ConfigError
from npusim.npuw_profile import DEFAULT_CHUNK_SIZE, NPUWLengths, npuw_lengths

UNPARTITIONED = {
    "NPUW_ONLINE_PIPELINE": "NONE",
    "NPUW_LLM_PREFILL_ATTENTION_HINT": "STATIC",
    "NPUW_LLM_GENERATE_ATTENTION_HINT": "STATIC",
}
"""One graph per stage. Any other attention hint brings the partitioner back, whatever the pipeline says."""

DEVICES = "NPUW_DEVICES"

SHARED_KEYS = frozenset(option.key for option in OPTIONS if not option.key.startswith("NPUSIM_"))
"""Those that the simulator takes too."""
_DEFAULTS = {"NPU_USE_NPUW": "YES", "NPUW_LLM": "YES", DEVICES: "CPU"}
_CPU_PRECISION = {"INFERENCE_PRECISION_HINT": "f32"}
"""A CPU with bfloat16 units would compute in those, and ten times less exactly."""


@dataclass(frozen=True, kw_only=True)
class NPUWConfig:
    """Properties as OpenVINO takes them, and the lengths NPUW makes of them."""

    properties: Mapping[str, str]
    lengths: NPUWLengths

    @property
    def may_choose_pipeline(self) -> bool:
        """Whether the caller left NPUW's partitioning open."""
        return not UNPARTITIONED.keys() & self.properties.keys()

    def unpartitioned(self) -> dict[str, str]:
        """The properties with NPUW's partitioner off."""
        return {**self.properties, **UNPARTITIONED}


def read_config(config: Mapping[str, ConfigValue], max_positions: int | None) -> NPUWConfig:
    """The configuration for a model whose rotary tables cover `max_positions` (None: any).

    Takes the simulator's keys that are NPUW's, checked as it checks them, and hands every other key on to
    OpenVINO (NPUW_*, NPU_*, INFERENCE_PRECISION_HINT, ...). Raises ConfigError for what cannot hold, and for
    NPUSIM_* keys, which only the simulator has.
    """
    own = sorted(key for key in config if key.startswith("NPUSIM_"))
    if own:
        raise ConfigError(f"{own[0]} is an option of the simulator; NPUW has no such choice, leave it out")
    known = {key: value for key, value in config.items() if key in SHARED_KEYS}
    passed_on = {key: spell(value) for key, value in config.items() if key not in SHARED_KEYS}
    asked = LLMConfig.from_mapping(known)
    chosen = {key: spell(value) for key, value in known.items()}
    prompt = asked.max_prompt_len
    if prompt is None:
        prompt = asked.fitted(max_positions).max_prompt_len or 1
        chosen["NPUW_LLM_MAX_PROMPT_LEN"] = str(prompt)
    chosen.setdefault("NPUW_LLM_MIN_RESPONSE_LEN", str(asked.min_response_len))
    chosen.setdefault("NPUW_LLM_MAX_GENERATION_TOKEN_LEN", str(asked.max_generation_token_len))
    lengths = npuw_lengths(
        max_prompt_len=prompt,
        min_response_len=asked.min_response_len,
        max_generation_token_len=asked.max_generation_token_len,
        prefill_chunk_size=asked.prefill_chunk_size or DEFAULT_CHUNK_SIZE,
        whole_prefill=asked.prefill_hint is PrefillHint.STATIC,
    )
    on_cpu = chosen.get(DEVICES, _DEFAULTS[DEVICES]) == "CPU"
    defaults = {**_DEFAULTS, **(_CPU_PRECISION if on_cpu else {})}
    return NPUWConfig(properties={**defaults, **chosen, **passed_on}, lengths=lengths)
