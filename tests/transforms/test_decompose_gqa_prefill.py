"""The prefill branch: past and block form one right-aligned run of slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gqa_grid import HEADS, VARIANTS, grid_layers, with_heads
from gqa_models import GQA, RotaryTable, TokenCount
from lowered_checks import nothing, sweep
from lowered_op import LoweredLayers, core

from transforms import Branch, DecompositionError

# The second of each pair is H, the last one longer than every window of the grid but one.
GRID = [(heads, rows) for heads in HEADS for rows in (3, HEADS[heads][0], 11)]


@pytest.mark.parametrize(("heads", "rows"), GRID)
def test_every_option_at_every_prompt_length(heads: str, rows: int) -> None:
    shift = GRID.index((heads, rows))
    layers = grid_layers(heads, sequence_length=rows, capacity=0, bias_length=rows + 2, shift=shift)
    counted = TokenCount(int64=True) if shift % 2 else None
    lowered = LoweredLayers(layers, Branch.PREFILL, num_tokens=counted)
    assert lowered.lowering.lowered == len(layers)
    sweep(lowered, [(0, length) for length in dict.fromkeys((rows - 1, rows, 1, max(1, rows // 2)))])


@pytest.mark.parametrize("heads", ["4/2", "3/3"])
def test_a_past_ends_where_the_block_begins(heads: str) -> None:
    layers = grid_layers(heads, sequence_length=4, capacity=7, bias_length=13, shift=5)
    lowered = LoweredLayers(layers, Branch.PREFILL)
    sweep(lowered, [(stored, 4) for stored in (6, 0, 1, 7)], missing=nothing)


@pytest.mark.parametrize("counted", [None, TokenCount()])
def test_without_causality_every_real_row_sees_the_prompt(counted: TokenCount | None) -> None:
    base = GQA(causal=False, sequence_length=6, capacity=0, num_heads=6)
    layers = [base, replace(base, rotary=RotaryTable(), head_sink=(0.5, 1.0, -1.0, 2.0, 3.0, 0.1))]
    sweep(LoweredLayers(layers, Branch.PREFILL, num_tokens=counted), [(0, 4), (0, 6), (0, 1)])


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_padded_rows_are_finite_in_half_precision(precision: str) -> None:
    if precision == "f16" and "FP16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute in float16")
    layers = [
        replace(layer, float16=True)
        for layer in grid_layers("4/2", sequence_length=8, capacity=0, bias_length=8, shift=0)
    ]
    # Values of a few units, rounded to 11 bits: 0.008 is four steps of the last one. The score of two
    # poisoned rows must stay a float16.
    lowered = LoweredLayers(layers, Branch.PREFILL, precision=precision)
    sweep(lowered, [(0, 5), (0, 8)], tolerance=8e-3, poison=50.0)


def test_a_window_sized_cache_flag_is_only_a_window() -> None:
    gqa = replace(with_heads(VARIANTS["interleaved"], "4/2"), sequence_length=9, capacity=0)
    layers = [replace(gqa, local_window_size=window, sliding_window_cache=True) for window in (1, 4, 30)]
    sweep(LoweredLayers(layers, Branch.PREFILL, reshaped=True), [(0, 7), (0, 9)])


def test_a_partial_block_behind_a_past_has_no_place_in_one_run() -> None:
    layers = grid_layers("4/2", sequence_length=4, capacity=7, bias_length=13, shift=5)
    with pytest.raises(
        DecompositionError, match=r"block_tokens over a past of 7 slots; .* use Branch\.GENERATE"
    ):
        LoweredLayers(layers, Branch.PREFILL, num_tokens=TokenCount())
