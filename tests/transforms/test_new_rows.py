"""Presents that carry only the new rows."""

import openvino as ov
import pytest
from model_files import READABLE

from transforms import Branch, DecomposeGQA, DecompositionError, KeepNewRows, StaticShapes


def test_presents_that_are_no_concat_yet_are_refused() -> None:
    model = ov.Core().read_model(READABLE["llama"])
    StaticShapes(sequence_length=3, past_length=7).run_on_model(model)
    keep = KeepNewRows()
    with pytest.raises(DecompositionError, match=r"layers\.0.* is not lowered yet; run DecomposeGQA before"):
        keep.run_on_model(model)
    DecomposeGQA(Branch.GENERATE).run_on_model(model)
    keep.run_on_model(model)
    assert keep.changed == 8
    assert model.output("present.0.key").get_shape()[2] == 3
