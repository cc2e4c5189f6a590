"""What a graph may do with attention_mask, which has an entry for every slot once the graph is static.

Its entries and its length are then no longer those of T tokens. What stays true is the sum of the entries.
"""

import math
from collections.abc import Iterable, Iterator

import openvino as ov
from openvino import Input, Output

from npusim.data_flow import described, inputs_of, readers, use_beyond
from npusim.errors import ModelError
from transforms import GQANode
from transforms.gqa_node import Port


def check_mask_use(static: ov.Model) -> None:
    """Of attention_mask the sum is used, and the length as total_sequence_length alone.

    (The lowering does not read that one.) static: the model in shapes of one block.

    Raises ModelError for whatever else is computed from the mask, by the first op that does.
    """
    for target in readers(_mask(static)):
        if target.get_node().get_type_name() == "ShapeOf":
            _check_length(target.get_node().output(0))
        elif not _sums_all(target):
            raise ModelError(
                f"{described(target)} is computed from the entries of attention_mask, which are slots in a "
                "static graph, not tokens; leave the mask to the op, or compute it from the sum of the mask "
                "or from position_ids"
            )


def check_seqlens(gqas: Iterable[GQANode]) -> None:
    """Every seqlens_k is computed from attention_mask alone; ModelError naming the input that it is not.

    The lowering reads T from it. The length of input_ids is that of a padded block, and the first of
    position_ids may be padding's.
    """
    for gqa in gqas:
        for port in inputs_of(gqa.seqlens_k):
            if "attention_mask" not in port.get_names():
                raise ModelError(
                    f"{gqa.name}: its seqlens_k is computed from {port.get_any_name()}, which in a static "
                    "graph has entries for padding; compute it from the sum of attention_mask alone"
                )


def sums_of_mask(static: ov.Model) -> Iterator[Output]:
    """The values that are the number of tokens: sums of all entries."""
    for target in readers(_mask(static)):
        if _sums_all(target):
            yield target.get_node().output(0)


def _mask(static: ov.Model) -> Output:
    return static.input("attention_mask").get_node().output(0)


def _sums_all(target: Input) -> bool:
    node = target.get_node()
    is_sum: bool = node.get_type_name() == "ReduceSum" and target.get_index() == 0
    return is_sum and math.prod(node.get_output_shape(0)) == 1


def _check_length(length: Output) -> None:
    use = use_beyond([length], [Port.TOTAL_SEQUENCE_LENGTH])
    if use is not None:
        raise ModelError(
            f"{use} is computed from the length of attention_mask, which in a static graph counts slots, "
            "not tokens; compute it from the sum of the mask, or from position_ids"
        )
