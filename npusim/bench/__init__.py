"""Benchmarks: synthetic models, interleaved timing, other runtimes beside npusim, and the goals it is held to."""
