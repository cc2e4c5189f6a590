"""What the two reference caches share: their configuration, the statement of who sees what, and its oracle.

A cache decides placement and says which keys each query may see (`AttendSpec`); it never sees a query vector.
`attend_spec` turns that statement into arithmetic; it never sees a position. NumPy only, nothing is fast.

Letters: B batch, N query heads, K key/value heads, S new rows, T rows of history, H head size, V value size.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from npusim.errors import ConfigError, InputError
from npusim.reference.numbers import check_rows, is_finite_number, is_integer

Rows: TypeAlias = NDArray[np.floating[Any]]
Mask: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.int64]

FLOATS = (np.float16, np.float32, np.float64)


class CacheSizing(Enum):
    """When memory is taken. Neither goes beyond the capacity, and results do not depend on it."""

    STATIC = "static"
    """All rows up front."""
    DYNAMIC = "dynamic"
    """None up front; doubled as needed, clamped to the most that can be needed."""


class MaskKind(Enum):
    """How a step's visibility is stated."""

    NONE = "none"
    """Every query sees every key."""
    CAUSAL = "causal"
    """Row i sees keys 0..i; only for a square step (no history before it)."""
    EXPLICIT = "explicit"
    """As the mask says."""


@dataclass(frozen=True, eq=False)
class AttendSpec:
    """Which keys each query of a step sees; `mask` is boolean [S, T], True = attend, for EXPLICIT alone."""

    kind: MaskKind
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if (self.kind is MaskKind.EXPLICIT) != (self.mask is not None):
            given = "no mask" if self.mask is None else "a mask"
            raise InputError(f"AttendSpec {self.kind.name} with {given}; a mask goes with EXPLICIT alone")
        if self.mask is not None and not isinstance(self.mask, np.ndarray):
            raise InputError(f"mask is a {type(self.mask).__name__}; give a numpy array")
        if self.mask is not None and (self.mask.dtype != np.bool_ or self.mask.ndim != 2):
            raise InputError(f"mask is {self.mask.dtype} {self.mask.shape}; it must be bool [S, T]")

    @classmethod
    def explicit(cls, mask: Mask) -> "AttendSpec":
        """An EXPLICIT spec with a mask of its own that no layer can write to, as layers share it."""
        own = mask.copy()
        own.setflags(write=False)
        return cls(MaskKind.EXPLICIT, own)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes of a reference cache, checked once.

    `windows` is one local_window_size for all layers or one per layer; -1 is none, a window counts the query.
    `capacity` is the most tokens (contiguous) or cells (cells) that can be stored. `window_slack` is how many
    rows a windowed layer keeps beyond the W - 1 it needs, so that more can be rewound (contiguous only).
    """

    num_layers: int
    kv_num_heads: int
    head_size: int
    capacity: int
    v_head_size: int | None = None
    windows: int | tuple[int, ...] = -1
    window_slack: int = 0
    sizing: CacheSizing = CacheSizing.STATIC
    dtype: type[np.floating[Any]] = np.float32
    batch_size: int = 1

    def __post_init__(self) -> None:
        counts = ("num_layers", "kv_num_heads", "head_size", "capacity", "batch_size")
        for name in counts:
            self._check_least(name, getattr(self, name), 1)
        self._check_least("v_head_size", self.value_size, 1)
        self._check_least("window_slack", self.window_slack, 0)
        self._check_windows()
        # A list stays the caller's, and a small integer type of numpy's would overflow in sums.
        object.__setattr__(self, "windows", tuple(int(window) for window in self._windows))
        for name in (*counts, "window_slack"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if not isinstance(self.sizing, CacheSizing):
            raise ConfigError(f"sizing is {self.sizing!r}; give CacheSizing.STATIC or CacheSizing.DYNAMIC")
        if self.dtype not in FLOATS:
            raise ConfigError(f"dtype is {self.dtype}; give np.float16, np.float32 or np.float64")

    @staticmethod
    def _check_least(name: str, value: int, least: int) -> None:
        if not is_integer(value) or value < least:
            raise ConfigError(f"{name} is {value!r}; give an integer of {least} or more")

    def _check_windows(self) -> None:
        if not isinstance(self.windows, tuple | list) and not is_integer(self.windows):
            raise ConfigError(f"windows is {self.windows!r}; give an integer for all layers or one each")
        if len(self._windows) not in (1, self.num_layers):
            raise ConfigError(
                f"windows has {len(self._windows)} entries for {self.num_layers} layers; "
                "give one for all layers or one per layer"
            )
        for layer, window in enumerate(self._windows):
            if not is_integer(window) or window == 0 or window < -1:
                raise ConfigError(f"windows[{layer}] is {window!r}; give -1 for none, or 1 or more")

    @property
    def _windows(self) -> tuple[int, ...]:
        given = self.windows if isinstance(self.windows, tuple | list) else (self.windows,)
        return tuple(given)

    @property
    def value_size(self) -> int:
        """V: the size of a value row."""
        return self.head_size if self.v_head_size is None else self.v_head_size

    def window(self, layer: int) -> int:
        """The local_window_size of a layer."""
        return self._windows[layer if len(self._windows) > 1 else 0]

    def num_slots(self, layer: int) -> int:
        """Rows a contiguous cache owns for a layer: all of the capacity, or what its window needs."""
        window = self.window(layer)
        if window < 0:
            return self.capacity
        return min(self.capacity, max(1, window - 1 + self.window_slack))


def check_step_rows(config: CacheConfig, layer: int, key: Rows, value: Rows, position: Indices) -> None:
    """InputError unless key [B, K, S, H], value [B, K, S, V] and position [S] fit the layer."""
    if not is_integer(layer) or not 0 <= layer < config.num_layers:
        raise InputError(f"layer is {layer!r}; the cache has layers 0..{config.num_layers - 1}")
    for name, rows in (("key", key), ("value", value), ("position", position)):
        check_rows(name, rows)
    if position.ndim != 1 or not np.issubdtype(position.dtype, np.integer) or position.size == 0:
        raise InputError(f"position is {position.dtype} {position.shape}; give integers [S], S >= 1")
    heads = (config.batch_size, config.kv_num_heads, position.size)
    for name, rows, size in (("key", key, config.head_size), ("value", value, config.value_size)):
        if rows.shape != (*heads, size):
            raise InputError(f"layer {layer}: {name} has shape {rows.shape}, it must be {(*heads, size)}")


def band_spec(num_new: int, num_keys: int, window: int) -> AttendSpec:
    """The spec of S new rows that end an unbroken run of T keys in the order of their positions.

    Row i is key T - S + i, so with the distance d = (T - S + i) - j key j is seen iff 0 <= d (< window).
    Raises InputError unless 1 <= S <= T and window is -1 (none) or 1 or more.
    """
    for name, number in (("num_new", num_new), ("num_keys", num_keys), ("window", window)):
        if not is_integer(number):
            raise InputError(f"{name} is {number!r}; give an integer")
    if not 1 <= num_new <= num_keys:
        raise InputError(
            f"{num_new} new rows and {num_keys} keys; a step has a row, and each row its own key"
        )
    if window == 0 or window < -1:
        raise InputError(f"window is {window}; give -1 for none, or 1 or more (it counts the query)")
    windowed = 0 < window < num_keys
    if num_new == 1 and not windowed:
        return AttendSpec(MaskKind.NONE)
    if num_new == num_keys and not windowed:
        return AttendSpec(MaskKind.CAUSAL)
    query = num_keys - num_new + np.arange(num_new)
    distance = query[:, None] - np.arange(num_keys)[None, :]  # [S, T]
    visible = distance >= 0
    if windowed:
        visible &= distance < window
    return AttendSpec.explicit(visible)


def attend_spec(
    query: Rows,
    key: Rows,
    value: Rows,
    spec: AttendSpec,
    *,
    scale: float | None = None,
    head_sink: Rows | None = None,
    out_dtype: type[np.floating[Any]] = np.float32,
) -> Rows:
    """Attention of query [B, N, S, H] over key [B, K, T, H] and value [B, K, T, V] -> [B, N, S, V].

    In float64 whatever the inputs, then cast to `out_dtype`. `scale` None is H**-0.5; `head_sink` [N] is a
    logit per head that takes weight and gives no value. Keys that are not seen do not enter the arithmetic.
    Raises InputError for what does not fit, and for a row that sees no key.
    """
    _check_attended(query, key, value)
    num_heads, num_new, head_size = query.shape[1:]
    kv_num_heads, num_keys = key.shape[1:3]
    _check_options(num_heads, scale, head_sink, out_dtype)
    visible = _visible(spec, num_new, num_keys)
    factor = head_size**-0.5 if scale is None else scale
    sink = np.full(num_heads, -np.inf) if head_sink is None else head_sink.astype(np.float64)
    output = np.empty((*query.shape[:3], value.shape[3]), out_dtype)
    for batch, head, row in np.ndindex(*query.shape[:3]):
        kv_head = head // (num_heads // kv_num_heads)
        keys = key[batch, kv_head, visible[row]].astype(np.float64)  # [seen, H]
        values = value[batch, kv_head, visible[row]].astype(np.float64)  # [seen, V]
        scores = keys @ query[batch, head, row].astype(np.float64) * factor
        top = max(scores.max(initial=-np.inf), sink[head])
        weights = np.exp(scores - top)
        output[batch, head, row] = weights @ values / (weights.sum() + np.exp(sink[head] - top))
    return output


def _check_attended(query: Rows, key: Rows, value: Rows) -> None:
    """InputError unless the three are [B, N, S, H], [B, K, T, H] and [B, K, T, V], and K divides N."""
    for name, rows in (("query", query), ("key", key), ("value", value)):
        check_rows(name, rows)
        if rows.ndim != 4 or 0 in rows.shape:
            raise InputError(
                f"{name} has shape {rows.shape}; give [batch, heads, rows, size], none of them 0"
            )
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]) or key.shape[:3] != value.shape[:3]:
        raise InputError(
            f"query {query.shape}, key {key.shape} and value {value.shape}: query and key must agree in "
            "batch and head size, key and value in batch, heads and rows"
        )
    if query.shape[1] % key.shape[1]:
        raise InputError(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key/value heads")


def _check_options(num_heads: int, scale: object, head_sink: Rows | None, out_dtype: object) -> None:
    if scale is not None and not is_finite_number(scale):
        raise InputError(f"scale is {scale!r}; give a finite number, or None for head_size**-0.5")
    if head_sink is not None:
        check_rows("head_sink", head_sink)
        if head_sink.shape != (num_heads,) or not np.isfinite(head_sink).all():
            raise InputError(f"head_sink is {head_sink}; give a finite logit for each of {num_heads} heads")
    if out_dtype not in FLOATS:
        raise InputError(f"out_dtype is {out_dtype}; give np.float16, np.float32 or np.float64")


def _visible(spec: AttendSpec, num_new: int, num_keys: int) -> Mask:
    """The spec as [S, T]; InputError where it does not fit, or leaves a row without a key."""
    if not isinstance(spec, AttendSpec):
        raise InputError(f"the spec is a {type(spec).__name__}; give an AttendSpec")
    match spec.kind:
        case MaskKind.NONE:
            return np.ones((num_new, num_keys), np.bool_)
        case MaskKind.CAUSAL:
            if num_new != num_keys:
                raise InputError(f"CAUSAL with {num_new} queries and {num_keys} keys would hide history")
            return np.tri(num_new, dtype=np.bool_)
        case MaskKind.EXPLICIT:
            mask = spec.mask
            if mask is None or mask.shape != (num_new, num_keys):
                shape = None if mask is None else mask.shape
                raise InputError(f"mask has shape {shape}, the step needs {(num_new, num_keys)}")
            if not mask.any(axis=1).all():
                raise InputError(f"query rows {np.flatnonzero(~mask.any(axis=1)).tolist()} see no key")
            return mask
        case _:
            assert_never(spec.kind)
