"""What tests of the real NPUW share: sizes, tolerance, one call."""

from collections.abc import Sequence

import numpy as np

from npusim.npuw import NPUWInferRequest
from npusim.npuw_config import UNPARTITIONED

LENGTHS = {
    "NPUW_LLM_MAX_PROMPT_LEN": 32,
    "NPUW_LLM_MIN_RESPONSE_LEN": 32,
    "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 8,
}
WHOLE_GRAPH = {**UNPARTITIONED, "NPUW_F16IC": "NO"}
"""One subgraph: only the cache is float16 then, no tensor between subgraphs."""


def tolerance(expected: np.ndarray, *, partitioned: bool) -> float:
    """1e-3 for logits below 1, as those of the untrained models; a part of the largest for trained ones.

    NPUW keeps the cache in float16 and hands its logits through float16; where it partitions, the tensors
    between subgraphs are float16 too. Measured of untrained models: 3.4e-4 whole, 6.4e-4 partitioned; of
    the trained pair, with logits of up to 32: 1.5e-3 and 2.2e-3 of the largest of a call.
    """
    largest = float(np.abs(expected).max())
    if largest < 1:
        return 1e-3
    return (3e-3 if partitioned else 2e-3) * largest


def tokens_of(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, count).tolist()


def call(request: NPUWInferRequest, tokens: Sequence[int], start: int) -> np.ndarray:
    positions = np.arange(start, start + len(tokens))[None]
    return request.infer({"input_ids": np.array([tokens]), "position_ids": positions})["logits"]
