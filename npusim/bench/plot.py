"""Draw step times: over context length, or side by side at one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.bench.machine import Machine
from npusim.bench.report import ContextResult
from npusim.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIMIT_LABEL = "reading memory (estimate)"


def check_writable(path: Path) -> None:
    """ConfigError where no PNG can be written to `path`: known before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib (pip install matplotlib, the extra plot)") from error
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path}: a picture is written as PNG; give a name that ends in .png")
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file():
            raise ConfigError(f"{path}: no regular file; give another name")
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written ({error.strerror}); give another file")


def draw(path: Path, results: Sequence[ContextResult], machine: Machine, model: str) -> None:
    """Write a PNG: per runtime a line (of one context a bar) with its spread, and what reading memory takes.

    model: what the title calls it. Raises ConfigError where the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    if len(results) == 1:
        _draw_bars(axes, results[0], machine)
    else:
        _draw_lines(axes, results, machine)
    axes.set(ylabel="time per token (ms)", ylim=(0, None))
    axes.set_title(f"{model}: one token at a time, {machine.threads} threads", wrap=True)
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(results[0].runtimes) + 1)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        pyplot.close(figure)


def _draw_lines(axes: Axes, results: Sequence[ContextResult], machine: Machine) -> None:
    contexts = [result.context for result in results]
    for index, first in enumerate(results[0].runtimes):
        samples = [result.runtimes[index].samples for result in results]
        axes.plot(contexts, [1e3 * each.median for each in samples], marker="o", label=first.runtime.value)
        low, high = zip(*(each.spread for each in samples), strict=True)
        axes.fill_between(contexts, [1e3 * s for s in low], [1e3 * s for s in high], alpha=0.15)
    limits = [1e3 * result.limit(machine) for result in results]
    axes.plot(contexts, limits, linestyle="--", color="gray", label=LIMIT_LABEL)
    axes.set_xlabel("context (tokens)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])


def _draw_bars(axes: Axes, result: ContextResult, machine: Machine) -> None:
    for each in result.runtimes:
        median, (low, high) = each.samples.median, each.samples.spread
        spread = [[1e3 * (median - low)], [1e3 * (high - median)]]
        axes.bar([each.runtime.value], [1e3 * median], yerr=spread, capsize=6)
    axes.axhline(1e3 * result.limit(machine), linestyle="--", color="gray", label=LIMIT_LABEL)
    axes.set_xlabel(f"context {result.context} tokens")
