"""What may be wrong with an attention layer: each a mask or an option, and the words for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from npusim.compare.evidence import AttentionRow, Visible
from npusim.reference.options import AttentionOptions, Rotary

MOST_WINDOWS = 256
"""Windows that are tried one by one."""
MOST_GAPS = 64
"""Numbers of empty slots between past and block that are tried one by one."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """`claim` completes the sentence "the other side behaves as if ..."."""

    claim: str
    options: AttentionOptions
    visible: Callable[[AttentionRow], Visible]


def right_mask(window: int) -> Callable[[AttentionRow], Visible]:
    """What a row sees by the op's definition: the last `window` keys, its own included; -1 is all of them."""
    return lambda row: Visible(
        positions=tuple(range(max(0, row.position - window + 1) if window > 0 else 0, row.position + 1))
    )


def hypotheses(options: AttentionOptions, window: int, rows: Sequence[AttentionRow]) -> Iterator[Hypothesis]:
    """All faults that have a name, for a layer of these options and this window; likely ones first."""
    mask = right_mask(window)
    if window > 0:
        yield Hypothesis(
            claim=f"local_window_size ({window}) were dropped", options=options, visible=right_mask(-1)
        )
    yield from _sink_faults(options, window)
    if window > 0:
        yield from _slot_distance(options, window, rows)
    yield Hypothesis(claim="the mask were not causal", options=options, visible=_whole_block(window))
    yield Hypothesis(
        claim="rows of a rejected draft were still visible", options=options, visible=_with_stale(window)
    )
    yield from _other_windows(options, window, rows)
    for claim, changed in _option_faults(options, rows[0].query.shape[3]):
        yield Hypothesis(claim=claim, options=changed, visible=mask)


def _sink_faults(options: AttentionOptions, window: int) -> Iterator[Hypothesis]:
    mask, no_window = right_mask(window), right_mask(-1)
    without = replace(options, head_sink=None, smooth_softmax=False)
    zero = replace(options, head_sink=None, smooth_softmax=True)
    if options.head_sink is None and not options.smooth_softmax:
        yield Hypothesis(claim="there were a sink (smooth_softmax)", options=zero, visible=mask)
        return
    name = "smooth_softmax" if options.head_sink is None else "head_sink"
    yield Hypothesis(claim=f"the sink ({name}) were dropped", options=without, visible=mask)
    if window > 0:
        yield Hypothesis(
            claim=f"local_window_size ({window}) and the sink ({name}) were both dropped",
            options=without,
            visible=no_window,
        )
    if options.head_sink is not None:
        yield Hypothesis(claim="head_sink were 0 for every head", options=zero, visible=mask)


def _slot_distance(
    options: AttentionOptions, window: int, rows: Sequence[AttentionRow]
) -> Iterator[Hypothesis]:
    """The past begins at slot 0 and the block ends at the last of all slots: between them lies a gap."""
    longest = max(row.stop for row in rows)
    claim = "slot distance were used as window: keys of the past count as further away than they are"
    for num_slots in (None, *range(longest + 1, longest + MOST_GAPS)):
        yield Hypothesis(claim=claim, options=options, visible=_by_slot(window, num_slots, sees_empty=False))
        yield Hypothesis(
            claim=f"{claim}, and empty slots were visible",
            options=options,
            visible=_by_slot(window, num_slots, sees_empty=True),
        )


def _by_slot(window: int, num_slots: int | None, *, sees_empty: bool) -> Callable[[AttentionRow], Visible]:
    """The window in slots, in a graph of `num_slots` (None: of so many that none of the past is in reach)."""

    def visible(row: AttentionRow) -> Visible:
        gap = window if num_slots is None else num_slots - row.stop
        past = range(max(0, row.position - window + 1 + gap), row.start)
        block = range(max(row.start, row.position - window + 1), row.position + 1)
        seen = (*past, *block)
        return Visible(positions=seen, empty=window - len(seen) if sees_empty else 0)

    return visible


def _whole_block(window: int) -> Callable[[AttentionRow], Visible]:
    mask = right_mask(window)
    return lambda row: Visible(positions=(*mask(row).positions, *range(row.position + 1, row.stop)))


def _with_stale(window: int) -> Callable[[AttentionRow], Visible]:
    mask = right_mask(window)
    return lambda row: Visible(positions=mask(row).positions, stale=row.stale_key.shape[2])


def _other_windows(
    options: AttentionOptions, window: int, rows: Sequence[AttentionRow]
) -> Iterator[Hypothesis]:
    longest = min(max(row.stop for row in rows), MOST_WINDOWS)
    for other in range(1, longest + 1):
        if other != window:
            claim = (
                f"local_window_size were {other}, not {window}"
                if window > 0
                else f"there were a window of {other}"
            )
            yield Hypothesis(claim=claim, options=options, visible=right_mask(other))


def _option_faults(options: AttentionOptions, head_size: int) -> Iterator[tuple[str, AttentionOptions]]:
    if abs(options.scale - head_size**-0.5) > 1e-6:
        yield (
            f"scale were 1/sqrt(head size), not {options.scale:g}",
            replace(options, scale=head_size**-0.5),
        )
    rotary = options.rotary
    if rotary is None:
        return
    yield "rotary embedding were dropped", replace(options, rotary=None)
    turned = Rotary(cos=rotary.cos, sin=rotary.sin, interleaved=not rotary.interleaved)
    yield f"rotary_interleaved were {int(turned.interleaved)}", replace(options, rotary=turned)
