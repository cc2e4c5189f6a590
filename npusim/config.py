"""The configuration of a compiled model: NPUW's names, plus own options that begin with NPUSIM_."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from npusim.config_choices import (
    Execution,
    GenerateHint,
    KVLayout,
    KVPrecision,
    PrefillHint,
    Profile,
)
from npusim.config_options import (
    MAX_GENERATION_TOKEN_LEN,
    MAX_PROMPT_LEN,
    MIN_RESPONSE_LEN,
    OPTIONS,
    PREFILL_CHUNK_SIZE,
)
from npusim.config_values import ConfigValue, check_at_least, spell
from npusim.errors import ConfigError
from npusim.layout import CommitPolicy
from npusim.npuw_profile import DEFAULT_CHUNK_SIZE, LENGTH_STEP, npuw_lengths, round_up

DEFAULT_MAX_PROMPT_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """A validated configuration; lengths are in tokens.

    max_prompt_len and prefill_chunk_size of None are chosen for the model (`fitted`).
    """

    max_prompt_len: int | None = None
    min_response_len: int = 128
    max_generation_token_len: int = 1
    prefill_hint: PrefillHint = PrefillHint.DYNAMIC
    prefill_chunk_size: int | None = None
    generate_hint: GenerateHint = GenerateHint.FAST_COMPILE
    generate_pyramid: bool = False
    pyramid_base: int = 1024
    kv_precision: KVPrecision = KVPrecision.MODEL
    kv_layout: KVLayout = KVLayout.LINEAR
    kv_slack: int = 0
    commit: CommitPolicy = CommitPolicy.EAGER
    execution: Execution = Execution.FAST
    profile: Profile = Profile.NPUSIM
    sanitize: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, MAX_PROMPT_LEN, self.max_prompt_len)
        check_at_least(1, MIN_RESPONSE_LEN, self.min_response_len)
        check_at_least(1, MAX_GENERATION_TOKEN_LEN, self.max_generation_token_len)
        check_at_least(1, PREFILL_CHUNK_SIZE, self.prefill_chunk_size)
        check_at_least(1, "NPUSIM_PYRAMID_BASE", self.pyramid_base)
        check_at_least(0, "NPUSIM_KV_SLACK", self.kv_slack)
        if self.max_prompt_len is None:
            return
        if self._least_prompt_len > self.max_prompt_len:
            raise ConfigError(
                f"{PREFILL_CHUNK_SIZE}={self.prefill_chunk_size} does not fit into "
                f"{MAX_PROMPT_LEN}={self.max_prompt_len}; give a chunk of at most that"
            )
        if self.max_generation_token_len > self.capacity:
            raise ConfigError(
                f"{MAX_GENERATION_TOKEN_LEN}={self.max_generation_token_len} does not fit into the "
                f"capacity of {self.capacity} ({MAX_PROMPT_LEN} + {MIN_RESPONSE_LEN} - 1)"
            )
        check_at_least(1, f"{MAX_PROMPT_LEN} + {MIN_RESPONSE_LEN} - 1", self.capacity)

    @property
    def capacity(self) -> int:
        """C: tokens that can be stored. The last token generated need not be stored."""
        return self._chosen_prompt_len + self.min_response_len - 1

    @property
    def generate_capacities(self) -> tuple[int, ...]:
        """Past slots of each generate graph: NPUW's, for prompts of 1024, 2048, .. tokens, and all."""
        sizes = []
        prompt_len = self.pyramid_base
        while self.generate_pyramid and prompt_len + self.min_response_len - 1 < self.capacity:
            sizes.append(prompt_len + self.min_response_len - 1)
            prompt_len *= 2
        return (*(size for size in sizes if size >= self.max_generation_token_len), self.capacity)

    @property
    def chunk_size(self) -> int:
        """Rows of the prefill graph."""
        if self.prefill_hint is PrefillHint.STATIC or self.prefill_chunk_size is None:
            return self._chosen_prompt_len
        return self.prefill_chunk_size

    @property
    def _chosen_prompt_len(self) -> int:
        if self.max_prompt_len is None:
            raise ConfigError(f"{MAX_PROMPT_LEN} is not chosen yet; call fitted() first")
        return self.max_prompt_len

    @property
    def _least_prompt_len(self) -> int:
        """What the prefill graph takes at least: a chunk, where it goes by chunks of a given size."""
        return self.prefill_chunk_size or 1 if self.prefill_hint is PrefillHint.DYNAMIC else 1

    def fitted(self, max_positions: int | None) -> "LLMConfig":
        """With every open choice made for a model whose rotary tables cover max_positions (None: any).

        Raises ConfigError where lengths that were asked for need more positions than the model has.
        """
        config = self
        if self.max_prompt_len is None:
            room = self._room_for_prompt(max_positions)
            config = replace(self, max_prompt_len=max(room, self._least_prompt_len))
        if config.profile is Profile.NPUW:
            config = config._rounded_as_npuw()
        if config.prefill_chunk_size is None and config.prefill_hint is PrefillHint.DYNAMIC:
            config = replace(config, prefill_chunk_size=min(DEFAULT_CHUNK_SIZE, config._chosen_prompt_len))
        if max_positions is not None and config.capacity > max_positions:
            raise ConfigError(
                f"{MAX_PROMPT_LEN}={config.max_prompt_len} and {MIN_RESPONSE_LEN}={config.min_response_len} "
                f"need {config.capacity} positions, the model's shortest table has {max_positions}; "
                "lower one of the two"
            )
        return config

    def _room_for_prompt(self, max_positions: int | None) -> int:
        """The longest prompt to choose: what the model has positions for after any rounding, at least 1."""
        if max_positions is None:
            return DEFAULT_MAX_PROMPT_LEN
        step = LENGTH_STEP if self.profile is Profile.NPUW else 1
        room = max_positions - round_up(self.min_response_len, step) + 1
        return max(1, min(DEFAULT_MAX_PROMPT_LEN, room // step * step))

    def _rounded_as_npuw(self) -> "LLMConfig":
        """With the lengths that NPUW compiles for; applying it twice changes nothing."""
        lengths = npuw_lengths(
            max_prompt_len=self._chosen_prompt_len,
            min_response_len=self.min_response_len,
            max_generation_token_len=self.max_generation_token_len,
            prefill_chunk_size=self.prefill_chunk_size or DEFAULT_CHUNK_SIZE,
            whole_prefill=self.prefill_hint is PrefillHint.STATIC,
        )
        if lengths.capacity < lengths.max_prompt_len:
            raise ConfigError(
                f"{MAX_GENERATION_TOKEN_LEN}={self.max_generation_token_len} leaves a capacity of "
                f"{lengths.capacity} under NPUSIM_PROFILE=NPUW, less than a prompt of "
                f"{lengths.max_prompt_len}; lower it or raise {MIN_RESPONSE_LEN}"
            )
        return replace(
            self,
            max_prompt_len=lengths.max_prompt_len,
            min_response_len=lengths.capacity - lengths.max_prompt_len + 1,
            max_generation_token_len=lengths.max_generation_tokens,
            prefill_chunk_size=lengths.chunk_size,
        )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, ConfigValue]) -> "LLMConfig":
        """Parse a config; values may be strings or numbers. ConfigError names an unknown key's nearest.

        Keys that have no effect here (`Option.field` is None) are checked and left out.
        """
        values = {}
        for key, value in mapping.items():
            option = _BY_KEY.get(key)
            if option is None:
                near = difflib.get_close_matches(str(key).upper(), list(_BY_KEY), n=1, cutoff=0.0)
                raise ConfigError(f"unknown config key {key!r}; the nearest known one is {near[0]}")
            parsed = option.parse(key, value)
            if option.field is not None:
                values[option.field] = parsed
        return cls(**values)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, str]:
        """The config as strings, every key spelled out except those still open."""
        result = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                result[_BY_FIELD[field.name].key] = spell(value)
        return result


_BY_KEY = {option.key: option for option in OPTIONS}
_BY_FIELD = {option.field: option for option in OPTIONS if option.field is not None}
