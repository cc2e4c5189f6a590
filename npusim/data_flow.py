"""Where a value of a graph goes: through ops that hand it on, to what is computed from it."""

from collections.abc import Collection, Iterator

from openvino import Input, Output

from transforms import node_label
from transforms.gqa_node import GQA_TYPE, Port

SAME_VALUES = ("Convert", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Ops that hand the numbers of their first input on."""


def hands_on(target: Input) -> bool:
    """Whether the op that reads here has the same numbers as its output."""
    return target.get_index() == 0 and target.get_node().get_type_name() in SAME_VALUES


def readers(source: Output) -> Iterator[Input]:
    """Inputs of other ops that take the numbers of a value, directly or handed on."""
    for target in source.get_target_inputs():
        if hands_on(target):
            yield from readers(target.get_node().output(0))
        else:
            yield target


def described(target: Input) -> str:
    """What reads a value, in words: an input of an attention op, a model output, or another op."""
    node = target.get_node()
    if node.get_type_name() == GQA_TYPE:
        return f"{Port(target.get_index()).name.lower()} of {node_label(node)}"
    if node.get_type_name() == "Result":
        return f"the model output {node.input_value(0).get_any_name()}"
    return f"{node_label(node)} ({node.get_type_name()})"


def use_beyond(sources: Collection[Output], ports: Collection[Port]) -> str | None:
    """What is computed from values besides these inputs of attention ops: an input or a model output."""
    seen, waiting = set(), [*sources]
    while waiting:
        source = waiting.pop()
        for target in source.get_target_inputs():
            node = target.get_node()
            kind = node.get_type_name()
            if kind == "Result" or (kind == GQA_TYPE and Port(target.get_index()) not in ports):
                return described(target)
            if kind == GQA_TYPE or kind == source.get_node().get_type_name() == "ShapeOf":
                continue  # the shape of a shape says how many axes there are, whatever their lengths
            if node.get_name() not in seen:
                seen.add(node.get_name())
                waiting += node.outputs()
    return None


def inputs_of(source: Output) -> list[Output]:
    """The model inputs that the numbers of a value are computed from, those whose shape is used included."""
    found: list[Output] = []
    seen, waiting = set(), [source]
    while waiting:
        output = waiting.pop()
        node = output.get_node()
        if node.get_name() in seen:
            continue
        seen.add(node.get_name())
        if node.get_type_name() == "Parameter":
            found.append(output)
        is_shaped_alone = node.get_type_name() in (*SAME_VALUES, "Broadcast")
        waiting += node.input_values()[: 1 if is_shaped_alone else None]
    return found
