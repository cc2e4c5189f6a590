"""Let the present outputs carry only the new rows: the host places them, the past need not be copied."""

import openvino as ov
from openvino.passes import ModelPass


class KeepNewRows(ModelPass):
    """Turn each present output Concat(past, new) [1, KV, C + S, D] into new [1, KV, S, D].

    Port names and order stay. `changed` counts the outputs of the last run; a second run changes 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Rewire every Result fed by a Concat along axis 2 whose first input is a model input."""
        self.changed = 0
        for result in model.get_results():
            present = result.input_value(0)
            node = present.get_node()
            if node.get_type_name() != "Concat" or not _starts_with_past(node):
                continue
            names = present.get_names()
            present.get_tensor().set_names(set())
            new = node.input_value(1)
            result.input(0).replace_source_output(new)
            new.get_tensor().add_names(names)
            self.changed += 1
        if self.changed:
            model.validate_nodes_and_infer_types()
        return self.changed > 0


def _starts_with_past(node: ov.Node) -> bool:
    """Whether a node is Concat(past, rows) along axis 2, past a parameter or a converted one."""
    if node.get_input_size() != 2 or node.get_attributes()["axis"] != 2:
        return False
    source = node.input_value(0).get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() == "Parameter")
