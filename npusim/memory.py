"""Refuse lengths whose buffers this machine cannot hold, before they are asked for."""

import os

from npusim.cache_plan import LayerCache
from npusim.config import LLMConfig
from npusim.config_choices import PrefillHint
from npusim.config_options import MAX_PROMPT_LEN, MIN_RESPONSE_LEN, PREFILL_CHUNK_SIZE
from npusim.errors import ConfigError
from transforms import KeyLayout


def physical_memory() -> int | None:
    """Bytes of memory that the machine has; None where the system does not say."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(caches: tuple[LayerCache, ...], config: LLMConfig) -> None:
    """ConfigError where the KV buffers of one request and its masks exceed the machine's memory.

    Masks: the additive one of the larger graph, and attention_mask, an int64 per slot, of each graph.
    """
    available = physical_memory()
    cache_bytes = sum(cache.nbytes for cache in caches)
    graphs = 1 + len(config.generate_capacities)
    mask_bytes = 4 * _mask_elements(max(map(_past_keys, caches)), config) + 8 * graphs * config.capacity
    if available is None or cache_bytes + mask_bytes <= available:
        return
    raise ConfigError(
        f"a capacity of {config.capacity:,} tokens needs {cache_bytes:,} bytes of KV cache and "
        f"{mask_bytes:,} bytes for attention masks, the machine has {available:,} bytes of memory; lower "
        f"{MAX_PROMPT_LEN}, {MIN_RESPONSE_LEN} or {PREFILL_CHUNK_SIZE}"
    )


def _past_keys(cache: LayerCache) -> int:
    """Past slots that the attention of a layer sees."""
    gathers = cache.key_layout is KeyLayout.GATHERED
    return cache.layout.local_window_size - 1 if gathers else cache.layout.capacity


def _mask_elements(past_keys: int, config: LLMConfig) -> int:
    """Of the larger of the two graphs: rows of a block, by keys."""
    chunk, block = config.chunk_size, config.max_generation_token_len
    prefill_past = past_keys if config.prefill_hint is PrefillHint.DYNAMIC else 0
    return max(chunk * (prefill_past + chunk), block * (past_keys + block))
