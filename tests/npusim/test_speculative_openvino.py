"""A stateful OpenVINO model behind the request interface: rewinds are exact, refusals come first."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13 as op
from openvino._offline_transformations import apply_make_stateful_transformation

from npusim.errors import CapacityError, InputError, ModelError, TrimError
from npusim.speculative import DraftModel, FinishReason, OpenVINOTarget, PromptLookup, Scripted, generate
from npusim.speculative.target import feed

MODELS = Path(__file__).parents[1] / "models"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
PROMPT = [11, 3, 7, 7, 20, 1]


def make_stateful(model: ov.Model, cache: dict[str, str]) -> None:
    """Turn the cache inputs (names, to the outputs that continue them) into states, gathered by beam_idx."""
    beam = op.parameter(ov.PartialShape([-1]), np.int32, name="beam_idx")
    beam.output(0).set_names({"beam_idx"})
    model.add_parameters([beam])
    for name in cache:
        past = model.input(name)
        readers = past.get_target_inputs()
        gathered = op.gather(past, beam, op.constant(0))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    apply_make_stateful_transformation(model, cache)


def llama() -> ov.Model:
    """Four layers of GroupQueryAttention as OpenVINO runs them natively; no position_ids."""
    model = ov.Core().read_model(MODELS / "llama.onnx")
    past = [port.any_name for port in model.inputs if port.any_name.startswith("past_key_values")]
    model.reshape({name: ov.PartialShape([1, 2, -1, 16]) for name in past})
    make_stateful(model, {name: name.replace("past_key_values", "present") for name in past})
    return model


def small_attention(dynamic_vocabulary: bool = False) -> ov.Model:
    """One attention layer of 2 heads x 32 that OpenVINO fuses with its cache; learned positions."""
    random = np.random.default_rng(7)
    heads, head_size, vocab_size = 2, 32, 23
    hidden = heads * head_size

    def weights(*shape: int) -> ov.Node:
        return op.constant(random.normal(size=shape).astype(np.float32) / shape[0] ** 0.5)

    def parameter(name: str, shape: list[int], kind: type) -> ov.Node:
        result = op.parameter(ov.PartialShape(shape), kind, name=name)
        result.output(0).set_names({name})
        return result

    input_ids = parameter("input_ids", [-1, -1], np.int64)
    position_ids = parameter("position_ids", [-1, -1], np.int64)
    attention_mask = parameter("attention_mask", [-1, -1], np.int64)
    past = [parameter(name, [1, heads, -1, head_size], np.float32) for name in ("past.key", "past.value")]

    def split(matrix: ov.Node) -> ov.Node:
        rows = op.reshape(
            op.matmul(embedded, matrix, False, False), op.constant([0, 0, heads, head_size]), True
        )
        return op.transpose(rows, op.constant([0, 2, 1, 3]))  # [1, heads, n, head_size]

    embedded = op.add(
        op.gather(weights(vocab_size, hidden), input_ids, op.constant(0)),
        op.gather(weights(64, hidden), position_ids, op.constant(0)),
    )
    query, *new = (split(weights(hidden, hidden)) for _ in range(3))
    present = [op.concat([old, fresh], 2) for old, fresh in zip(past, new, strict=True)]
    length = op.gather(op.shape_of(attention_mask), op.constant(1), op.constant(0))
    keys = op.range(op.constant(0), length, op.constant(1), "i64")
    seen = op.less_equal(
        op.unsqueeze(keys, op.constant([0, 1, 2])), op.unsqueeze(position_ids, op.constant([1, 3]))
    )
    mask = op.select(seen, op.constant(np.float32(0)), op.constant(np.float32(-1e9)))
    attention = op.scaled_dot_product_attention(query, *present, mask, causal=False)
    merged = op.reshape(op.transpose(attention, op.constant([0, 2, 1, 3])), op.constant([0, 0, hidden]), True)
    logits = op.matmul(merged, weights(hidden, vocab_size), False, False)
    if dynamic_vocabulary:
        end = op.add(op.constant([1]), op.multiply(op.shape_of(input_ids), op.constant([0, 0])))
        stop = op.multiply(op.gather(end, op.constant([0]), op.constant(0)), op.constant([vocab_size]))
        logits = op.slice(logits, op.constant([0]), stop, op.constant([1]), op.constant([2]))
    logits.output(0).set_names({"logits"})
    for node, name in zip(present, ("present.key", "present.value"), strict=True):
        node.output(0).set_names({name})
    model = ov.Model(
        [op.result(node) for node in (logits, *present)], [input_ids, attention_mask, position_ids, *past]
    )
    make_stateful(model, {"past.key": "present.key", "past.value": "present.value"})
    empty = op.constant(np.zeros((1, heads, 0, head_size), dtype=np.float32))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    model.validate_nodes_and_infer_types()
    return model


COMPILED: dict[Callable[[], ov.Model], ov.CompiledModel] = {}


def request_of(build: Callable[[], ov.Model]) -> ov.InferRequest:
    if build not in COMPILED:
        COMPILED[build] = ov.Core().compile_model(build(), "CPU", EXACT)
    return COMPILED[build].create_infer_request()


def target_of(build: Callable[[], ov.Model] = small_attention, **limits: int) -> OpenVINOTarget:
    return OpenVINOTarget(request_of(build), **{"capacity": 40, "max_generation_tokens": 6, **limits})


def fresh_logits(build: Callable[[], ov.Model], tokens: Sequence[int]) -> npt.NDArray[np.floating]:
    return feed(target_of(build, capacity=64, max_generation_tokens=64), tokens, 0).copy()


def fresh_greedy(build: Callable[[], ov.Model], prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(fresh_logits(build, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


both = pytest.mark.parametrize("build", [llama, small_attention])


@both
def test_a_rewind_leaves_the_logits_of_a_fresh_run(build: Callable[[], ov.Model]) -> None:
    target = target_of(build)
    feed(target, PROMPT, 0)
    accepted = list(PROMPT)
    for kept, block in [(1, [9, 2, 2, 5]), (4, [4, 8, 1, 0]), (2, [6, 6]), (1, [2, 19, 3, 3, 3, 12])]:
        rows = feed(target, block, len(accepted))
        expected = fresh_logits(build, [*accepted, *block])[-len(block) :]
        np.testing.assert_allclose(rows, expected, atol=1e-5)
        accepted += block[:kept]
    assert target.num_stored_tokens == len(accepted) + 5
    assert target.trim(len(accepted)) == 5
    rows = feed(target, [14], len(accepted))
    np.testing.assert_allclose(rows, fresh_logits(build, [*accepted, 14])[-1:], atol=1e-5)


@both
def test_without_the_rewind_rejected_rows_would_be_history(build: Callable[[], ov.Model]) -> None:
    """What the adapter is there for: OpenVINO's request continues after whatever it holds."""
    target = target_of(build)
    feed(target, [*PROMPT, 9, 2], 0)
    silent = feed(target, [4], len(PROMPT) + 2).copy()
    right = feed(target, [4], len(PROMPT))
    assert np.abs(silent - right).max() > 1e-2
    np.testing.assert_allclose(right, fresh_logits(build, [*PROMPT, 4])[-1:], atol=1e-5)


