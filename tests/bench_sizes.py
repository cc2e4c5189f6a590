"""A model and goals so small that a benchmark of them takes a moment."""

from __future__ import annotations

from dataclasses import replace

from npusim.bench.goal import GoalSizes
from npusim.bench.synthetic import AttentionShape, ModelShape
from npusim.bench.timing import Plan

SHAPE = ModelShape(
    attention=AttentionShape(num_heads=6, kv_num_heads=2, head_size=16, local_window_size=5),
    hidden_size=24,
    num_layers=3,
    intermediate_size=40,
    vocab_size=31,
    max_positions=80,
    seed=4,
)
SIZES = GoalSizes(
    layer=AttentionShape(num_heads=6, kv_num_heads=2, head_size=8),
    layer_contexts=(16, 24),
    window=4,
    chain_length=2,
    model=replace(SHAPE, attention=replace(SHAPE.attention, local_window_size=-1)),
    prompt=9,
    num_steps=12,
    flat_contexts=(12, 20, 30),
    large_model=replace(SHAPE, num_layers=2, max_positions=300),
    new_tokens=7,
    plan=Plan(rounds=2, burst=2),
)
