"""Store KV rows in another float type than attention computes in."""

from collections.abc import Mapping

import openvino as ov
import openvino.opset13 as ops
from openvino.passes import ModelPass

from transforms.attention_parts import convert_results, parameter_behind
from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode, find_gqa, read_gqa
from transforms.gqa_rules import SUPPORTED_TYPES


class ConvertCache(ModelPass):
    """Give the cache inputs and outputs of GroupQueryAttention the element type `cache_type`.

    One type for all nodes, or a mapping from node name (`node_label`) to type; a node that the mapping does
    not name keeps its own. Past rows are converted to the type of the query as they enter, new rows as they
    leave (round to nearest even). Run it before DecomposeGQA. `changed` counts the inputs of the last run.

    Raises DecompositionError, with the model unchanged, for a quantized cache and another type than its own
    (its codes would have to be rounded anew), for one converted already to another type, for a type that is
    no float, and for a node that is not there. TypeError for what is no type.
    """

    def __init__(self, cache_type: ov.Type | Mapping[str, ov.Type]) -> None:
        super().__init__()
        types = cache_type.values() if isinstance(cache_type, Mapping) else [cache_type]
        if not all(isinstance(kind, ov.Type) for kind in types):
            raise TypeError(f"cache_type={cache_type!r}; an openvino.Type, or one for each name, is needed")
        self._cache_type = cache_type
        self.changed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Convert the past of every node; presents are converted where they leave the model."""
        self.changed = 0
        gqas = [read_gqa(node) for node in find_gqa(model)]
        self._check_names([gqa.name for gqa in gqas])
        wanted = [(gqa, self._type_for(gqa)) for gqa in gqas]
        for gqa, cache_type in wanted:
            for port in (3, 4):
                self.changed += _convert_past(gqa, port, cache_type)
            for present in gqa.node.outputs()[1:]:
                convert_results(present, cache_type)
        if self.changed:
            model.validate_nodes_and_infer_types()
        return self.changed > 0

    def _check_names(self, names: list[str]) -> None:
        unknown = sorted(set(self._cache_type) - set(names)) if isinstance(self._cache_type, Mapping) else []
        if unknown:
            raise DecompositionError(
                f"cache_type names {unknown}, which the model does not have; its nodes are {names}"
            )

    def _type_for(self, gqa: GQANode) -> ov.Type:
        """The type asked for, checked."""
        own = parameter_behind(gqa.past_key, gqa.name).get_element_type()
        wanted = self._cache_type
        if isinstance(wanted, Mapping):
            wanted = wanted.get(gqa.name, own)
        if gqa.quantization is not None and wanted != own:
            raise DecompositionError(
                f"{gqa.name}: its cache is quantized ({own.get_type_name()} codes) and cannot become "
                f"{wanted.get_type_name()}; keep its type"
            )
        if gqa.quantization is None and wanted not in SUPPORTED_TYPES:
            raise DecompositionError(
                f"{gqa.name}: a float cache cannot become {wanted.get_type_name()}; allowed: "
                f"{', '.join(kind.get_type_name() for kind in SUPPORTED_TYPES)}"
            )
        if wanted != own and gqa.past_key.get_node().get_type_name() != "Parameter":
            raise DecompositionError(
                f"{gqa.name}: its cache is converted already ({own.get_type_name()}) and cannot become "
                f"{wanted.get_type_name()} as well; run ConvertCache once, on the model as it was"
            )
        return wanted


def _convert_past(gqa: GQANode, port: int, cache_type: ov.Type) -> int:
    parameter = parameter_behind(gqa.node.input_value(port), gqa.name)
    if parameter.get_element_type() == cache_type:
        return 0
    parameter.set_element_type(cache_type)
    parameter.validate_and_infer_types()
    converted = ops.convert(parameter, gqa.element_type.get_type_name())
    gqa.node.input(port).replace_source_output(converted.output(0))
    return 1
