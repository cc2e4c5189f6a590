"""Measure a model on several runtimes at several contexts, beside what the machine's memory allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import openvino as ov

from npusim.bench.conversation import Conversation, NpusimSteps, Runtime, Steps, check_available, start
from npusim.bench.machine import Machine
from npusim.bench.timing import Plan, Ratio, Samples, interleave, ratio_of
from npusim.compiled_llm import CompiledLLM
from transforms import KeyLayout


@dataclass(frozen=True, kw_only=True)
class RuntimeResult:
    """Steps of one token on one runtime.

    ratio: its time to that of npusim. host_share: None for runtimes that do not tell.
    """

    runtime: Runtime
    samples: Samples
    ratio: Ratio
    host_share: float | None

    @property
    def tokens_per_second(self) -> float:
        """At the median step."""
        return 1 / self.samples.median


@dataclass(frozen=True, kw_only=True)
class ContextResult:
    """All runtimes at one context. bytes_per_step: weights and KV rows that a step of npusim reads."""

    context: int
    runtimes: tuple[RuntimeResult, ...]
    bytes_per_step: int

    def limit(self, machine: Machine) -> float:
        """Estimate of the seconds that reading alone takes, from a bandwidth measured on a busy machine.

        A step may be shorter: where the machine was busier then, or a cache holds what the step reads.
        """
        return self.bytes_per_step / machine.bandwidth


def measure_contexts(
    conversation: Conversation,
    contexts: Sequence[int],
    runtimes: Sequence[Runtime],
    plan: Plan,
    on_part: Callable[[], None] = lambda: None,
) -> tuple[ContextResult, ...]:
    """One result per context; of `conversation` the context is replaced. npusim itself is always measured.

    on_part: called after each runtime is compiled and filled, and after each round; of each context.

    Raises ConfigError, before anything is measured, for a runtime that is not there.
    """
    check_available(runtimes)
    return tuple(
        _measure(replace(conversation, context=context), runtimes, plan, on_part) for context in contexts
    )


def _measure(
    conversation: Conversation, runtimes: Sequence[Runtime], plan: Plan, on_part: Callable[[], None]
) -> ContextResult:
    fast = NpusimSteps(conversation, prefill=False)
    steps: dict[Runtime, Steps] = {Runtime.FAST: fast}
    on_part()
    for runtime in runtimes:
        steps[runtime] = start(runtime, conversation)
        on_part()
    candidates = {runtime.value: candidate for runtime, candidate in steps.items()}
    samples = interleave(candidates, plan, on_round=on_part)
    return ContextResult(
        context=conversation.context,
        runtimes=tuple(
            RuntimeResult(
                runtime=runtime,
                samples=samples[runtime.value],
                ratio=ratio_of(samples[runtime.value], samples[Runtime.FAST.value]),
                host_share=float(np.median(it.host_shares)) if isinstance(it, NpusimSteps) else None,
            )
            for runtime, it in steps.items()
        ),
        bytes_per_step=_bytes_per_step(fast.compiled),
    )


def _bytes_per_step(compiled: CompiledLLM) -> int:
    """Every weight once, but of looked-up tables a row; of each cache its slots, or what is gathered."""
    rows = 0
    for cache in compiled.caches:
        slots = cache.layout.capacity
        gathers = cache.key_layout is KeyLayout.GATHERED
        read = min(slots, cache.layout.local_window_size) if gathers else slots
        rows += cache.nbytes // slots * read
    return rows + _weight_bytes(compiled.generate_model)


def _weight_bytes(model: ov.Model) -> int:
    constants = (node for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    return sum(node.get_byte_size() for node in constants if not _is_looked_up(node))


def _is_looked_up(node: ov.Node) -> bool:
    targets = node.output(0).get_target_inputs()
    return any(target.get_node().get_type_name() == "Gather" for target in targets)
