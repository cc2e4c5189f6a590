"""Window-sized pasts in the generate branch: they must give what the whole history gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gqa_grid import VARIANTS, with_heads
from gqa_models import GQA, TokenCount
from lowered_checks import nothing, past_capacity, sweep
from lowered_op import LoweredLayers

from transforms import Branch, KeyLayout

LEAST = {KeyLayout.RING: -1, KeyLayout.ROLLING: 0}


def windowed(variant: str, heads: str, window: int, capacity: int, rows: int) -> GQA:
    return replace(
        with_heads(VARIANTS[variant], heads),
        sequence_length=rows,
        capacity=capacity,
        bias_length=40,
        local_window_size=window,
    )


@pytest.mark.parametrize("layout", LEAST)
@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_window_sized_slots_give_what_the_whole_history_gives(layout: KeyLayout, rows: int) -> None:
    layers = []
    for index, (variant, heads) in enumerate(
        zip(VARIANTS, ("4/2", "6/2", "8/1", "3/3") * len(VARIANTS), strict=False)
    ):
        window = (2, 3, 5, 8)[(index + rows) % 4]
        layers.append(windowed(variant, heads, window, window + LEAST[layout] + index % 3, rows))
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount(), key_layout=layout)
    lengths = (9, 0, 1, 4, 7, 12, 23)
    sweep(lowered, [(stored, 1 + i % rows) for i, stored in enumerate(lengths)], missing=nothing)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_gathering_the_newest_rows_gives_what_all_rows_give(rows: int) -> None:
    layers = [
        windowed(variant, heads, window, capacity, rows)
        for variant, heads, window, capacity in (
            ("half", "4/2", 4, 9),
            ("sink", "6/2", 1, 7),
            ("positions half", "3/3", 9, 6),
            ("shared bias", "8/1", 3, 2),
            ("partial interleaved", "4/2", 5, 4),
        )
    ]
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount(), key_layout=KeyLayout.GATHERED)
    lengths = (5, 0, 1, 3, 9, 14)
    sweep(lowered, [(stored, 1 + i % rows) for i, stored in enumerate(lengths)], missing=past_capacity)
