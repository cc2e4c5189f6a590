"""What one attention layer was given and what it answered, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import openvino as ov

from npusim.compare.calls import Call
from npusim.compare.differences import row_differences
from npusim.compare.taps import Rows
from npusim.errors import ModelError
from npusim.reference.attention import AttentionHistory
from npusim.reference.options import AttentionOptions, Rotary
from transforms import GQANode

Heads = npt.NDArray[np.float64]  # [1, heads, rows, head_size]


@dataclass(frozen=True, kw_only=True)
class Visible:
    """What a row attends to: keys at absolute positions, and what is no key of its text.

    stale: rows of the rejected draft that lay right behind the stored tokens. empty: slots that hold zeros.
    """

    positions: tuple[int, ...]
    stale: int = 0
    empty: int = 0

    def __str__(self) -> str:
        parts = [_spans(self.positions)] if self.positions else []
        if self.stale:
            parts.append(f"{self.stale} rows of a rejected draft")
        if self.empty:
            parts.append(f"{self.empty} empty slots")
        return " and ".join(parts) or "nothing"


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRow:
    """One row of one call, with all that it could have seen.

    It is at `position` of a block of positions [start, stop). query [1, H, 1, D]; key and value
    [1, KV, stop, D] of all positions, before rotary; stale_key and stale_value [1, KV, m, D] of the tokens
    that the call took back, from `start` on. ours, theirs: the layer's answers, [H * D].
    """

    position: int
    start: int
    stop: int
    query: Heads
    key: Heads
    value: Heads
    stale_key: Heads
    stale_value: Heads
    ours: Rows
    theirs: Rows

    @property
    def difference(self) -> float:
        """How far the answers lie apart; NaN is infinitely far."""
        return float(row_differences(self.ours[None], self.theirs[None])[0])

    def attention(self, visible: Visible, options: AttentionOptions) -> npt.NDArray[np.float64]:
        """What the row attends to by the reference, if it sees `visible` and nothing else, [H * D].

        Of the options only what does not concern the mask is used.
        """
        key, value, positions = self.pool(visible)
        history = AttentionHistory(options)
        history.append(key, value, position_ids=positions)
        answer: npt.NDArray[np.float64] = history.attend(self.query, position_ids=[self.position])[0, 0]
        return answer

    def pool(self, visible: Visible) -> tuple[Heads, Heads, npt.NDArray[np.int64]]:
        """Keys and values [1, KV, m, D] of what is visible, and the positions they are rotated by."""
        picked, stale = list(visible.positions), slice(0, visible.stale)
        zeros = np.zeros((*self.key.shape[:2], visible.empty, self.key.shape[3]))
        key = np.concatenate([self.key[:, :, picked], self.stale_key[:, :, stale], zeros], axis=2)
        value = np.concatenate([self.value[:, :, picked], self.stale_value[:, :, stale], zeros], axis=2)
        of_stale = range(self.start, self.start + visible.stale)
        return key, value, np.array([*picked, *of_stale, *[0] * visible.empty], np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRows:
    """query, key and value of one call in one layer, [n, heads * D] each, before rotary."""

    query: Rows
    key: Rows
    value: Rows


def attention_options(gqa: GQANode) -> AttentionOptions:
    """The layer's options without its mask: scale, sink, rotary; as the reference takes them.

    Raises ModelError for tables or sinks that are computed in the graph, and for an attention_bias.
    """
    if gqa.attention_bias is not None:
        raise ModelError(f"{gqa.name}: has an attention_bias, which is not looked into")
    rotary = None
    if gqa.rotary is not None:
        rotary = Rotary(
            cos=_constant(gqa.name, gqa.rotary.cos_cache),
            sin=_constant(gqa.name, gqa.rotary.sin_cache),
            interleaved=gqa.rotary.interleaved,
        )
    return AttentionOptions(
        causal=False,
        scale=gqa.scale,
        head_sink=None if gqa.head_sink is None else _constant(gqa.name, gqa.head_sink).reshape(-1),
        smooth_softmax=gqa.has_sink and gqa.head_sink is None,
        rotary=rotary,
    )


def collect_rows(
    calls: Sequence[Call],
    layer: Sequence[LayerRows],
    answers: Sequence[tuple[Rows, Rows]],
    wanted: Sequence[tuple[int, int]],
    head_size: int,
) -> list[AttentionRow]:
    """The rows (index of the call, position) that are wanted; answers are ours and theirs, [n, H * D]."""
    length = max(call.stop for call in calls)
    key, value = (np.zeros((1, width // head_size, length, head_size)) for width in _widths(layer[0]))
    rows, fed = [], 0
    for index, (call, given) in enumerate(zip(calls, layer, strict=True)):
        taken_back = slice(call.position, max(fed, call.position))
        stale_key, stale_value = key[:, :, taken_back].copy(), value[:, :, taken_back].copy()
        key[:, :, call.position : call.stop] = _by_head(given.key, head_size)
        value[:, :, call.position : call.stop] = _by_head(given.value, head_size)
        fed = call.stop
        query = _by_head(given.query, head_size)
        ours, theirs = answers[index]
        for position in [position for at, position in wanted if at == index]:
            row = position - call.position
            from_end = position - call.stop  # of a prompt only the newest rows may have come back
            rows.append(
                AttentionRow(
                    position=position,
                    start=call.position,
                    stop=call.stop,
                    query=query[:, :, row : row + 1],
                    key=key[:, :, : call.stop].copy(),
                    value=value[:, :, : call.stop].copy(),
                    stale_key=stale_key,
                    stale_value=stale_value,
                    ours=ours[from_end],
                    theirs=theirs[from_end],
                )
            )
    return rows


def _widths(rows: LayerRows) -> tuple[int, int]:
    return rows.key.shape[1], rows.value.shape[1]


def _by_head(rows: Rows, head_size: int) -> Heads:
    """[n, heads * D] -> [1, heads, n, D]."""
    split = rows.reshape(len(rows), -1, head_size).astype(np.float64)
    heads: Heads = split.transpose(1, 0, 2)[None]
    return heads


def _constant(name: str, source: ov.Output) -> npt.NDArray[np.float64]:
    node = source.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        raise ModelError(
            f"{name}: {node.get_friendly_name()} is computed in the graph; only constants are looked into"
        )
    return np.asarray(node.get_data(), np.float64)


def _spans(positions: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
