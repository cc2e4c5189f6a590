"""What a graph around its attention ops does with caches, attention_mask and positions.

Some of it would answer wrong in a static graph: there a cache is a buffer that the host keeps for one
attention alone, attention_mask has an entry for every slot instead of T, and a position beyond a table reads
zeros.
"""

import re
from collections.abc import Iterable, Iterator

import openvino as ov
from openvino import Node, Output

from npusim.errors import ModelError
from npusim.layer_numbers import layer_numbers, numbers_in
from transforms import GQANode, node_label
from transforms.gqa_node import GQA_TYPE, Port

_SAME_VALUES = ("Convert", "Reshape", "Squeeze", "Unsqueeze")
"""Ops that hand the numbers of their first input on."""


def check_caches(gqas: Iterable[GQANode]) -> None:
    """Every cache has one input and one output, both of one layer and kind, and no other reader."""
    for gqa in gqas:
        for label, past, port in (("key", gqa.past_key, 1), ("value", gqa.past_value, 2)):
            _check_only_reader(gqa, past)
            _check_present(gqa, port)
            _check_names(gqa, label, past.get_any_name(), gqa.node.output(port).get_any_name())


def check_mask_use(model: ov.Model, gqas: Iterable[GQANode]) -> None:
    """Nothing is computed from the length of attention_mask, and no attention_bias from its entries.

    (total_sequence_length is: the lowering does not read it.)
    """
    mask = model.input("attention_mask").get_node().output(0)
    for gqa in gqas:
        if gqa.attention_bias is not None and _depends_on(gqa.attention_bias, mask):
            raise ModelError(
                f"{gqa.name}: its attention_bias is computed from attention_mask, whose entries are slots in "
                "a static graph, while the bias is indexed by positions; leave the mask to the op"
            )
    for length in _lengths_of(mask):
        use = _first_use(length)
        if use is not None:
            raise ModelError(
                f"{use} is computed from the length of attention_mask, which in a static graph counts slots, "
                "not tokens; compute it from the sum of the mask, or from position_ids"
            )


def position_tables(model: ov.Model) -> list[int]:
    """Positions that each table outside the ops covers: those that position_ids look up."""
    found: list[int] = []
    sources = [(port.get_node().output(0), 0) for port in model.inputs if "position_ids" in port.get_names()]
    while sources:
        source, offset = sources.pop()
        for target in source.get_target_inputs():
            node, kind = target.get_node(), target.get_node().get_type_name()
            if kind in _SAME_VALUES and target.get_index() == 0:
                sources.append((node.output(0), offset))
            elif kind == "Add" and (step := _constant(node.input_value(1 - target.get_index()))) is not None:
                sources.append((node.output(0), offset + step))
            elif kind == "Gather" and target.get_index() == 1:
                found += [rows - offset for rows in _rows_of_table(node)]
    return found


def in_layer_order(gqas: list[GQANode]) -> dict[int, GQANode]:
    """By the numbers that they go by, from the lowest; as they came where their presents have none."""
    numbers = layer_numbers([gqa.node.output(1).get_any_name() for gqa in gqas])
    return dict(sorted(zip(numbers, gqas, strict=True), key=lambda layer: layer[0]))


def _check_only_reader(gqa: GQANode, past: Output) -> None:
    readers = [target.get_node() for target in past.get_target_inputs()]
    if len(readers) > 1:
        names = sorted({node.get_friendly_name() for node in readers})
        raise ModelError(
            f"{gqa.name}: its cache {past.get_any_name()} is read {len(readers)} times, by "
            f"{', '.join(names)}; a cache belongs to the keys or the values of one layer, export a past "
            "input for each"
        )


def _check_present(gqa: GQANode, port: int) -> None:
    for target in gqa.node.output(port).get_target_inputs():
        node = target.get_node()
        if node.get_type_name() != "Result":
            raise ModelError(
                f"{gqa.name}: output {port} (present) is read by {node.get_friendly_name()} "
                f"({node.get_type_name()}); a static graph hands out new rows alone, so it must be a "
                "model output and nothing else"
            )


def _check_names(gqa: GQANode, kind: str, past: str, present: str) -> None:
    """Names that say a layer or a kind must say the same one."""
    numbers = [numbers for numbers in (numbers_in(past), numbers_in(present)) if len(numbers) == 1]
    kinds = {words[-1] for words in (re.findall("key|value", name) for name in (past, present)) if words}
    if (len(numbers) == 2 and numbers[0] != numbers[1]) or kinds - {kind}:
        raise ModelError(
            f"{gqa.name}: its {kind}s come from {past} and go to {present}; a runtime would feed that output "
            "to another input, export the model with one cache per layer and kind"
        )


def _depends_on(source: Output, wanted: Output) -> bool:
    """Whether a value is computed from another one, the answers of attention ops apart."""
    seen, waiting = set(), [source.get_node()]
    while waiting:
        node = waiting.pop()
        if node.get_name() == wanted.get_node().get_name():
            return True
        if node.get_name() in seen or node.get_type_name() == GQA_TYPE:
            continue
        seen.add(node.get_name())
        waiting += [value.get_node() for value in node.input_values()]
    return False


def _lengths_of(mask: Output) -> Iterator[Output]:
    for target in mask.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() == "ShapeOf":
            yield node.output(0)
        elif node.get_type_name() in _SAME_VALUES and target.get_index() == 0:
            yield from _lengths_of(node.output(0))


def _first_use(source: Output) -> str | None:
    """What is computed from a value, total_sequence_length apart: an op's input, or a model output."""
    seen, waiting = set(), [source]
    while waiting:
        for target in waiting.pop().get_target_inputs():
            node = target.get_node()
            if node.get_type_name() == GQA_TYPE:
                port = Port(target.get_index())
                if port is not Port.TOTAL_SEQUENCE_LENGTH:
                    return f"{port.name.lower()} of {node_label(node)}"
            elif node.get_type_name() == "Result":
                return f"the model output {node.input_value(0).get_any_name()}"
            elif node.get_name() not in seen:
                seen.add(node.get_name())
                waiting += node.outputs()
    return None


def _constant(source: Output) -> int | None:
    node: Node = source.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant" or node.get_output_shape(0) not in ([], [1], [1, 1]):
        return None
    return int(node.get_data().item())


def _rows_of_table(gather: Node) -> list[int]:
    """The length of the axis that is looked up, where it is known."""
    shape, axis = gather.get_input_partial_shape(0), _constant(gather.input_value(2))
    if axis is None or shape.rank.is_dynamic or shape[axis].is_dynamic:
        return []
    return [shape[axis].get_length()]
