"""The request: life cycle, tensors in and out, stages."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from tiny_llm import (
    SIZES,
    TINY,
    assert_fresh,
    call,
    compile_tiny,
    error_of,
    feed,
    new_request,
    text,
)
from tiny_model import HEAD_SIZE, KV_NUM_HEADS, VOCAB_SIZE, TinyModel

from npusim import InputError


def test_a_conversation_from_prompt_to_reset() -> None:
    request, tokens = new_request(), text(17)
    assert request.num_stored_tokens == 0
    assert_fresh(TINY, feed(request, tokens[:11], 0), tokens[:11])
    assert request.num_stored_tokens == 11
    assert_fresh(TINY, feed(request, tokens[11:12], 11), tokens[:12])
    assert_fresh(TINY, feed(request, tokens[12:15], 12), tokens[:15])
    assert request.trim(13) == 2
    assert_fresh(TINY, feed(request, tokens[14:17], 13), tokens[:13] + tokens[14:17])
    request.reset_state()
    assert request.num_stored_tokens == 0
    assert_fresh(TINY, feed(request, tokens[5:9], 0), tokens[5:9])


def test_limits_are_those_of_the_config() -> None:
    request = new_request()
    assert (request.max_prompt_len, request.max_generation_tokens, request.capacity) == (20, 3, 28)
    assert request.vocab_size == VOCAB_SIZE
    assert request.kv_nbytes == 3 * 28 * 2 * KV_NUM_HEADS * HEAD_SIZE * 4


def test_positions_and_mask_left_out_continue() -> None:
    request, tokens = new_request(), text(14)
    for start, stop in ((0, 7), (7, 8), (8, 11), (11, 13)):
        logits = request.infer({"input_ids": np.array([tokens[start:stop]])})["logits"]
        assert_fresh(TINY, logits, tokens[:stop])
    mask = np.ones((1, 14), np.int64)
    logits = request.infer({"input_ids": [tokens[13:]], "attention_mask": mask})["logits"]
    assert_fresh(TINY, logits, tokens)


@pytest.mark.parametrize("kind", ["int32", "uint8", "list", "ov.Tensor"])
def test_integers_of_any_kind_are_taken(kind: str) -> None:
    tokens, request = text(6), new_request()
    array = np.array([tokens], np.int64)
    match kind:
        case "list":
            logits = request.infer({"input_ids": [tokens], "position_ids": [list(range(6))]})["logits"]
        case "ov.Tensor":
            positions = ov.Tensor(np.arange(6, dtype=np.int64)[None])
            logits = request.infer({"input_ids": ov.Tensor(array), "position_ids": positions})["logits"]
        case _:
            logits = request.infer({"input_ids": array.astype(kind)})["logits"]
    assert_fresh(TINY, logits, tokens)


def test_tensors_set_hold_until_they_are_set_again() -> None:
    request, tokens = new_request(), text(9)
    request.set_tensor("input_ids", np.array([tokens[:6]]))
    request.set_tensor("position_ids", np.arange(6)[None])
    assert_fresh(TINY, request.infer()["logits"], tokens[:6])
    again = request.infer()["logits"]  # the same tensors: the same prompt once more
    assert_fresh(TINY, again, tokens[:6])
    assert request.num_stored_tokens == 6
    # what is passed to infer goes before, for that call alone
    assert_fresh(TINY, request.infer(call(tokens[6:9], 6))["logits"], tokens)
    assert_fresh(TINY, request.infer()["logits"], tokens[:6])


def test_a_shared_tensor_is_read_when_infer_runs() -> None:
    request, tokens = new_request(), text(9)
    block, positions = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
    feed(request, tokens[:5], 0)
    request.set_tensor("input_ids", ov.Tensor(block, shared_memory=True))
    request.set_tensor("position_ids", positions)
    for position in range(5, 9):
        block[...], positions[...] = tokens[position], position
        assert_fresh(TINY, request.infer()["logits"], tokens[: position + 1])


def test_get_tensor_hands_out_inputs_and_logits() -> None:
    request, tokens = new_request(), text(8)
    with pytest.raises(InputError, match="logits are not there yet; call infer first"):
        request.get_tensor("logits")
    with pytest.raises(InputError, match=r"'position_ids' was not set; .* so far: none"):
        request.get_tensor("position_ids")
    request.set_tensor("input_ids", np.array([tokens]))
    assert request.get_tensor("input_ids").data.tolist() == [tokens]
    request.infer()
    logits = request.get_tensor("logits")
    assert (logits.element_type, list(logits.shape)) == (ov.Type.f32, [1, 8, VOCAB_SIZE])
    assert_fresh(TINY, logits.data, tokens)
    request.reset_state()  # as in OpenVINO: the conversation goes, tensors stay
    assert request.get_tensor("input_ids").data.tolist() == [tokens]
    assert_fresh(TINY, request.get_tensor("logits").data, tokens)
    assert_fresh(TINY, request.infer()["logits"], tokens)


def test_an_input_that_is_got_shares_the_memory_of_what_was_set() -> None:
    request, tokens = new_request(), text(8)
    block = np.array([tokens])
    request.set_tensor("input_ids", block)
    request.get_tensor("input_ids").data[0, 7] = 3
    assert block[0, 7] == 3
    assert_fresh(TINY, request.infer()["logits"], [*tokens[:7], 3])
    block.setflags(write=False)
    assert request.get_tensor("input_ids").data.tolist() == block.tolist()
    request.set_tensor("input_ids", [tokens])
    assert request.get_tensor("input_ids").data.tolist() == [tokens]
    request.set_tensor("input_ids", None)
    with pytest.raises(InputError, match="input_ids is object; an integer type"):
        request.get_tensor("input_ids")


def test_ports_of_the_model_name_inputs_too() -> None:
    llm = compile_tiny(TINY, **SIZES)
    request, tokens = llm.create_infer_request(), text(8)
    tokens_port, mask_port = (llm.generate_model.input(name) for name in ("input_ids", "attention_mask"))
    request.set_tensor(mask_port, np.ones((1, 8), np.int64))
    assert_fresh(TINY, request.infer({tokens_port: np.array([tokens])})["logits"], tokens)
    assert request.get_tensor(llm.compiled_prefill.input("attention_mask")).data.sum() == 8
    assert_fresh(TINY, request.get_tensor(llm.compiled_prefill.output("logits")).data, tokens)
    with pytest.raises(InputError, match=r"unknown input .*past_key_values\.0\.key"):
        request.set_tensor(llm.generate_model.input("past_key_values.0.key"), np.ones((1, 8)))


def test_logits_are_a_copy_unless_outputs_are_shared() -> None:
    request, tokens = new_request(), text(8)
    feed(request, tokens[:6], 0)
    kept = request.infer(call(tokens[6:7], 6))["logits"]
    shared = request.infer(call(tokens[7:8], 7), share_outputs=True)["logits"]
    assert_fresh(TINY, shared, tokens)
    view = shared.copy()
    feed(request, tokens[3:4], 8)
    assert_fresh(TINY, kept, tokens[:7])
    assert not np.array_equal(shared, view)
    assert kept.dtype == shared.dtype == np.float32
    assert kept.shape == shared.shape == (1, 1, VOCAB_SIZE)


@pytest.mark.parametrize("chunk", [0, 1, 4, 6, 7, 20])
def test_one_shot_chunks_and_single_tokens_agree(chunk: int) -> None:
    request = new_request(chunk=chunk)
    for length in (2, 5, 12, 19, 20):
        tokens = text(length + 3, seed=length)
        assert_fresh(TINY, feed(request, tokens[:length], 0), tokens[:length])
        assert_fresh(TINY, feed(request, tokens[length:], length), tokens)
    tokens = text(28)
    for position, token in enumerate(tokens):  # from position 0 on: one token is a generate step
        assert_fresh(TINY, feed(request, [token], position), tokens[: position + 1])
    assert request.num_stored_tokens == 28


def test_a_prompt_at_position_0_replaces_the_conversation() -> None:
    request, old, new = new_request(), text(15), text(7, seed=2)
    feed(request, old, 0)
    assert_fresh(TINY, feed(request, new[:5], 0), new[:5])
    assert request.num_stored_tokens == 5
    assert_fresh(TINY, feed(request, new[5:], 5), new)
    # a single token at position 0 is a step, and starts one as well
    assert_fresh(TINY, feed(request, old[:1], 0), old[:1])
    assert request.num_stored_tokens == 1
    assert_fresh(TINY, feed(request, old[1:3], 1), old[:3])


def test_requests_of_one_model_do_not_share_a_cache() -> None:
    llm = compile_tiny(TINY, **SIZES)
    one, two = llm.create_infer_request(), llm.create_infer_request()
    first, second = text(9), text(9, seed=6)
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        assert_fresh(TINY, feed(one, first[start:stop], start), first[:stop])
        assert_fresh(TINY, feed(two, second[start:stop], start), second[:stop])


@pytest.mark.parametrize("chunk", [0, 5])
def test_a_model_with_position_ids_gets_absolute_ones(chunk: int) -> None:
    """Chunks, partial blocks and trims: rotary inside the ops reads what the host writes."""
    model = TinyModel(windows=(4, -1), position_ids=True)
    request, tokens = new_request(model, chunk=chunk, layout="RING"), text(19)
    assert_fresh(model, feed(request, tokens[:13], 0), tokens[:13])
    for start, stop in ((13, 16), (16, 18), (17, 18), (18, 19)):
        assert_fresh(model, feed(request, tokens[start:stop], start), tokens[:stop])


def test_a_float16_cache_is_half_as_large_and_close() -> None:
    request, tokens = new_request(precision="F16"), text(16)
    assert {group.past.dtype for group in request.kv.groups} == {np.dtype(np.float16)}
    assert 2 * request.kv_nbytes == new_request().kv_nbytes
    assert error_of(TINY, feed(request, tokens[:13], 0), tokens[:13]) < 1e-2
    assert 1e-5 < error_of(TINY, feed(request, tokens[13:], 13), tokens) < 1e-2
