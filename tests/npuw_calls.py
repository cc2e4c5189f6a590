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


def tolerance(expected: np.ndarray) -> float:
    """1e-3 for logits of up to 0.5, as those of the untrained models, and in proportion above.

    NPUW keeps the cache in float16 and hands its logits through float16.
    """
    return 2e-3 * max(0.5, float(np.abs(expected).max()))


def tokens_of(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, count).tolist()


def call(request: NPUWInferRequest, tokens: Sequence[int], start: int) -> np.ndarray:
    positions = np.arange(start, start + len(tokens))[None]
    return request.infer({"input_ids": np.array([tokens]), "position_ids": positions})["logits"]
