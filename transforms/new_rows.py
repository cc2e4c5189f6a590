"""Let the present outputs carry only the new rows: the host places them, the past need not be copied."""

import openvino as ov
from openvino.passes import ModelPass

from transforms.errors import DecompositionError
from transforms.gqa_node import find_gqa, node_label


class KeepNewRows(ModelPass):
    """Turn each present output Concat(past, new) [1, KV, C + S, D] into new [1, KV, S, D].

    Port names and order stay. `changed` counts the outputs of the last run; a second run changes 0. Run it
    after DecomposeGQA: raises DecompositionError, with the model unchanged, while a GroupQueryAttention is
    left, whose presents are no Concat yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Rewire every Result (or the conversion before it) that reads Concat(past, new)."""
        self.changed = 0
        left = [node_label(node) for node in find_gqa(model)]
        if left:
            raise DecompositionError(f"{left[0]} is not lowered yet; run DecomposeGQA before KeepNewRows")
        for result in model.get_results():
            reader = result.input(0)
            if reader.get_source_output().get_node().get_type_name() == "Convert":
                reader = reader.get_source_output().get_node().input(0)
            present = reader.get_source_output()
            if not _is_past_and_rows(present.get_node()):
                continue
            names = present.get_names()
            present.get_tensor().set_names(set())
            new = present.get_node().input_value(1)
            reader.replace_source_output(new)
            new.get_tensor().add_names(names)
            self.changed += 1
        if self.changed:
            model.validate_nodes_and_infer_types()
        return self.changed > 0


def _is_past_and_rows(node: ov.Node) -> bool:
    """Whether a node is Concat(past, rows) along axis 2, past a parameter or a converted one."""
    if node.get_type_name() != "Concat" or node.get_input_size() != 2 or node.get_attributes()["axis"] != 2:
        return False
    source = node.input_value(0).get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() == "Parameter")
