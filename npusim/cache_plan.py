"""Which buffer each attention layer gets: layout, slots, element type and bytes; nothing is allocated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

import openvino as ov

from npusim.cache_element import CACHE_ELEMENTS
from npusim.config import LLMConfig
from npusim.config_choices import KVLayout, KVPrecision
from npusim.errors import ConfigError, ModelError
from npusim.kv_manager import CacheGroup, allocate
from npusim.layout import Layout, LinearLayout, RingLayout, RollingLayout, ring_min_capacity
from npusim.layout.bounds import rolling_min_capacity
from npusim.model_spec import LayerSpec, ModelSpec
from npusim.tensor_slice import Array
from transforms import KeyLayout


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The buffer of one layer: key and value of [1, KV, C, D] each, C the layout's capacity.

    (D / 2 bytes where two codes share one.)
    """

    layer: LayerSpec
    layout: Layout
    key_layout: KeyLayout
    cache_type: ov.Type

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of past_key and of past_value."""
        return (1, self.layer.kv_num_heads, self.layout.capacity, self.layer.cache_channels)

    @property
    def nbytes(self) -> int:
        """Bytes of key and value."""
        return 2 * math.prod(self.shape) * CACHE_ELEMENTS[self.cache_type].dtype.itemsize


def plan_caches(spec: ModelSpec, config: LLMConfig) -> tuple[LayerCache, ...]:
    """A buffer for every layer, in order. ConfigError where a layout cannot hold a layer's window."""
    return tuple(_plan_layer(layer, config) for layer in spec.layers)


def group_caches(caches: tuple[LayerCache, ...]) -> tuple[tuple[LayerCache, ...], ...]:
    """Layers whose buffers have one layout, shape and type, in order of their first layer."""
    groups: dict[tuple[object, ...], list[LayerCache]] = {}
    for cache in caches:
        groups.setdefault((cache.layout, cache.shape, str(cache.cache_type)), []).append(cache)
    return tuple(tuple(members) for members in groups.values())


def with_capacity(cache: LayerCache, capacity: int) -> LayerCache:
    """The same cache in a generate graph for fewer tokens: linear buffers are cut, window-sized ones stay.

    A gather of a whole window from fewer slots than that would gain nothing, so it is left out.
    """
    if not isinstance(cache.layout, LinearLayout):
        return cache
    layout = replace(cache.layout, capacity=capacity)
    gathers = cache.key_layout is KeyLayout.GATHERED and layout.local_window_size - 1 < capacity
    return replace(cache, layout=layout, key_layout=KeyLayout.GATHERED if gathers else KeyLayout.LINEAR)


def allocate_groups(groups: tuple[tuple[LayerCache, ...], ...]) -> tuple[CacheGroup, ...]:
    """Zeroed buffers, one array per group."""
    return tuple(
        CacheGroup(
            layers=tuple(cache.layer.index for cache in members),
            layout=members[0].layout,
            past=_allocate_buffers(members),
        )
        for members in groups
    )


def allocate_variants(
    variants: Mapping[int, tuple[LayerCache, ...]],
) -> dict[int, tuple[CacheGroup, ...]]:
    """The groups as the generate graphs of each capacity see them, over the memory of the largest."""
    largest = allocate_groups(group_caches(variants[max(variants)]))
    return {
        capacity: tuple(
            _cut(group, members) for group, members in zip(largest, group_caches(caches), strict=True)
        )
        for capacity, caches in variants.items()
    }


def _cut(group: CacheGroup, members: tuple[LayerCache, ...]) -> CacheGroup:
    """A group with the layout of `members` in the same memory; itself where the layout is no other."""
    layout = members[0].layout
    if layout == group.layout:
        return group
    buffers, heads, _, channels = group.past.shape
    shape = (buffers, heads, layout.capacity, channels)
    past = group.past.reshape(-1)[: math.prod(shape)].reshape(shape)
    return CacheGroup(layers=group.layers, layout=layout, past=past)


def _allocate_buffers(members: tuple[LayerCache, ...]) -> Array:
    """Zeroed [2 L, KV, C, D] for the L layers of a group."""
    _, *rest = members[0].shape
    return allocate((2 * len(members), *rest), CACHE_ELEMENTS[members[0].cache_type].dtype)


def _plan_layer(layer: LayerSpec, config: LLMConfig) -> LayerCache:
    layout, key_layout = _layout_of(layer, config)
    return LayerCache(
        layer=layer,
        layout=layout,
        key_layout=key_layout,
        cache_type=_cache_type(layer, config.kv_precision),
    )


def _layout_of(layer: LayerSpec, config: LLMConfig) -> tuple[Layout, KeyLayout]:
    """The layout asked for; linear where the layer has no window or a windowed buffer would be no smaller."""
    window = layer.local_window_size
    linear = LinearLayout(capacity=config.capacity, local_window_size=window)
    if window < 0:
        return linear, KeyLayout.LINEAR
    windowed: Layout
    match config.kv_layout:
        case KVLayout.LINEAR:
            return linear, KeyLayout.LINEAR
        case KVLayout.GATHERED:
            smaller = window - 1 < config.capacity
            return linear, KeyLayout.GATHERED if smaller else KeyLayout.LINEAR
        case KVLayout.ROLLING:
            capacity = rolling_min_capacity(window) + config.kv_slack
            windowed = RollingLayout(capacity=capacity, local_window_size=window)
        case KVLayout.RING:
            least = ring_min_capacity(window, config.commit, block_size=config.max_generation_token_len)
            windowed = RingLayout(capacity=least + config.kv_slack, local_window_size=window)
        case _:
            assert_never(config.kv_layout)
    if windowed.capacity >= config.capacity:
        return linear, KeyLayout.LINEAR
    return windowed, KeyLayout[config.kv_layout.value]


def _cache_type(layer: LayerSpec, precision: KVPrecision) -> ov.Type:
    if layer.is_quantized and precision is not KVPrecision.MODEL:
        raise ConfigError(
            f"NPUSIM_KV_PRECISION={precision.value}: {layer.name} has a quantized cache "
            f"({layer.cache_type.get_type_name()}), which its scales belong to; leave MODEL"
        )
    match precision:
        case KVPrecision.F32:
            return ov.Type.f32
        case KVPrecision.F16:
            return ov.Type.f16
        case KVPrecision.MODEL:
            if layer.cache_type not in CACHE_ELEMENTS:
                raise ModelError(
                    f"{layer.name}: the KV cache is {layer.cache_type.get_type_name()}; "
                    "of float types f32 and f16 are kept, choose one with NPUSIM_KV_PRECISION"
                )
            return layer.cache_type
        case _:
            assert_never(precision)