@both
def test_speculative_equals_plain_greedy(build: Callable[[], ov.Model]) -> None:
    truth = fresh_greedy(build, PROMPT, 18)
    assert generate(target_of(build), PROMPT, max_new_tokens=18).tokens == truth
    wrong_at_2 = Scripted(
        lambda tokens, n: [
            (token + (place == 2)) % 23 for place, token in enumerate(truth[len(tokens) - 6 :][:n])
        ]
    )
    for drafter in (PromptLookup(), wrong_at_2, DraftModel(target_of(build))):
        target = target_of(build)
        result = generate(target, PROMPT, max_new_tokens=18, drafter=drafter)
        assert result.tokens == truth
        assert target.num_stored_tokens == len(PROMPT) + 17
    assert result.tokens_per_target_step > 4, "a model that drafts for itself is always right"


def test_the_capacity_ends_a_generation() -> None:
    target = target_of(capacity=11, max_prompt_len=8)
    result = generate(target, [*PROMPT, 5, 2], max_new_tokens=50, drafter=PromptLookup())
    assert (len(result.tokens), result.finish_reason) == (4, FinishReason.CAPACITY)
    assert target.num_stored_tokens == 11


def test_a_prefill_and_a_reset_begin_anew() -> None:
    target = target_of()
    first = feed(target, PROMPT, 0).copy()
    feed(target, [1, 2], 6)
    np.testing.assert_array_equal(feed(target, PROMPT, 0), first)
    assert target.num_stored_tokens == 6
    target.reset_state()
    assert target.num_stored_tokens == 0
    np.testing.assert_array_equal(feed(target, PROMPT, 0), first)


def test_positions_left_out_continue() -> None:
    target = target_of()
    feed(target, PROMPT, 0)
    logits = target.infer({"input_ids": np.array([[4, 4]])})["logits"]
    np.testing.assert_allclose(logits[0], fresh_logits(small_attention, [*PROMPT, 4, 4])[-2:], atol=1e-5)


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


@pytest.mark.parametrize("num_tokens", [-1, 7, 2.5])
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
    [("capacity", 2.5), ("max_generation_tokens", 0), ("max_prompt_len", -2)],
)
def test_limits_that_cannot_hold_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name} is {value}; it must be an integer of at least 1"):
        target_of(**{name: value})


def test_a_dynamic_vocabulary_must_be_said() -> None:
    request = ov.Core().compile_model(small_attention(True), "CPU", EXACT).create_infer_request()
    with pytest.raises(ModelError, match="last dimension of logits is dynamic; say vocab_size"):
        OpenVINOTarget(request, capacity=9)
    assert OpenVINOTarget(request, capacity=9, vocab_size=23).vocab_size == 23


def test_states_on_another_axis_are_noticed() -> None:
    target = OpenVINOTarget(request_of(small_attention), capacity=20, sequence_axis=1)
    feed(target, PROMPT, 0)
    with pytest.raises(ModelError, match="holds 2 rows on axis 1 where 4 tokens are stored"):
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
