"""Draw step time over context length."""

from collections.abc import Sequence
from pathlib import Path

from npusim.bench.machine import Machine
from npusim.bench.report import ContextResult
from npusim.errors import ConfigError


def check_writable(path: Path) -> None:
    """ConfigError where no PNG can be written to `path`: known before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install 'npusim[plot]'") from error
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
    """Write a PNG: a line per runtime with its spread, and the time that reading memory takes.

    model: what the title calls it. Raises ConfigError where the file cannot be written.
    """
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
    axes.plot(contexts, limits, linestyle="--", color="gray", label="reading memory (estimate)")
    axes.set(xlabel="context (tokens)", ylabel="time per token (ms)", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.set_title(f"{model}: one token at a time, {machine.threads} threads", wrap=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        pyplot.close(figure)
