"""Write down what one call of a request did to the cache, for traces."""

from dataclasses import dataclass

from npusim.kv_manager import CacheGroup
from npusim.static_graph import LogitsArray
from npusim.step_inputs import StepInputs
from npusim.trace import StepRecord, WindowRecord, logits_sha256, visible_span


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds of one call."""

    host: float
    graph: float


def record_call(
    step: StepInputs,
    groups: tuple[CacheGroup, ...],
    *,
    stored_before: int,
    times: CallTimes,
    outcome: LogitsArray | Exception,
) -> StepRecord:
    """The record of a call that returned logits or ended in an exception.

    groups: where the call put its rows, empty where that is not known. stored_before: tokens that the call
    before left stored.
    """
    failed = isinstance(outcome, Exception)
    return StepRecord(
        stage=step.stage,
        tokens=tuple(step.tokens.tolist()),
        positions=tuple(step.positions.tolist()),
        error=type(outcome).__name__ if isinstance(outcome, Exception) else "",
        trimmed=0 if failed or step.start == 0 else stored_before - step.start,
        windows=() if failed else _windows(groups, range(step.start, step.start + len(step.tokens))),
        host_seconds=times.host,
        graph_seconds=times.graph,
        logits_sha256="" if isinstance(outcome, Exception) else logits_sha256(outcome),
    )


def _windows(groups: tuple[CacheGroup, ...], positions: range) -> tuple[WindowRecord, ...]:
    """One entry per distinct window, the full layers' (-1) first."""
    layouts = {group.layout.local_window_size: group.layout for group in groups}
    return tuple(
        WindowRecord(
            local_window_size=window,
            slots_written=tuple(
                (write.slot, write.slot + write.length)
                for write in layouts[window].plan_append(positions.start, len(positions)).writes
            ),
            visible=visible_span(positions, window),
        )
        for window in sorted(layouts)
    )
