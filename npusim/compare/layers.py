"""Which attention layer differs first, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov

from npusim.compare.backends import Backend, RequestBackend
from npusim.compare.calls import Call
from npusim.compare.differences import Tolerance, row_differences
from npusim.compare.evidence import LayerRows, attention_options, collect_rows
from npusim.compare.explain import Explanation, explain
from npusim.compare.taps import Rows, attention_outputs, cut, tap
from npusim.compiled_llm import compile_model
from npusim.config_values import ConfigValue
from npusim.errors import ModelError, NpuSimError
from npusim.layer_numbers import layer_numbers
from transforms import GQANode, find_gqa, read_gqa

MOST_ROWS = 8
"""Rows that an explanation must hold for."""


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """One layer. limit: the greatest difference that is agreement; position: of the row that differs most.

    index: its place in the order of execution. number: what it goes by (`layer_numbers`).
    """

    index: int
    number: int
    name: str
    local_window_size: int
    max_abs_difference: float
    limit: float
    call: int
    position: int

    @property
    def diverges(self) -> bool:
        """Whether the layer differs by more than the limit."""
        return self.max_abs_difference > self.limit


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """All layers, and why the first that diverges does; later ones are given other inputs already.

    unexplained: why the first one's reason could not be looked for, "" where it was or none diverges.
    """

    layers: tuple[LayerDifference, ...]
    explanation: Explanation | None
    unexplained: str = ""

    @property
    def first(self) -> LayerDifference | None:
        """The first layer that diverges."""
        return next((layer for layer in self.layers if layer.diverges), None)


class LayerProbe:
    """The simulator with every attention output on show, run once for all backends."""

    def __init__(self, model: ov.Model, config: Mapping[str, ConfigValue], calls: Sequence[Call]) -> None:
        """model: as read, with GroupQueryAttention. config: of the simulator."""
        self._model = model
        self._config = config
        self._calls = calls
        self._layers = [read_gqa(node) for node in find_gqa(model)]
        self._numbers = layer_numbers([gqa.node.output(1).get_any_name() for gqa in self._layers])
        tapped = model.clone()
        self._widths = tap(tapped, attention_outputs(tapped))
        simulator = _simulator(tapped, config)
        self._ours = [cut(simulator.feed(call.tokens, call.position), self._widths)[1] for call in calls]

    def compare(self, backend: Backend, tolerance: Tolerance) -> LayerReport:
        """Make the calls on a tapped backend, as far as it takes them, and explain what differs.

        Raises ModelError where the backend's model has other layers than the simulator's.
        """
        theirs = self._attention_of(backend)
        layers = tuple(
            self._difference(index, [rows[index] for rows in theirs], tolerance)
            for index in range(len(self._layers))
        )
        report = LayerReport(layers=layers, explanation=None)
        if report.first is None:
            return report
        try:
            explanation = self._explain(report.first, [rows[report.first.index] for rows in theirs])
        except ModelError as error:
            return LayerReport(layers=layers, explanation=None, unexplained=str(error))
        return LayerReport(layers=layers, explanation=explanation)

    def _attention_of(self, backend: Backend) -> list[tuple[Rows, ...]]:
        width = self._calls[0].logits.shape[1] + sum(self._widths)
        answers: list[tuple[Rows, ...]] = []
        for call in self._calls:
            try:
                rows = backend.feed(call.tokens, call.position)
            except NpuSimError as error:
                if not answers:
                    raise ModelError(
                        f"the model with its attention on show cannot be run: {error}"
                    ) from error
                break  # said where the logits are compared
            if rows.shape[1] != width:
                raise ModelError(
                    f"logits and attention of all layers are {rows.shape[1]} columns there and {width} here: "
                    "the two models do not have the same layers"
                )
            answers.append(cut(rows, self._widths)[1])
        return answers

    def _difference(self, index: int, theirs: Sequence[Rows], tolerance: Tolerance) -> LayerDifference:
        gqa = self._layers[index]
        distances = self._distances(index, theirs)
        call, position = max(distances, key=lambda at: distances[at])
        largest = max(float(np.abs(rows[index]).max()) for rows in self._ours)
        return LayerDifference(
            index=index,
            number=self._numbers[index],
            name=gqa.name,
            local_window_size=gqa.local_window_size,
            max_abs_difference=distances[call, position],
            limit=tolerance.attention * largest,
            call=call,
            position=position,
        )

    def _distances(self, index: int, theirs: Sequence[Rows]) -> dict[tuple[int, int], float]:
        """By (call, position), how far the layer's answers lie apart."""
        distances = {}
        for at, rows in enumerate(theirs):
            stop = self._calls[at].stop
            ours = self._ours[at][index][-len(rows) :]
            for row, distance in enumerate(row_differences(ours, rows)):
                distances[at, stop - len(rows) + row] = float(distance)
        return distances

    def _explain(self, layer: LayerDifference, theirs: Sequence[Rows]) -> Explanation:
        gqa = self._layers[layer.index]
        options = attention_options(gqa)
        distances = self._distances(layer.index, theirs)
        beyond = {at: distance for at, distance in distances.items() if distance > layer.limit}
        wanted = _telling(beyond)
        calls = self._calls[: len(theirs)]
        ours = [rows[layer.index] for rows in self._ours]
        rows = collect_rows(
            calls,
            self._inputs(layer.index, calls),
            list(zip(ours, theirs, strict=False)),
            wanted,
            gqa.head_size,
        )
        rows.sort(key=lambda row: row.difference, reverse=True)
        return explain(rows, options, gqa.local_window_size, layer.limit)

    def _inputs(self, index: int, calls: Sequence[Call]) -> list[LayerRows]:
        """What enters the layer in each call, from a simulator that shows it."""
        tapped = self._model.clone()
        gqa: GQANode = read_gqa(find_gqa(tapped)[index])
        widths = tap(tapped, [gqa.query, gqa.key, gqa.value])
        simulator = _simulator(tapped, self._config)
        shown = [cut(simulator.feed(call.tokens, call.position), widths)[1] for call in calls]
        return [LayerRows(query=query, key=key, value=value) for query, key, value in shown]


def _simulator(model: ov.Model, config: Mapping[str, ConfigValue]) -> RequestBackend:
    return RequestBackend(compile_model(model, config).create_infer_request())


def _telling(distances: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Rows to explain: half those that differ most, half spread over the rest."""
    by_distance = sorted(distances, key=lambda at: distances[at], reverse=True)
    worst, rest = by_distance[: MOST_ROWS // 2], sorted(by_distance[MOST_ROWS // 2 :])
    step = max(1, len(rest) // (MOST_ROWS - MOST_ROWS // 2))
    return worst + rest[::step][: MOST_ROWS - len(worst)]
