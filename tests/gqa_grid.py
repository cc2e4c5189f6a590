"""The layers over which GroupQueryAttention is tested: every option, every grouping of heads."""

from __future__ import annotations

from dataclasses import replace

from gqa_models import GQA, Bias, RotaryTable

HEADS = {"4/2": (4, 2), "6/2": (6, 2), "8/1": (8, 1), "3/3": (3, 3)}
_PARTIAL = RotaryTable(channels=16, positions=50)
VARIANTS = {
    "plain": GQA(),
    "scale": GQA(scale=0.37),
    "sink": GQA(head_sink=(0.4, -1.7, 2.2, 3.1, -0.3, 5.0, 0.9, 1.6)),
    "smooth": GQA(smooth_softmax=True),
    "sink and smooth": GQA(head_sink=(2.4, -1.1, 0.2, 1.1, -2.3, 4.0, 0.7, 1.9), smooth_softmax=True),
    "half": GQA(rotary=RotaryTable()),
    "interleaved": GQA(rotary=RotaryTable(interleaved=True)),
    "partial half": GQA(head_size=32, rotary=_PARTIAL),
    "partial interleaved": GQA(head_size=32, rotary=replace(_PARTIAL, interleaved=True), scale=0.21),
    "positions half": GQA(rotary=RotaryTable(), position_ids=True, smooth_softmax=True),
    "positions interleaved": GQA(rotary=RotaryTable(interleaved=True, as_inputs=True), position_ids=True),
    "shared bias": GQA(bias=Bias.SHARED, rotary=RotaryTable()),
    "bias per head": GQA(bias=Bias.PER_HEAD, head_sink=(0.1, 0.7, -0.6, 1.3, 2.0, -1.0, 0.5, 0.8)),
}
WINDOWS = (-1, 1, 2, 3, 5, 9, 100)


def with_heads(gqa: GQA, heads: str) -> GQA:
    """The layer with one of HEADS; of its sinks as many as there are heads."""
    num_heads, kv_num_heads = HEADS[heads]
    sink = None if gqa.head_sink is None else gqa.head_sink[:num_heads]
    return replace(gqa, num_heads=num_heads, kv_num_heads=kv_num_heads, head_sink=sink)


def grid_layers(
    heads: str, *, sequence_length: int, capacity: int, bias_length: int, shift: int
) -> list[GQA]:
    """Every variant, each with one of WINDOWS; another shift gives it another."""
    return [
        replace(
            with_heads(variant, heads),
            sequence_length=sequence_length,
            capacity=capacity,
            bias_length=bias_length,
            local_window_size=WINDOWS[(shift + 3 * index) % len(WINDOWS)],
        )
        for index, variant in enumerate(VARIANTS.values())
    ]


def name_of(gqa: GQA) -> str:
    """Short form for messages."""
    differing = {key: value for key, value in vars(gqa).items() if value != getattr(GQA(), key)}
    return ", ".join(f"{key}={value}" for key, value in differing.items())
