"""Stateful OpenVINO models, small enough to compile in no time, as targets of the speculative harness."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as op
from openvino._offline_transformations import apply_make_stateful_transformation

from npusim.speculative import OpenVINOTarget
from npusim.speculative.target import feed

MODELS = Path(__file__).parent / "models"
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
