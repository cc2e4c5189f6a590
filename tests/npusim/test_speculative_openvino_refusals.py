"""What a stateful OpenVINO model behind the request interface refuses, before its states are touched."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13 as op
from stateful_models import EXACT, MODELS, PROMPT, fresh_logits, request_of, small_attention, target_of

from npusim.errors import CapacityError, InputError, ModelError, TrimError
from npusim.speculative import OpenVINOTarget
from npusim.speculative.target import feed
from transforms import StatefulGQA


def block(tokens: Sequence[int], first: int) -> dict[str, npt.NDArray[np.int64]]:
    return {"input_ids": np.array([tokens]), "position_ids": first + np.arange(len(tokens))[None]}


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (block([1], 7), InputError, "a gap: position 7 was given and 6 tokens are stored"),
        (block([1] * 7, 6), CapacityError, "a generate step takes at most 6 tokens, got 7"),
        (block([1] * 10, 0), CapacityError, "a prefill takes at most 9 tokens, got 10"),
        (block([1] * 5, 6), CapacityError, "5 tokens at position 6 need room for 11, capacity is 10"),
        (block([1, 23], 6), InputError, "token 1 of input_ids is 23, outside the vocabulary"),
        (block([1], -1), InputError, "consecutive from 0 or more"),
        ({**block([1, 2], 6), "position_ids": np.array([[6, 8]])}, InputError, "consecutive from 0"),
        ({**block([1, 2], 6), "position_ids": np.array([[6]])}, InputError, r"must be \[1, 2\]"),
        ({**block([1, 2], 6), "position_ids": np.zeros((1, 0), int)}, InputError, r"must be \[1, 2\]"),
        ({"input_ids": np.zeros((2, 1), int)}, InputError, r"input_ids has shape \[2, 1\]"),
        ({"input_ids": np.zeros((1, 0), int)}, InputError, r"input_ids has shape \[1, 0\]"),
        ({"input_ids": np.zeros((1, 2))}, InputError, "input_ids must be a flat sequence of integers"),
        ({"position_ids": np.array([[6]])}, InputError, r"got \['position_ids'\]"),
        ({**block([1], 6), "beam_idx": np.zeros(1, int)}, InputError, "inputs are input_ids and"),
        (None, InputError, "inputs is a NoneType; give a mapping"),
        ({"input_ids": [[1, 2], [3]]}, InputError, "input_ids is no array"),
        ({"input_ids": [[1]], "position_ids": [[1], [2, 3]]}, InputError, "position_ids is no array"),
        ({"input_ids": [[1]], "position_ids": [[True]]}, InputError, r"consecutive .* got \[\[True\]\]"),
        (
            {"input_ids": [[1]], "position_ids": [[6.0]]},
            InputError,
            r"integers consecutive .* got \[\[6.0\]\]",
        ),
        (
            {"input_ids": [[1]], "position_ids": [[np.nan]]},
            InputError,
            r"integers consecutive .* got \[\[nan",
        ),
        ({"input_ids": [[1]], "position_ids": [["a"]]}, InputError, "integers consecutive"),
        ({"input_ids": [[1]], "position_ids": None}, InputError, "integers consecutive .* got None"),
        (
            {"input_ids": [[1]], "position_ids": np.array([[2**63]], np.uint64)},
            InputError,
            "a gap: position 9",
        ),
    ],
)
def test_a_refused_call_changes_nothing(
    inputs: dict[str, npt.NDArray[np.int64]], error: type[Exception], message: str
) -> None:
    target = target_of(capacity=10, max_prompt_len=9)
    feed(target, PROMPT, 0)
    with pytest.raises(error, match=message):
        target.infer(inputs)
    assert target.num_stored_tokens == 6
    rows = feed(target, [4], 6)
    np.testing.assert_allclose(rows, fresh_logits(small_attention, [*PROMPT, 4])[-1:], atol=1e-5)


@pytest.mark.parametrize("num_tokens", [-1, 7, 2.5, True])
def test_a_trim_beyond_what_is_stored_is_refused(num_tokens: int) -> None:
    target = target_of()
    feed(target, PROMPT, 0)
    assert not target.can_trim(num_tokens)
    with pytest.raises(TrimError, match=f"trim to {num_tokens} tokens: 6 are stored"):
        target.trim(num_tokens)


class FailsAtTheEnd:
    """A request whose inference grows the states and then fails, when told to."""

    def __init__(self) -> None:
        self.request = request_of(small_attention)
        self.failing = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.request, name)

    def infer(self, *arguments: object, **options: object) -> object:
        outputs = self.request.infer(*arguments, **options)
        if self.failing:
            raise RuntimeError("the device is gone")
        return outputs


@pytest.mark.parametrize(("first", "count"), [(4, 3), (6, 3), (0, 5), (0, 1)])
def test_a_call_that_openvino_fails_leaves_the_rows_below_it(first: int, count: int) -> None:
    request = FailsAtTheEnd()
    target = OpenVINOTarget(request, capacity=20)
    feed(target, PROMPT, 0)
    request.failing = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        feed(target, [9] * count, first)
    request.failing = False
    assert target.num_stored_tokens == first
    rows = feed(target, [5, 2], first)
    np.testing.assert_allclose(rows, fresh_logits(small_attention, [*PROMPT[:first], 5, 2])[-2:], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 2.5), ("max_generation_tokens", 0), ("max_prompt_len", -2), ("max_prompt_len", True)],
)
def test_limits_that_cannot_hold_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name} is {value}; it must be an integer of at least 1"):
        target_of(**{name: value})


def test_a_dynamic_vocabulary_must_be_said() -> None:
    request = ov.Core().compile_model(small_attention(True), "CPU", EXACT).create_infer_request()
    with pytest.raises(ModelError, match="last dimension of logits is dynamic; say vocab_size"):
        OpenVINOTarget(request, capacity=9)
    assert OpenVINOTarget(request, capacity=9, vocab_size=23).vocab_size == 23


@pytest.mark.parametrize("axis", [4, -5, "x", 1.0, True, None])
def test_an_axis_that_states_do_not_have_is_refused(axis: int) -> None:
    with pytest.raises(InputError, match=f"sequence_axis is {axis!r}; the states have 4 axes, 0 to 3"):
        target_of(sequence_axis=axis)


def test_a_trim_to_an_integer_of_another_type_counts_in_ints() -> None:
    target = target_of()
    feed(target, PROMPT, 0)
    assert target.trim(np.uint8(2)) == 4
    assert type(target.num_stored_tokens) is int


@pytest.mark.parametrize("axis", [1, 3, -1])
def test_an_axis_that_has_rows_before_any_token_is_refused(axis: int) -> None:
    with pytest.raises(
        InputError, match=rf"sequence_axis is {axis}, on which state .* \[1, 2, 0, 32\] has rows"
    ):
        target_of(sequence_axis=axis)


def stateful_form() -> ov.Model:
    """Its states are empty on two axes before the first token: [0, 2, 0, 16]."""
    model = ov.Core().read_model(MODELS / "llama.onnx")
    StatefulGQA().run_on_model(model)
    return model


def test_states_on_another_axis_are_noticed() -> None:
    target = target_of(stateful_form, sequence_axis=0)
    feed(target, PROMPT, 0)
    with pytest.raises(ModelError, match="holds 1 rows on axis 0 where 4 tokens are stored"):
        target.trim(4)


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["input_ids", "attention_mask"], ["logits"], "no variable states"),
        (["input_ids", "attention_mask", "past"], ["logits"], "and takes nothing else"),
        (["input_ids"], ["logits"], "takes input_ids and attention_mask"),
        (["input_ids", "attention_mask"], ["scores"], "no output named logits"),
    ],
)
def test_models_of_another_kind_are_refused(inputs: list[str], outputs: list[str], message: str) -> None:
    parameters = []
    for name in inputs:
        parameters.append(op.parameter(ov.PartialShape([1, 4]), np.int64, name=name))
        parameters[-1].output(0).set_names({name})
    total = op.add(parameters[0], parameters[-1])
    total.output(0).set_names(set(outputs))
    model = ov.Model([op.result(total)], parameters)
    request = ov.Core().compile_model(model, "CPU").create_infer_request()
    with pytest.raises(ModelError, match=message):
        OpenVINOTarget(request, capacity=9)
