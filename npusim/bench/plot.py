"""Draw step time over context length."""

from collections.abc import Sequence
from pathlib import Path

from npusim.bench.machine import Machine
from npusim.bench.report import ContextResult
from npusim.errors import ConfigError


def check_available() -> None:
    """ConfigError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install 'npusim[plot]'") from error


def draw(path: Path, results: Sequence[ContextResult], machine: Machine) -> None:
    """Write a PNG: a line per runtime with its spread, and the time that reading memory takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    contexts = [result.context for result in results]
    for index, first in enumerate(results[0].runtimes):
        samples = [result.runtimes[index].samples for result in results]
        axes.plot(contexts, [1e3 * each.median for each in samples], marker="o", label=first.runtime.value)
        low, high = zip(*(each.spread for each in samples), strict=True)
        axes.fill_between(contexts, [1e3 * s for s in low], [1e3 * s for s in high], alpha=0.15)
    limits = [1e3 * result.limit(machine) for result in results]
    axes.plot(contexts, limits, linestyle="--", color="gray", label="reading memory")
    axes.set(xlabel="context (tokens)", ylabel="time per token (ms)", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
