"""Every kind of bad input to a request: a typed error that tells what to do, before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import openvino as ov
import pytest
from tiny_llm import TINY, assert_fresh, cache_bytes, feed, new_request, text
from tiny_model import VOCAB_SIZE

from npusim import CapacityError, InputError, LLMInferRequest, NpuSimError, TrimError
from npusim.step_inputs import INPUT_NAMES

STORED = 7
CONTINUE = text(9)[STORED:]


def block(tokens: object = (2, 5), positions: object = None, mask: object = None) -> dict[str, object]:
    """Inputs as arrays; what is None is left out."""
    given = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
    return {name: np.asarray(value)[None] for name, value in given.items() if value is not None}


def ones(length: int) -> list[int]:
    return [1] * length


# name -> inputs, error, message
BAD: dict[str, tuple[object, type[NpuSimError], str]] = {
    # shapes
    "one dimension": (
        {"input_ids": np.array([2, 5])},
        InputError,
        r"input_ids has shape \[2\]; \[1, tokens\]",
    ),
    "three dimensions": (block([[2], [5]]), InputError, r"input_ids has shape \[1, 2, 1\]; \[1, tokens\]"),
    "scalar": ({"input_ids": np.array(3)}, InputError, r"input_ids has shape \[\]; \[1, tokens\] is needed"),
    "batch 2": ({"input_ids": np.ones((2, 2), np.int64)}, InputError, r"\[2, 2\] \(batch 2\); .* batch is 1"),
    "batch 0": ({"input_ids": np.ones((0, 2), np.int64)}, InputError, r"\[0, 2\] \(batch 0\); .* batch is 1"),
    "no tokens": ({"input_ids": np.ones((1, 0), np.int64)}, InputError, "is empty; .* at least 1 token"),
    "ragged": (
        {"input_ids": [[2, 5], [3]]},
        InputError,
        r"input_ids is no array: .*; \[1, tokens\] integers",
    ),
    # types
    "floats": (block([2.0, 5.0]), InputError, "input_ids is float64; an integer type such as int64"),
    "booleans": (block([True]), InputError, "input_ids is bool; an integer type such as int64 is needed"),
    "text": ({"input_ids": "abc"}, InputError, "input_ids is <U3; an integer type"),
    "nothing": ({"input_ids": None}, InputError, "input_ids is object; an integer type"),
    "float tensor": (
        {"input_ids": ov.Tensor(np.ones((1, 1), np.float16))},
        InputError,
        "is float16; an integer",
    ),
    # token ids
    "token too large": (block([2, VOCAB_SIZE]), InputError, r"input_ids contains 17; token ids are 0\.\.16"),
    "token negative": (block([-1, 5]), InputError, r"input_ids contains -1; token ids are 0\.\.16"),
    "token beyond int64": (
        block(np.array([2**64 - 1], np.uint64)),
        InputError,
        "input_ids contains 18446744073709551615, which no int64 holds",
    ),
    # positions
    "gap": (block(positions=[9, 10]), InputError, r"begins at 9, but 7 .* 7\.\.8 would be a gap; begin at 7"),
    "gap of one": (block([3], positions=[8]), InputError, r"begins at 8, but 7 tokens are stored"),
    "negative position": (block([3], positions=[-1]), InputError, "begins at -1; positions are 0 or more"),
    "jump in a block": (block(positions=[7, 9]), InputError, r"\[7, 9\] are not consecutive; .* 7\.\.8"),
    "falling positions": (block(positions=[7, 6]), InputError, r"\[7, 6\] are not consecutive"),
    "equal positions": (block(positions=[7, 7]), InputError, r"\[7, 7\] are not consecutive"),
    "jump in a prompt": (
        block([3, 4, 5], positions=[0, 1, 3]),
        InputError,
        r"\[0, 1, 3\] are not consecutive",
    ),
    "too few positions": (block(positions=[7]), InputError, "has 1 entries for 2 tokens; give one each"),
    "float positions": (block(positions=[7.0, 8.0]), InputError, "position_ids is float64; an integer type"),
    "flat positions": (
        {**block(), "position_ids": np.array([7, 8])},
        InputError,
        r"position_ids has shape \[2\]; \[1, tokens\] is needed",
    ),
    # attention_mask
    "mask too short": (block(mask=ones(8)), InputError, "8 entries with sum 8; 7 tokens .* need 9 ones"),
    "mask too long": (block(mask=ones(28)), InputError, "28 entries with sum 28; .* or leave the mask out"),
    "mask with a hole": (block(mask=[1, 0, *ones(7)]), InputError, "9 entries with sum 8; .* need 9 ones"),
    "mask that is no mask": (block(mask=[2, *ones(8)]), InputError, "9 entries with sum 10; .* need 9 ones"),
    "mask of the whole cache": (
        block(positions=[5, 6], mask=ones(9)),
        InputError,
        "9 entries with sum 9; 5 tokens before the block and 2 in it need 7 ones",
    ),
    # names
    "unknown input": (
        {**block(), "beam_idx": np.array([0])},
        InputError,
        "unknown input 'beam_idx'; inputs are input_ids, attention_mask, position_ids",
    ),
    "numbers as names": ({0: np.array([[2]]), "foo": 1}, InputError, "unknown input 0; inputs are input_ids"),
    "no input_ids": (
        {"position_ids": np.array([[7]])},
        InputError,
        "input_ids is missing; set it, or pass it to infer",
    ),
    "no mapping": ([[2, 5]], InputError, "inputs is a list; give a mapping from input name to tensor"),
    # sizes
    "block too long": (
        block([2, 3, 4, 5]),
        CapacityError,
        "block of 4 tokens at position 7; .*_LEN is 3, .* split",
    ),
    "prompt too long": (
        block(text(21), positions=range(21)),
        CapacityError,
        "prompt of 21 tokens; NPUW_LLM_MAX_PROMPT_LEN is 20, .* shorten the prompt",
    ),
}


def assert_refused(
    request: LLMInferRequest, call: Callable[[], object], error: type[NpuSimError], message: str
) -> None:
    """The call raises, and the request is what it was, to the bit."""
    before, stored = cache_bytes(request), request.num_stored_tokens
    trims = [request.can_trim(num_tokens) for num_tokens in range(stored + 2)]
    with pytest.raises(error, match=message):
        call()
    assert (cache_bytes(request), request.num_stored_tokens) == (before, stored)
    assert [request.can_trim(num_tokens) for num_tokens in range(stored + 2)] == trims


@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_are_refused_before_anything_changes(name: str, commit: str) -> None:
    inputs, error, message = BAD[name]
    request, tokens = new_request(commit=commit), text(9)
    feed(request, tokens[:5], 0)
    feed(request, tokens[5:STORED], 5)
    assert_refused(request, lambda: request.infer(inputs), error, message)
    assert_fresh(TINY, feed(request, CONTINUE, STORED), [*tokens[:STORED], *CONTINUE])


@pytest.mark.parametrize("name", BAD)
def test_the_same_inputs_set_as_tensors_are_refused(name: str) -> None:
    inputs, error, message = BAD[name]
    if not isinstance(inputs, Mapping) or not set(INPUT_NAMES).issuperset(inputs):
        return
    request, tokens = new_request(), text(9)
    feed(request, tokens[:STORED], 0)
    for tensor in inputs:
        request.set_tensor(tensor, inputs[tensor])
    assert_refused(request, request.infer, error, message)
    positions = np.arange(STORED, 9)[None]
    valid = {"input_ids": [CONTINUE], "position_ids": positions, "attention_mask": [ones(9)]}
    logits = request.infer(valid)["logits"]  # over what is still set
    assert_fresh(TINY, logits, [*tokens[:STORED], *CONTINUE])


def test_a_bad_first_call_leaves_a_request_unused() -> None:
    request, tokens = new_request(), text(6)
    for name in ("batch 2", "token too large", "prompt too long", "no tokens"):
        inputs, error, message = BAD[name]
        assert_refused(request, lambda inputs=inputs: request.infer(inputs), error, message)
    message = "begins at 1, but 0 tokens are stored: .* begin at 0"
    assert_refused(request, lambda: feed(request, tokens, 1), InputError, message)
    assert not any(group.past.any() for group in request.kv.groups)
    assert_fresh(TINY, feed(request, tokens, 0), tokens)


@pytest.mark.parametrize("layout", ["LINEAR", "ROLLING", "RING"])
@pytest.mark.parametrize("commit", ["EAGER", "DEFERRED"])
def test_a_step_past_the_capacity(layout: str, commit: str) -> None:
    request = new_request(layout=layout, commit=commit)
    tokens = text(28)
    feed(request, tokens[:20], 0)
    for start in range(20, 26, 3):
        feed(request, tokens[start : start + 3], start)
    message = r"cache full: 3 tokens at position 26 need 29 slots, the capacity is 28; .* trim or reset"
    assert_refused(request, lambda: feed(request, [1, 2, 3], 26), CapacityError, message)
    assert_fresh(TINY, feed(request, tokens[26:], 26), tokens)
    message = "1 tokens at position 28 need 29 slots"
    assert_refused(request, lambda: feed(request, [1], 28), CapacityError, message)


@pytest.mark.parametrize("num_tokens", [-1, 8, 1.5, "3", None, True])
def test_a_trim_to_what_is_no_length(num_tokens: object) -> None:
    request, tokens = new_request(), text(9)
    feed(request, tokens[:STORED], 0)
    assert not request.can_trim(num_tokens)
    message = f"trim to {num_tokens!r} tokens, but 7 are stored; give an integer from 0 to 7"
    assert_refused(request, lambda: request.trim(num_tokens), TrimError, message)
    assert request.trim(np.int64(6)) == 1
    assert_fresh(TINY, feed(request, [4], 6), [*tokens[:6], 4])


@pytest.mark.parametrize("name", ["logits", "beam_idx", "past_key_values.0.key", 0, None, ["input_ids"]])
def test_tensors_that_cannot_be_set_or_got(name: object) -> None:
    request = new_request()
    message = re.escape(f"unknown input {name!r}; inputs are input_ids, attention_mask")
    with pytest.raises(InputError, match=message):
        request.set_tensor(name, np.ones((1, 1), np.int64))
    with pytest.raises(InputError, match="logits are not there yet" if name == "logits" else message):
        request.get_tensor(name)
