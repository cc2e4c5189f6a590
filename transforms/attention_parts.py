"""Pieces of a lowered attention that do not depend on how keys lie."""

import openvino as ov
import openvino.opset13 as ops
from openvino import Output

from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode
from transforms.opset import reshape


def sink_logits(gqa: GQANode) -> Output:
    """The extra logit of the denominator, [1, H, 1, 1]: head_sink, or 0 per head for smooth_softmax."""
    if gqa.head_sink is None:
        return ops.constant([[[[0.0]]] * gqa.num_heads], dtype=gqa.element_type).output(0)
    sink = gqa.head_sink
    if sink.get_element_type() != gqa.element_type:
        sink = ops.convert(sink, gqa.element_type.get_type_name()).output(0)
    return reshape(sink, [1, gqa.num_heads, 1, 1])


def take_over(old: Output, new: Output) -> None:
    """Hand an output's consumers and tensor names over."""
    names = old.get_names()
    old.get_tensor().set_names(set())
    old.replace(new)
    new.get_tensor().add_names(names)


def convert_results(output: Output, element_type: ov.Type) -> int:
    """Convert an output where it leaves the model, names kept; how many model outputs changed."""
    if output.get_element_type() == element_type:
        return 0
    names, changed = output.get_names(), 0
    for target in output.get_target_inputs():
        if target.get_node().get_type_name() == "Result":
            converted = ops.convert(output, element_type.get_type_name()).output(0)
            output.get_tensor().set_names(set())
            target.replace_source_output(converted)
            converted.get_tensor().add_names(names)
            changed += 1
    return changed


def scalar(value: float, element_type: ov.Type) -> Output:
    """A constant of no dimensions."""
    return ops.constant(value, dtype=element_type).output(0)


def before_head_transpose(source: Output) -> Output | None:
    """[B, S, H, D] where a source [B, H, S, D] is its transpose, else None."""
    node = source.get_node()
    if node.get_type_name() != "Transpose":
        return None
    order = node.input_value(1).get_node()
    swaps = order.get_type_name() == "Constant" and order.get_data().tolist() == [0, 2, 1, 3]
    return node.input_value(0) if swaps else None


def parameter_behind(past: Output, name: str) -> ov.Node:
    """The model input that a past comes from, directly or converted; DecompositionError for anything else."""
    source = past.get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    if source.get_type_name() != "Parameter":
        raise DecompositionError(
            f"{name}: its past comes from {source.get_friendly_name()} ({source.get_type_name()}); "
            "a model input is needed"
        )
    return source
