"""Let a graph read large weights as they lie in the model, without a packed copy of its own."""

import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Output
from openvino.passes import ModelPass

from transforms.opset import i64

LARGE_WEIGHT_BYTES = 2**20


class PlainWeights(ModelPass):
    """Put a reshape behind every large float32 weight of a MatMul that changes nothing and cannot be folded.

    The CPU plugin packs a constant weight into a copy that lives as long as the compiled model: fast for a
    step of one token, yet a second graph over the same weights then costs the whole model again. A weight
    that is no constant to it is copied into shared scratch while its MatMul runs, and forgotten.

    OpenVINO 2026.4.1, 2 threads, hidden 1024, 24 layers, 1137 MiB of weights: such a graph takes 140 MiB
    instead of 1210 MiB. A run takes longer by the copying: 2.1 x at 128 rows; hidden 512, 8 layers: 1.2 x
    at 512 rows. The extent of a weight comes from `input_ids` as min(max(token, rows), rows), which is
    `rows` whatever the token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Change what matches; True when something did. A second run finds nothing."""
        self.changed = 0
        weights = [node for node in model.get_ordered_ops() if _has_large_weight(node)]
        if not weights:
            return False
        token = _first_token(model)
        for node in weights:
            _hide(node, token)
            self.changed += 1
        model.validate_nodes_and_infer_types()
        return True


def large_weight_bytes(model: ov.Model) -> int:
    """Bytes that the pass would keep from being copied."""
    nodes = (node for node in model.get_ordered_ops() if _has_large_weight(node))
    return sum(_weight(node).get_byte_size() for node in nodes)


def _has_large_weight(node: Node) -> bool:
    if node.get_type_name() != "MatMul":
        return False
    weight = _weight(node)
    return (
        weight.get_type_name() == "Constant"
        and weight.get_element_type() == ov.Type.f32
        and len(weight.get_output_shape(0)) == 2
        and weight.get_byte_size() >= LARGE_WEIGHT_BYTES
    )


def _weight(node: Node) -> Node:
    return node.input_value(1).get_node()


def _first_token(model: ov.Model) -> Output:
    """[1] int64, any number that only a run knows."""
    tokens = ops.reshape(ops.convert(model.input("input_ids"), "i64"), i64([-1]), False)
    return ops.slice(tokens, i64([0]), i64([1]), i64([1])).output(0)


def _hide(node: Node, token: Output) -> None:
    """The shape of the result, which is dynamic behind such a weight, is set again."""
    weight, old = node.input_value(1), node.output(0)
    shape, rows = list(old.get_shape()), i64([weight.get_shape()[0]])
    extent = ops.minimum(ops.maximum(token, rows), rows)
    hidden = ops.reshape(weight, ops.concat([extent, i64([-1])], 0), False)
    targets, names = old.get_target_inputs(), old.get_names()
    node.input(1).replace_source_output(hidden.output(0))
    restored = ops.reshape(old, i64(shape), False).output(0)
    old.get_tensor().set_names(set())
    restored.get_tensor().add_names(names)
    for target in targets:
        target.replace_source_output(restored)
