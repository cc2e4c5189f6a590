"""Benchmarks: synthetic models, interleaved timing, other runtimes beside npusim, goals."""
