"""Hand out logits in float32, whatever type the model computes in."""

import openvino as ov
from openvino.passes import ModelPass

from transforms.attention_parts import convert_results


class FloatLogits(ModelPass):
    """Convert the model output `logits` to float32; `changed` counts the outputs of the last run (0 or 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """True where the logits were of another type; the output's names stay."""
        logits = [
            result.input_value(0)
            for result in model.get_results()
            if "logits" in result.output(0).get_names()
        ]
        self.changed = sum(convert_results(output, ov.Type.f32) for output in logits)
        if self.changed:
            model.validate_nodes_and_infer_types()
        return self.changed > 0
