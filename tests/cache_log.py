"""A list of everything ever stored, and attention by looping over it: what a cache is held against."""

from dataclasses import dataclass, field

import numpy as np

from npusim.reference.caches import AttendSpec, CacheConfig, Rows
from npusim.reference.cell_tags import FlatStep
from npusim.reference.contiguous import ContiguousReferenceCache

NUM_HEADS, KV_NUM_HEADS, HEAD_SIZE, V_HEAD_SIZE = 6, 2, 5, 3
SCALE = 0.7  # not HEAD_SIZE ** -0.5
CAPACITY = 13


def cache_config(**changes: object) -> CacheConfig:
    """Four layers, two of them windowed; sizes that differ from each other and from every default."""
    given: dict[str, object] = {
        "num_layers": 4,
        "kv_num_heads": KV_NUM_HEADS,
        "head_size": HEAD_SIZE,
        "v_head_size": V_HEAD_SIZE,
        "capacity": CAPACITY,
        "windows": (4, -1, 4, 6),
        "dtype": np.float64,
    }
    return CacheConfig(**(given | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Entry:
    """One stored token: its rows of each layer, key [L, K, H] and value [L, K, V]."""

    sequence: int
    position: int
    key: Rows
    value: Rows


@dataclass
class Log:
    """Entries in the order they came, of all sequences."""

    config: CacheConfig
    rng: np.random.Generator
    entries: list[Entry] = field(default_factory=list)

    def new_entries(self, sequence: int, first: int, count: int) -> list[Entry]:
        """Tokens with rows of their own, not stored yet."""
        shape = (self.config.num_layers, KV_NUM_HEADS)
        return [
            Entry(
                sequence,
                first + i,
                self.rng.normal(size=(*shape, HEAD_SIZE)),
                self.rng.normal(size=(*shape, V_HEAD_SIZE)),
            )
            for i in range(count)
        ]

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return sum(entry.sequence == sequence for entry in self.entries)

    def drop(self, sequence: int, start: int) -> None:
        """Forget a sequence from a position on."""
        self.entries = [e for e in self.entries if e.sequence != sequence or e.position < start]

    def fork(self, source: int, target: int, upto: int) -> None:
        """The same rows under another name."""
        shared = [e for e in self.entries if e.sequence == source and e.position < upto]
        self.entries += [Entry(target, e.position, e.key, e.value) for e in shared]

    def attention(self, layer: int, entry: Entry, query: Rows) -> Rows:
        """The row of query [N, H] at the entry's place, [N, V]; the entry must be stored."""
        window = self.config.windows[layer % len(self.config.windows)]
        seen = [
            e
            for e in self.entries
            if e.sequence == entry.sequence
            and e.position <= entry.position
            and (window == -1 or entry.position - window < e.position)
        ]
        output = np.zeros((NUM_HEADS, V_HEAD_SIZE))
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // KV_NUM_HEADS)
            weights = [np.exp(SCALE * np.dot(query[head], e.key[layer, kv_head])) for e in seen]
            for weight, e in zip(weights, seen, strict=True):
                output[head] += weight / sum(weights) * e.value[layer, kv_head]
        return output


def layer_rows(entries: list[Entry], layer: int) -> tuple[Rows, Rows]:
    """The entries' rows of a layer as key [1, K, n, H] and value [1, K, n, V]."""
    key = np.stack([entry.key[layer] for entry in entries], axis=1)
    value = np.stack([entry.value[layer] for entry in entries], axis=1)
    return key[None], value[None]


def flat_step(entries: list[Entry]) -> FlatStep:
    """The entries as a step of the cells; tokens do not matter to a cache."""
    return FlatStep(
        tokens=np.zeros(len(entries), np.int64),
        positions=np.array([entry.position for entry in entries]),
        sequences=np.array([entry.sequence for entry in entries]),
        last_rows={entry.sequence: row for row, entry in enumerate(entries)},
    )


def feed(cache: ContiguousReferenceCache, count: int, marker: float = 0.0) -> list[AttendSpec]:
    """A step whose rows are their own positions (plus a marker); the spec of each layer."""
    config = cache.config
    position = cache.length + np.arange(count)
    heads = (config.batch_size, config.kv_num_heads, count)
    specs = []
    for layer in range(config.num_layers):
        key = np.broadcast_to(position[:, None] + marker, (*heads, config.head_size))
        value = np.broadcast_to(position[:, None] + marker, (*heads, config.value_size))
        specs.append(cache.update_and_fetch(layer, key, value, position)[2])
    return specs


def peek(cache: ContiguousReferenceCache, layer: int) -> list[float]:
    """Key history that the next token of a layer would see, itself included.

    The step is abandoned, so the cache needs a second layer.
    """
    config = cache.config
    heads = (config.batch_size, config.kv_num_heads, 1)
    key, value = np.full((*heads, config.head_size), -1.0), np.full((*heads, config.value_size), -1.0)
    history, value_history, _ = cache.update_and_fetch(layer, key, value, np.array([cache.length]))
    cache.abandon_step()
    assert np.array_equal(history[0, 0, :, 0], value_history[-1, -1, :, -1])
    return history[0, 0, :, 0].tolist()
