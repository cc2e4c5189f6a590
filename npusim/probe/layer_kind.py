"""What of an attention layer decides how a runtime treats it."""

from dataclasses import dataclass

from npusim.onnx_attention import AttentionLayer, Sink

MOST_WINDOW = 32
"""Larger windows are probed as this one: so few tokens show whether a window is kept."""

CACHE_TYPES = ("float32", "float16")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers of one kind are probed once. rotated_channels: None without rotary embedding."""

    num_heads: int
    kv_num_heads: int
    head_size: int
    local_window_size: int
    sink: Sink
    rotated_channels: int | None
    interleaved: bool
    rolling_cache: bool
    cache_type: str


def layer_kind(layer: AttentionLayer) -> LayerKind | None:
    """The kind of a layer; None for what is not probed.

    That is a layer that the simulator would not run either, one with a quantized cache, and one whose sizes
    the file leaves open.
    """
    rotary = layer.rotary
    is_plain = layer.causal and layer.has_past and not layer.softcap and not layer.has_qk_norm
    is_open = layer.head_size is None or (rotary is not None and rotary.rotated_channels is None)
    if layer.head_size is None or is_open or not is_plain or layer.kv_cache_type not in CACHE_TYPES:
        return None
    return LayerKind(
        num_heads=layer.num_heads,
        kv_num_heads=layer.kv_num_heads,
        head_size=layer.head_size,
        local_window_size=min(layer.local_window_size, MOST_WINDOW),
        sink=layer.sink,
        rotated_channels=None if rotary is None else rotary.rotated_channels,
        interleaved=rotary is not None and rotary.interleaved,
        rolling_cache=layer.rolling_cache,
        cache_type=layer.kv_cache_type,
    )
