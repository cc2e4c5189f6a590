"""From a model and a config to two compiled graphs."""

from collections.abc import Mapping
from pathlib import Path

import openvino as ov

from npusim.cache_plan import LayerCache, group_caches, plan_caches, with_capacity
from npusim.config import LLMConfig
from npusim.config_choices import Execution, PrefillHint
from npusim.config_values import ConfigValue, checked_mapping
from npusim.errors import ConfigError
from npusim.graphs import (
    join_new_rows,
    lower_block,
    lower_whole_prefill,
    take_int32,
    with_attention_taps,
)
from npusim.memory import check_memory
from npusim.model_file import read_model
from npusim.model_spec import ModelSpec, read_spec
from npusim.request import LLMInferRequest
from npusim.static_graph import COMPILE_PROPERTIES
from transforms import ExecutionForm, PlainWeights, UnfusedGate
from transforms.plain_weights import large_weight_bytes

LARGE_MODEL_BYTES = 512 * 2**20
"""From this many bytes of weights on, memory counts for more than the speed of short prefill graphs."""


class CompiledLLM:
    """The prefill and the generate graphs of one model, and what its requests need to know.

    prefill_model, generate_model: the lowered `openvino.Model`s as an NPU compiler would be given them.
    generate_models: by capacity; more than generate_model only with NPUW_LLM_GENERATE_PYRAMID.
    variants: the caches of each layer as the generate graph of each capacity reads them.
    """

    def __init__(self, model: ov.Model, config: LLMConfig) -> None:
        self.spec: ModelSpec = read_spec(model)
        self.config = config.fitted(self.spec.max_positions)
        _check_chunks(self.spec, self.config)
        self.caches: tuple[LayerCache, ...] = plan_caches(self.spec, self.config)
        check_memory(self.caches, self.config)
        self.prefill_model = self._lower_prefill(model)
        self.variants: dict[int, tuple[LayerCache, ...]] = {
            capacity: tuple(with_capacity(cache, capacity) for cache in self.caches)
            for capacity in self.config.generate_capacities
        }
        self.generate_models = {
            capacity: lower_block(model, caches, self.config.max_generation_token_len, capacity)
            for capacity, caches in self.variants.items()
        }
        self.compiled_prefill = self._compile(self.prefill_model, share_weights=True)
        self.compiled_generates = {
            capacity: self._compile(lowered) for capacity, lowered in self.generate_models.items()
        }

    @property
    def generate_model(self) -> ov.Model:
        """The generate graph of the whole capacity."""
        return self.generate_models[self.config.capacity]

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV buffers of one request."""
        return sum(cache.nbytes for cache in self.caches)

    def create_infer_request(self) -> LLMInferRequest:
        """A request with a cache of its own."""
        return LLMInferRequest(self)

    def _compile(self, lowered: ov.Model, *, share_weights: bool = False) -> ov.CompiledModel:
        """share_weights: keep no packed copy of the weights of a large model, which a step would need."""
        model = with_attention_taps(lowered, self.spec) if self.config.sanitize else lowered.clone()
        join_new_rows(model, group_caches(self.caches))
        take_int32(model)
        if self.config.execution is Execution.FAST:
            ExecutionForm().run_on_model(model)
            UnfusedGate().run_on_model(model)
            if share_weights and large_weight_bytes(model) >= LARGE_MODEL_BYTES:
                PlainWeights().run_on_model(model)
        return ov.Core().compile_model(model, "CPU", COMPILE_PROPERTIES)

    def _lower_prefill(self, model: ov.Model) -> ov.Model:
        rows = self.config.chunk_size
        if self.config.prefill_hint is PrefillHint.STATIC:
            return lower_whole_prefill(model, self.caches, rows)
        return lower_block(model, self.caches, rows, self.config.capacity)


def _check_chunks(spec: ModelSpec, config: LLMConfig) -> None:
    """Without causality a token sees those after it, and a chunk cannot see the next one."""
    free = [layer.name for layer in spec.layers if not layer.causal]
    longest = config.max_prompt_len or config.chunk_size
    if free and config.chunk_size < longest:
        raise ConfigError(
            f"{free[0]}: causal=0 with NPUW_LLM_PREFILL_CHUNK_SIZE={config.chunk_size} and prompts of up to "
            f"{longest} tokens; its rows see the whole prompt, so set NPUW_LLM_PREFILL_HINT=STATIC, or a "
            "chunk of the whole prompt"
        )


def compile_model(
    model: str | Path | ov.Model, config: Mapping[str, ConfigValue] | None = None
) -> CompiledLLM:
    """Compile a language model with GroupQueryAttention for the simulated NPU.

    model: an ONNX file, or a model that OpenVINO read from one; it stays as it was.
    config: NPUW_LLM_* and NPUSIM_* keys (`npusim.config.OPTIONS`), values as strings or numbers.

    With causal=0 the tokens of one call see each other, as the op defines it: a prompt is one call, and a
    block of several tokens (drafts, say) answers differently from the same tokens one by one.

    Raises ConfigError for a config that cannot hold, ModelError for a model that cannot run.
    """
    parsed = LLMConfig.from_mapping(checked_mapping(config))
    return CompiledLLM(read_model(model), parsed)
