"""How many rows of a block are real, counted in a model's attention_mask."""

import openvino as ov
import openvino.opset13 as ops
import pytest

from transforms import DecompositionError, tokens_in_attention_mask


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"input_ids": [1, 8], "attention_mask": [1, 7]}, "attention_mask has 7 entries for a block of 8"),
        ({"input_ids": [1, 3]}, "no input attention_mask to count"),
        ({"attention_mask": [1, 3]}, "no input input_ids to count"),
        ({"input_ids": [1, -1], "attention_mask": [1, 7]}, r"input_ids has shape \[1,\?\]; a static"),
        ({"input_ids": [1, 3], "attention_mask": [1, -1]}, r"attention_mask has shape \[1,\?\]; a static"),
        (
            {"input_ids": [1, 3], "attention_mask": [7]},
            r"attention_mask has shape \[7\]; a static \[1, length",
        ),
    ],
)
def test_a_mask_that_tells_no_count(shapes: dict[str, list[int]], message: str) -> None:
    inputs = [ops.parameter(shape, ov.Type.i64) for shape in shapes.values()]
    for name, parameter in zip(shapes, inputs, strict=True):
        parameter.output(0).get_tensor().set_names({name})
    with pytest.raises(DecompositionError, match=message):
        tokens_in_attention_mask(ov.Model([ops.relu(parameter) for parameter in inputs], inputs))
