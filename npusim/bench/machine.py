"""What the machine allows: threads, load, and the rate at which memory can be read."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

_BUFFER_BYTES = 256 * 2**20
"""More than caches hold."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """threads: cores this process may use. load: mean number of runnable processes over the last minute.

    bandwidth: bytes per second that all threads together read from memory, the best of several tries.
    """

    threads: int
    load: float
    bandwidth: float


def describe_machine(*, tries: int = 5, buffer_bytes: int = _BUFFER_BYTES) -> Machine:
    """Measure; a busy machine can only make the bandwidth look smaller, so the best try counts."""
    threads = available_threads()
    return Machine(
        threads=threads, load=os.getloadavg()[0], bandwidth=_read_bandwidth(threads, tries, buffer_bytes)
    )


def available_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_bandwidth(threads: int, tries: int, buffer_bytes: int) -> float:
    parts = np.array_split(np.ones(buffer_bytes // 4, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(tries):
            began = time.perf_counter()
            list(pool.map(np.max, parts))  # numpy reads without holding the interpreter
            best = max(best, buffer_bytes / (time.perf_counter() - began))
    return best
