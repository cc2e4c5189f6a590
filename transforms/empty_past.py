"""Remove inputs of no elements: an NPU compiler does not take them."""

import openvino as ov
from openvino.passes import ModelPass

from transforms.errors import DecompositionError


class RemoveEmptyPast(ModelPass):
    """Remove the past inputs [1, KV, 0, D] of a branch without past; `removed` counts the last run.

    Run it after DecomposeGQA, which needs no past rows where C = 0. Raises DecompositionError, with the
    model unchanged, while a node still reads such an input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.removed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Remove every parameter with a zero dimension."""
        empty = [p for p in model.get_parameters() if 0 in _lengths(p)]
        for parameter in empty:
            readers = [target.get_node() for target in parameter.output(0).get_target_inputs()]
            if readers:
                raise DecompositionError(
                    f"{parameter.get_friendly_name()}: an empty input {parameter.get_partial_shape()} is "
                    f"read by {readers[0].get_friendly_name()} ({readers[0].get_type_name()}); "
                    "run DecomposeGQA(Branch.PREFILL) first"
                )
        for parameter in empty:
            model.remove_parameter(parameter)
        self.removed = len(empty)
        return self.removed > 0


def _lengths(parameter: ov.Node) -> list[int]:
    return [d.get_length() for d in parameter.get_output_partial_shape(0) if d.is_static]
