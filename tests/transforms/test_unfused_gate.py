"""The gate of an MLP is taken out of the MatMul before it: same numbers, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from execution_cases import types
from openvino import Node

from transforms import UnfusedGate

HIDDEN, WIDE = 48, 80


def mlp(gated: Callable[[Node, Node], Node]) -> ov.Model:
    """state [1, 1, 48] -> gate and up [1, 1, 80] -> what `gated` makes of them -> [1, 1, 48] as "down"."""
    rng = np.random.default_rng(7)
    state = ops.parameter([1, 1, HIDDEN], np.float32, "state")
    state.output(0).set_names({"state"})
    gate, up = (
        ops.matmul(state, ops.constant(rng.standard_normal((HIDDEN, WIDE), dtype=np.float32)), False, False)
        for _ in range(2)
    )
    product = gated(gate, up)
    product.output(0).get_tensor().add_names({"product"})
    weight = ops.constant(rng.standard_normal((WIDE, HIDDEN), dtype=np.float32))
    return ov.Model([ops.matmul(product, weight, False, False)], [state])


def silu(gate: Node) -> Node:
    return ops.multiply(gate, ops.sigmoid(gate))


GATES: dict[str, Callable[[Node, Node], Node]] = {
    "silu(gate) up": lambda gate, up: ops.multiply(silu(gate), up),
    "up silu(gate)": lambda gate, up: ops.multiply(up, silu(gate)),
    "sigmoid first": lambda gate, up: ops.multiply(ops.multiply(ops.sigmoid(gate), gate), up),
}


def compiled(model: ov.Model) -> ov.CompiledModel:
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def run(model: ov.Model) -> np.ndarray:
    state = np.random.default_rng(3).standard_normal((1, 1, HIDDEN), dtype=np.float32)
    return np.array(compiled(model)({"state": state})[0])


def fused_with_a_matmul(model: ov.Model) -> list[str]:
    """Ops of the model that its MatMuls are run with."""
    kernels = [node.get_rt_info() for node in compiled(model).get_runtime_model().get_ops()]
    kernels = [info for info in kernels if info["layerType"].astype(str) == "FullyConnected"]
    assert len(kernels) == 3
    names = ",".join(info["originalLayersNames"].astype(str) for info in kernels).split(",")
    return [name for name in names if not name.startswith("MatMul")]


@pytest.mark.parametrize("gated", GATES.values(), ids=GATES.keys())
def test_the_numbers_stay_and_the_matmul_is_run_alone(gated: Callable[[Node, Node], Node]) -> None:
    model = mlp(gated)
    before, fused = run(model), fused_with_a_matmul(model)
    assert fused, "the plugin fuses nothing here: the pass has lost its reason"
    rewrite = UnfusedGate()
    assert rewrite.run_on_model(model)
    assert rewrite.changed == 1
    assert np.abs(before).max() > 1
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-4)
    assert fused_with_a_matmul(model) == []
    (product,) = [node for node in model.get_ops() if "product" in node.output(0).get_names()][:1]
    assert product.get_type_name() == "Multiply"
    assert not rewrite.run_on_model(model)


def test_numbers_beyond_half_the_range_of_floats_do_not_overflow() -> None:
    """gate up is beyond float32, silu(gate) up is not."""
    gate, up = (ops.parameter([1, 1, 3], np.float32) for _ in range(2))
    model = ov.Model([ops.multiply(silu(gate), up)], [gate, up])
    feeds = [np.array([[[-90.0, -1e30, 60.0]]], np.float32), np.array([[[1e38, 1e30, 2e36]]], np.float32)]
    before = compiled(model)(feeds)[0]
    assert UnfusedGate().run_on_model(model)
    np.testing.assert_allclose(compiled(model)(feeds)[0], before, rtol=1e-5)
    assert np.isfinite(before).all()


def activation_read_twice(gate: Node, up: Node) -> Node:
    activation = silu(gate)
    return ops.add(ops.multiply(activation, up), activation)


OTHERS: dict[str, Callable[[Node, Node], Node]] = {
    "activation read twice": activation_read_twice,
    "another activation": lambda gate, up: ops.multiply(ops.gelu(gate, "tanh"), up),
    "sigmoid of another": lambda gate, up: ops.multiply(ops.multiply(gate, ops.sigmoid(up)), up),
    "no gate": lambda gate, up: ops.add(silu(gate), up),
}


@pytest.mark.parametrize("gated", OTHERS.values(), ids=OTHERS.keys())
def test_all_else_stays(gated: Callable[[Node, Node], Node]) -> None:
    model = mlp(gated)
    before = types(model)
    assert not UnfusedGate().run_on_model(model)
    assert types(model) == before
