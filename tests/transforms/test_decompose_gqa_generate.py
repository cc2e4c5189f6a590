"""The generate branch: a left-aligned past of C slots, the block behind it, against three oracles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gqa_grid import HEADS, VARIANTS, grid_layers, with_heads
from gqa_models import GQA, RotaryTable, TokenCount
from lowered_checks import sweep
from lowered_op import LoweredLayers, core

from transforms import Branch

BEYOND = 4
GRID = [(heads, rows) for heads in HEADS for rows in sorted({1, 2, 3, 4, 5, HEADS[heads][0]})]


@pytest.mark.parametrize(("heads", "rows"), GRID)
def test_every_option_at_every_length(heads: str, rows: int) -> None:
    shift = GRID.index((heads, rows))
    capacity = 5 + shift % 4
    layers = grid_layers(
        heads,
        sequence_length=rows,
        capacity=capacity,
        bias_length=capacity + BEYOND + rows + 2,
        shift=shift,
    )
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount(int64=shift % 2 == 0))
    assert lowered.lowering.lowered == len(layers)
    lengths = [capacity - 1, 0, 1, capacity, capacity + 1, capacity + BEYOND]
    sweep(lowered, [(stored, 1 + (index + shift) % rows) for index, stored in enumerate(lengths)])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lone_node_with_as_many_rows_as_heads(variant: str, heads: str) -> None:
    # Where query and output have equal shapes and no other node shares the mask, OpenVINO's CPU plugin may
    # let its attention kernel write over the query; a transpose fused on one side alone then spoils it.
    rows = HEADS[heads][0]
    gqa = replace(with_heads(VARIANTS[variant], heads), sequence_length=rows, capacity=5, bias_length=16)
    sweep(LoweredLayers([gqa], Branch.GENERATE), [(3, rows), (6, rows)])
    prompt = replace(gqa, capacity=0)
    sweep(LoweredLayers([prompt], Branch.PREFILL), [(0, rows), (0, rows - 1)])


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_without_a_token_count_the_block_is_full(rows: int) -> None:
    layers = grid_layers("4/2", sequence_length=rows, capacity=6, bias_length=20, shift=rows)
    lowered = LoweredLayers(layers, Branch.GENERATE)
    sweep(lowered, [(stored, rows) for stored in (5, 0, 1, 6, 7, 11)])


@pytest.mark.parametrize("heads", HEADS)
def test_without_causality_the_real_rows_of_a_block_see_each_other(heads: str) -> None:
    base = with_heads(GQA(causal=False, sequence_length=4, capacity=5), heads)
    layers = [
        base,
        replace(base, rotary=RotaryTable(), smooth_softmax=True),
        replace(base, rotary=RotaryTable(interleaved=True), scale=0.4),
    ]
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount())
    sweep(lowered, [(3, 2), (0, 4), (0, 1), (5, 3), (8, 4)])


def test_a_branch_without_past_slots() -> None:
    layers = grid_layers("6/2", sequence_length=3, capacity=0, bias_length=9, shift=2)
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount())
    sweep(lowered, [(0, 3), (0, 1), (4, 2)])


def test_a_window_sized_cache_flag_on_a_full_buffer_is_only_a_window() -> None:
    layers = [
        replace(
            with_heads(VARIANTS["half"], "4/2"),
            sequence_length=3,
            capacity=8,
            local_window_size=window,
            sliding_window_cache=True,
        )
        for window in (1, 4, 7)
    ]
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount())
    # Past the buffer ONNX Runtime's own contract evicts, so it is asked up to C only.
    sweep(lowered, [(2, 2), (0, 3), (5, 3), (7, 1)])


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_symbolic_head_size_of_the_cache_is_the_query_s(reshaped: bool) -> None:
    gqa = GQA(sequence_length=3, capacity=5, symbolic_head_size=True, rotary=RotaryTable(), scale=0.3)
    layers = [gqa, replace(gqa, capacity=7)]
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount(), reshaped=reshaped)
    sweep(lowered, [(4, 2), (0, 3)])


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_half_precision(precision: str) -> None:
    if precision == "f16" and "FP16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute in float16")
    layers = [
        replace(layer, float16=True)
        for layer in grid_layers("6/2", sequence_length=5, capacity=7, bias_length=20, shift=1)
    ]
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount(), precision=precision)
    # Values of a few units, rounded to 11 bits: 0.008 is four steps of the last one. The score of two
    # poisoned rows must stay a float16.
    sweep(lowered, [(6, 3), (0, 5), (9, 2)], tolerance=8e-3, poison=50.0)


def test_unread_slots_may_hold_any_finite_number() -> None:
    layers = grid_layers("4/2", sequence_length=4, capacity=6, bias_length=15, shift=4)
    lowered = LoweredLayers(layers, Branch.GENERATE, num_tokens=TokenCount())
    for poison in (-1e3, 3e4, 0.0):
        sweep(lowered, [(2, 2), (8, 1)], poison=poison)
