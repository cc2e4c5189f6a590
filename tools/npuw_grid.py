"""Compare npusim.npuw_profile with the installed NPUW over a grid of lengths.

    python tools/npuw_grid.py [--quick]

Every point compiles a model of one small layer on the CPU device and feeds it until it refuses: the longest
prompt it takes, the largest block, the tokens it stores. Exit code 1 where one of them is not what the
integer rules say.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import openvino as ov
from rich.console import Console
from rich.progress import track

from npusim.npuw import unavailable_reason
from npusim.npuw_config import UNPARTITIONED
from npusim.npuw_profile import DEFAULT_CHUNK_SIZE, npuw_lengths
from npusim.probe_model import ProbeLayer, build_onnx
from transforms import StatefulGQA

POSITIONS = 4096


@dataclass(frozen=True, kw_only=True)
class Point:
    """A configuration as it is asked for."""

    prompt: int
    response: int
    block: int
    chunk: int | None = None
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a runtime makes of it."""

    max_prompt_len: int
    max_generation_tokens: int
    capacity: int


def predict(point: Point) -> Limits:
    """What the integer rules say."""
    lengths = npuw_lengths(
        max_prompt_len=point.prompt,
        min_response_len=point.response,
        max_generation_token_len=point.block,
        prefill_chunk_size=DEFAULT_CHUNK_SIZE if point.chunk is None else point.chunk,
        whole_prefill=point.whole,
    )
    return Limits(
        max_prompt_len=lengths.max_prompt_len,
        max_generation_tokens=lengths.max_generation_tokens,
        capacity=lengths.capacity,
    )


def measure(point: Point) -> Limits:
    """What NPUW does."""
    properties = {
        "NPU_USE_NPUW": "YES",
        "NPUW_LLM": "YES",
        "NPUW_DEVICES": "CPU",
        **UNPARTITIONED,
        "NPUW_LLM_MAX_PROMPT_LEN": str(point.prompt),
        "NPUW_LLM_MIN_RESPONSE_LEN": str(point.response),
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": str(point.block),
        "NPUW_LLM_PREFILL_HINT": "STATIC" if point.whole else "DYNAMIC",
    }
    if point.chunk is not None:
        properties["NPUW_LLM_PREFILL_CHUNK_SIZE"] = str(point.chunk)
    compiled = ov.compile_model(_model(), "NPU", properties)
    max_prompt_len = _greatest(1, POSITIONS, lambda n: _accepts(compiled, [(0, n)]))
    start = min(max_prompt_len, 20)
    block = _greatest(1, 64, lambda n: _accepts(compiled, [(0, start), (start, n)]))
    return Limits(
        max_prompt_len=max_prompt_len,
        max_generation_tokens=block,
        capacity=_fill(compiled, start, block),
    )


def _greatest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The greatest n in low..high for which `holds`; it must hold up to one n and not beyond."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _accepts(compiled: ov.CompiledModel, calls: list[tuple[int, int]]) -> bool:
    request = compiled.create_infer_request()
    return all(_call(request, start, count) for start, count in calls)


def _fill(compiled: ov.CompiledModel, start: int, block: int) -> int:
    """Tokens stored when nothing more fits: blocks while they do, then single tokens."""
    request = compiled.create_infer_request()
    _call(request, 0, start)
    stored = start
    while _call(request, stored, block):
        stored += block
    # A block that crosses the capacity fails in its midst: begin anew and go on with single tokens.
    request = compiled.create_infer_request()
    _call(request, 0, start)
    for at in range(start, stored, block):
        _call(request, at, block)
    while _call(request, stored, 1):
        stored += 1
    return stored


def _call(request: ov.InferRequest, start: int, count: int) -> bool:
    """Whether NPUW takes `count` tokens at position `start`."""
    feeds = {
        "input_ids": np.ones((1, count), np.int64),
        "attention_mask": np.ones((1, start + count), np.int64),
        "position_ids": np.arange(start, start + count)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    try:
        request.infer(feeds)
    except RuntimeError:
        return False
    return True


@cache
def _model() -> ov.Model:
    layer = ProbeLayer(num_heads=2, kv_num_heads=2, head_size=16, positions=POSITIONS)
    model = ov.Core().read_model(build_onnx(layer))
    StatefulGQA().run_on_model(model)
    return model


def grid(*, quick: bool) -> list[Point]:
    """All points, or a tenth of them."""
    blocks = (1, 2, 7, 8, 9, 16, 17)
    points = [
        Point(prompt=prompt, response=response, block=block)
        for prompt, response, block in product((1, 64, 65, 200), (1, 64, 65), blocks)
    ]
    points += [
        Point(prompt=prompt, response=64, block=8, chunk=chunk, whole=whole)
        for prompt, chunk, whole in product((16, 100, 129, 300), (0, 16, 64, 128, 256, 512), (False, True))
    ]
    return points[::10] if quick else points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the grid")
    points = grid(quick=parser.parse_args().quick)
    reason = unavailable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    wrong = 0
    for point in track(points, "measuring", console=Console(stderr=True), transient=True):
        predicted, measured = predict(point), measure(point)
        if predicted != measured:
            wrong += 1
            print(f"{point}\n  predicted {predicted}\n  measured  {measured}")
    print(f"{len(points)} points, {wrong} differ (OpenVINO {ov.get_version()})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
