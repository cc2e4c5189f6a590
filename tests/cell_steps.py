"""Steps of the cells held against the log."""

import numpy as np
from cache_log import HEAD_SIZE, NUM_HEADS, SCALE, Entry, Log, cache_config, flat_step, layer_rows

from npusim.reference.caches import AttendSpec, Rows, attend_spec
from npusim.reference.cells import CellReferenceCache


def cells_of(**changes: object) -> CellReferenceCache:
    """A cache of cells with the test configuration."""
    return CellReferenceCache(cache_config(**changes))


def log_of(cache: CellReferenceCache, seed: int = 3) -> Log:
    """An empty log for the cache."""
    return Log(cache.config, np.random.default_rng(seed))


def serve(cache: CellReferenceCache, entries: list[Entry]) -> list[tuple[Rows, Rows, AttendSpec]]:
    """One whole step; what each layer got back."""
    step = flat_step(entries)
    cache.begin_step(step)
    return [
        cache.update_and_fetch(layer, *layer_rows(entries, layer), step.positions)
        for layer in range(cache.config.num_layers)
    ]


def store(cache: CellReferenceCache, log: Log, **counts: int) -> list[tuple[Rows, Rows, AttendSpec]]:
    """A step of so many new tokens each, sequences named s0, s1 ..; every output must be the log's."""
    entries = [
        entry
        for name, count in counts.items()
        for entry in log.new_entries(int(name[1:]), cache.seq_len(int(name[1:])), count)
    ]
    log.entries += entries
    histories = serve(cache, entries)
    for layer, history in enumerate(histories):
        query = log.rng.normal(size=(1, NUM_HEADS, len(entries), HEAD_SIZE))
        output = attend_spec(query, *history, scale=SCALE, out_dtype=np.float64)
        expected = [log.attention(layer, entry, query[0, :, row]) for row, entry in enumerate(entries)]
        np.testing.assert_allclose(output[0].swapaxes(0, 1), expected, rtol=1e-9, atol=1e-12)
    return histories


def masks(histories: list[tuple[Rows, Rows, AttendSpec]]) -> list[list[list[int]]]:
    """Per layer and row the cells seen."""
    seen = []
    for _, _, spec in histories:
        assert spec.mask is not None
        seen.append([np.flatnonzero(row).tolist() for row in spec.mask])
    return seen
