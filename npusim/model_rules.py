"""What a graph around its attention ops does with their caches, and how the ops are told apart.

In a static graph a cache is a buffer that the host keeps for one attention alone.
"""

import re
from collections import Counter
from collections.abc import Iterable

from openvino import Output

from npusim.errors import ModelError
from npusim.layer_numbers import layer_numbers, numbers_in
from transforms import GQANode


def check_labels(gqas: Iterable[GQANode]) -> None:
    """Every op has a name of its own: passes and reports find it by that."""
    for name, count in Counter(gqa.name for gqa in gqas).items():
        if count > 1:
            raise ModelError(
                f"{count} GroupQueryAttention ops are called {name}; give the attention output of each a "
                "name of its own"
            )


def check_caches(gqas: Iterable[GQANode]) -> None:
    """Every cache has one input and one output, both of one layer and kind, and no other reader."""
    for gqa in gqas:
        for label, past, port in (("key", gqa.past_key, 1), ("value", gqa.past_value, 2)):
            _check_only_reader(gqa, past)
            _check_present(gqa, port)
            _check_names(gqa, label, past.get_any_name(), gqa.node.output(port).get_any_name())


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
