"""Rows that overflow a float16 cache: refused, and without a trace in what comes after."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tiny_llm import error_of, feed, new_request
from tiny_model import TinyModel, Weights

from npusim import LLMInferRequest, ModelError

LOUD, PROMPT = 5, [1, 2, 3, 4, 6, 7, 8]
CLOSE = 1e-2
"""What float16 rows may change; a key too many or too few changes 0.1."""


@dataclass(frozen=True, kw_only=True)
class LoudModel(TinyModel):
    """Keys and values of one token are beyond 65504, those of all others as ever."""

    windows: tuple[int, ...] = (4, -1, 5)

    def weights(self) -> Weights:
        plain = super().weights()
        embedding = plain.embedding.copy()
        embedding[LOUD] *= 1e6
        return replace(plain, embedding=embedding)


MODEL = LoudModel()


def refuse(request: LLMInferRequest, tokens: list[int], start: int, position: int) -> None:
    stored = request.num_stored_tokens
    message = rf"layer 0: the key of position {position} is infinite .* end at 65504; .* use NPUSIM_KV_PREC"
    with pytest.raises(ModelError, match=message):
        feed(request, tokens, start)
    assert request.num_stored_tokens == stored


@pytest.mark.parametrize("sanitize", ["NO", "YES"])
@pytest.mark.parametrize("layout", ["LINEAR", "ROLLING", "RING", "GATHERED"])
def test_a_token_that_overflows_leaves_nothing_behind(layout: str, sanitize: str) -> None:
    request = new_request(MODEL, precision="F16", layout=layout, sanitize=sanitize)
    feed(request, PROMPT, 0)
    refuse(request, [9, LOUD, 3], 7, 8)
    for start, block in ((7, [9, 10]), (9, [11, 12])):
        logits = feed(request, block, start)
    assert error_of(MODEL, logits, [*PROMPT, 9, 10, 11, 12]) < CLOSE
    refuse(request, [2, LOUD], 0, 1)  # as the prompt of the next conversation
    assert error_of(MODEL, feed(request, [9], 11), [*PROMPT, 9, 10, 11, 12, 9]) < CLOSE
    assert error_of(MODEL, feed(request, PROMPT[:3], 0), PROMPT[:3]) < CLOSE
    assert error_of(MODEL, feed(request, [9, 10], 3), [*PROMPT[:3], 9, 10]) < CLOSE


@pytest.mark.parametrize("sanitize", ["NO", "YES"])
@pytest.mark.parametrize("layout", ["LINEAR", "ROLLING", "RING", "GATHERED"])
def test_a_row_held_back_is_refused_when_it_is_to_be_written(layout: str, sanitize: str) -> None:
    request = new_request(MODEL, precision="F16", layout=layout, sanitize=sanitize, commit="DEFERRED")
    feed(request, PROMPT, 0)
    feed(request, [9, LOUD, 3], 7)
    refuse(request, [4], 10, 8)
    refuse(request, [4], 9, 8)
    assert error_of(MODEL, feed(request, [10, 11], 8), [*PROMPT, 9, 10, 11]) < CLOSE  # rejected: no harm
    feed(request, [2, LOUD], 0)
    refuse(request, [4], 2, 1)
    assert error_of(MODEL, feed(request, PROMPT[:3], 0), PROMPT[:3]) < CLOSE
    assert error_of(MODEL, feed(request, [9, 10], 3), [*PROMPT[:3], 9, 10]) < CLOSE


def test_the_same_token_fits_float32() -> None:
    request = new_request(MODEL, precision="F32")
    feed(request, PROMPT, 0)
    assert np.isfinite(feed(request, [9, LOUD, 3], 7)).all()
    assert error_of(MODEL, feed(request, [9, 10], 7), [*PROMPT, 9, 10]) < 1e-4
