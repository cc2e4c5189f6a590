"""The whole comparison: record the simulator's calls, make them on every backend, look into the layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import openvino as ov

from npusim.cache_plan import LayerCache
from npusim.compare.backends import BackendKind, BackendSetup, open_backend, unavailable_reason
from npusim.compare.calls import Call, record_calls
from npusim.compare.differences import (
    EXACT,
    QUANTIZED,
    ROUNDED,
    BackendDifferences,
    Tolerance,
    compare_calls,
)
from npusim.compare.layers import LayerProbe, LayerReport
from npusim.compare.verdict import verdict_lines
from npusim.compiled_llm import compile_model
from npusim.config_values import ConfigValue
from npusim.errors import ConfigError, ModelError
from npusim.model_file import read_model
from npusim.model_spec import ModelSpec
from npusim.speculative import Drafter

FLOAT_CACHES = (ov.Type.f32, ov.Type.f16, ov.Type.bf16)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare.

    model: the simulator's, an ONNX file. prompt: token ids; num_steps: target steps after it, with the
    drafter's guesses or without. config: of the simulator, as `npusim.compile_model` takes it; npuw_config:
    of NPUW, as `npusim.npuw.compile_model` does. candidate: what the backends run, the same file where it is
    None. kinds: backends, each of which must be usable; None takes those that are. layers: look into the
    attention of each layer too. max_abs_difference: between logits that agree, None for what the backend's
    arithmetic allows.

    Raises ConfigError for a max_abs_difference that is below 0 or not finite.
    """

    model: Path
    prompt: Sequence[int]
    num_steps: int
    config: Mapping[str, ConfigValue] = field(default_factory=dict)
    npuw_config: Mapping[str, ConfigValue] = field(default_factory=dict)
    drafter: Drafter | None = None
    num_draft_tokens: int = 4
    candidate: Path | None = None
    kinds: Sequence[BackendKind] | None = None
    layers: bool = False
    max_abs_difference: float | None = None

    def __post_init__(self) -> None:
        tolerance = self.max_abs_difference
        if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
            raise ConfigError(f"a tolerance of {tolerance:g}; give a finite number of at least 0")


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """One backend. layers: None where they were not looked into."""

    kind: BackendKind
    differences: BackendDifferences
    layers: LayerReport | None

    @property
    def agrees(self) -> bool:
        """Whether all logits do, and all attention outputs that were looked at."""
        return self.differences.agrees and (self.layers is None or self.layers.first is None)


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """The calls, a report for each backend, and why others were left out.

    unreached_windows: windows so long that no row was ever out of their sight.
    """

    calls: tuple[Call, ...]
    backends: tuple[BackendReport, ...]
    left_out: Mapping[BackendKind, str]
    unreached_windows: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """Whether every backend does."""
        return all(backend.agrees for backend in self.backends)

    def __str__(self) -> str:
        """A line for each backend, and more where one differs."""
        return "\n".join(line for backend in self.backends for line in verdict_lines(backend, self.calls))


def compare(asked: Comparison, on_part: Callable[[], None] = lambda: None) -> ComparisonReport:
    """Run the comparison; `on_part` is called after the simulator and after each backend.

    One backend is alive at a time, beside at most one simulator.

    Raises ModelError or ConfigError for what the simulator does not take, ModelError also for a backend that
    was asked for and cannot be used.
    """
    model = read_model(asked.model)
    compiled = compile_model(model, asked.config)
    calls = record_calls(
        compiled.create_infer_request(),
        asked.prompt,
        num_steps=asked.num_steps,
        drafter=asked.drafter,
        num_draft_tokens=asked.num_draft_tokens,
    )
    spec, caches = compiled.spec, compiled.caches
    del compiled
    probe = LayerProbe(model, asked.config, calls) if asked.layers else None
    on_part()
    setup = _setup(asked, spec, max(call.stop for call in calls))
    reports, left_out = [], {}
    for kind in asked.kinds or tuple(BackendKind):
        try:
            _check_usable(kind, setup.path)
            reports.append(_report(kind, setup, calls, _tolerance(asked, kind, caches), probe))
        except (ModelError, ConfigError) as error:
            if asked.kinds is not None:
                raise ModelError(f"{kind.value}: {error}") from error
            left_out[kind] = str(error)
        on_part()
    if not reports:
        raise ModelError(f"nothing to compare with: {'; '.join(dict.fromkeys(left_out.values()))}")
    return ComparisonReport(
        calls=tuple(calls),
        backends=tuple(reports),
        left_out=left_out,
        unreached_windows=_unreached(spec, calls),
    )


def _report(
    kind: BackendKind,
    setup: BackendSetup,
    calls: Sequence[Call],
    tolerance: Tolerance,
    probe: LayerProbe | None,
) -> BackendReport:
    differences = compare_calls(calls, open_backend(kind, setup), tolerance)
    layers = None
    if probe is not None:
        layers = probe.compare(open_backend(kind, replace(setup, tapped=True)), tolerance)
    return BackendReport(kind=kind, differences=differences, layers=layers)


def _setup(asked: Comparison, spec: ModelSpec, max_length: int) -> BackendSetup:
    return BackendSetup(
        path=asked.candidate or asked.model,
        vocab_size=spec.vocab_size,
        max_length=max_length,
        channels={
            name: layer.cache_channels for layer in spec.layers for name in (layer.past_key, layer.past_value)
        },
        npuw_config=asked.npuw_config,
    )


def _check_usable(kind: BackendKind, path: Path) -> None:
    reason = unavailable_reason(kind)
    if reason is not None:
        raise ModelError(f"cannot be used here: {reason}")
    if kind is BackendKind.ORT and path.suffix == ".xml":
        raise ModelError(f"{path} is OpenVINO IR; ONNX Runtime takes ONNX files")


def _tolerance(asked: Comparison, kind: BackendKind, caches: Sequence[LayerCache]) -> Tolerance:
    types = {cache.cache_type for cache in caches}
    if not types <= set(FLOAT_CACHES):
        tolerance = QUANTIZED
    elif kind is BackendKind.NPUW or types != {ov.Type.f32}:
        tolerance = ROUNDED
    else:
        tolerance = EXACT
    if asked.max_abs_difference is None:
        return tolerance
    return replace(tolerance, absolute=asked.max_abs_difference, relative=0.0)


def _unreached(spec: ModelSpec, calls: Sequence[Call]) -> tuple[int, ...]:
    longest = max(call.stop for call in calls)
    windows = {layer.local_window_size for layer in spec.layers}
    return tuple(sorted(window for window in windows if window >= longest))
