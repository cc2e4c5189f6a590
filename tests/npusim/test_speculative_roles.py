"""What is no target, drafter, sampler or listener is refused by name before anything runs."""

import openvino as ov
import pytest
from model_files import READABLE
from toy_target import ToyTarget

from npusim.errors import InputError
from npusim.speculative import DraftModel, Scripted, generate

PROMPT = [3, 9, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"drafter": lambda _tokens, _n: []},
            "the drafter is a function without .*; wrap a function in",
        ),
        ({"drafter": ToyTarget()}, "the drafter is a ToyTarget without .* a request in npusim.DraftModel"),
        ({"sampler": 0.8}, "the sampler is 0.8; give npusim.Greedy"),
        ({"sampler": None}, "the sampler is None; give npusim.Greedy"),
        ({"on_step": 3}, "on_step is 3; a function"),
    ],
)
def test_a_wrong_role(arguments: dict[str, object], message: str) -> None:
    target = ToyTarget()
    with pytest.raises(InputError, match=message):
        generate(target, PROMPT, max_new_tokens=4, **arguments)  # type: ignore[arg-type]
    assert target.calls == []


def test_a_request_of_openvino_must_be_wrapped() -> None:
    model = ov.Model([], [], "empty")
    for target in (ov.compile_model(model, "CPU").create_infer_request(), model, None, "model.onnx"):
        with pytest.raises(InputError, match="which is no request of npusim; wrap one of OpenVINO"):
            generate(target, PROMPT, max_new_tokens=4)  # type: ignore[arg-type]


def test_what_cannot_draft_is_refused_when_it_is_made() -> None:
    with pytest.raises(InputError, match="a draft model is a request, got a PosixPath; compile the model"):
        DraftModel(READABLE["swa_draft"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="script is 3; a function"):
        Scripted(3)  # type: ignore[arg-type]
