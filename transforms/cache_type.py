"""Store KV rows in another float type than attention computes in."""

import openvino as ov
import openvino.opset13 as ops
from openvino.passes import ModelPass

from transforms.gqa_node import find_gqa, read_gqa


class ConvertCache(ModelPass):
    """Give every cache input and output of GroupQueryAttention the element type `cache_type`.

    Past rows are converted to the type of the query as they enter, new rows as they leave (round to
    nearest even). Run it before DecomposeGQA. `changed` counts the inputs of the last run.
    """

    def __init__(self, cache_type: ov.Type) -> None:
        super().__init__()
        self._cache_type = cache_type
        self.changed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Convert the past of every node; presents are converted where they leave the model."""
        self.changed = 0
        for node in find_gqa(model):
            gqa = read_gqa(node)
            for port in (3, 4):
                self.changed += self._convert_past(node, port, gqa.element_type)
            for present in node.outputs()[1:]:
                self._convert_present(present)
        if self.changed:
            model.validate_nodes_and_infer_types()
        return self.changed > 0

    def _convert_past(self, node: ov.Node, port: int, compute_type: ov.Type) -> int:
        parameter = node.input_value(port).get_node()
        if parameter.get_type_name() != "Parameter" or parameter.get_element_type() == self._cache_type:
            return 0
        parameter.set_element_type(self._cache_type)
        parameter.validate_and_infer_types()
        converted = ops.convert(parameter, compute_type.get_type_name())
        node.input(port).replace_source_output(converted.output(0))
        return 1

    def _convert_present(self, present: ov.Output) -> None:
        if present.get_element_type() == self._cache_type:
            return
        names = present.get_names()
        for target in present.get_target_inputs():
            if target.get_node().get_type_name() == "Result":
                converted = ops.convert(present, self._cache_type.get_type_name()).output(0)
                present.get_tensor().set_names(set())
                target.replace_source_output(converted)
                converted.get_tensor().add_names(names)
