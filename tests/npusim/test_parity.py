"""A request watched beside a reference."""

import numpy as np
import pytest
from cli_driving import LLAMA

import npusim
from npusim.native import NativeModel
from npusim.parity import ParityTarget, StepParity


def test_parity_follows_a_rejected_draft_back():
    config = {"NPUW_LLM_MAX_PROMPT_LEN": 8, "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": 3}
    request = npusim.compile_model(LLAMA, config).create_infer_request()
    watched = ParityTarget(request, NativeModel(LLAMA))

    def infer(tokens: list[int], position: int) -> None:
        positions = np.arange(position, position + len(tokens))
        watched.infer({"input_ids": np.array([tokens]), "position_ids": positions[None]})

    infer([3, 1, 4, 1, 5], 0)
    infer([9, 2, 6], 5)
    infer([5, 3], 6)  # 2 and 6 were rejected
    assert watched.num_stored_tokens == request.num_stored_tokens == 8
    infer([7, 7], 0)  # a new conversation
    watched.reset_state()
    infer([8, 9], 0)
    assert [(step.position, step.num_tokens) for step in watched.steps] == [
        (0, 5),
        (5, 3),
        (6, 2),
        (0, 2),
        (0, 2),
    ]
    assert 0 < max(step.max_abs_difference for step in watched.steps) < 1e-5


@pytest.mark.parametrize(
    ("wrong", "difference"), [(2.5, 2.5), (-2.5, 2.5), (np.nan, np.inf), (np.inf, np.inf)]
)
def test_parity_names_the_largest_difference(wrong, difference):
    class Zeros:
        """Stands for a request whose logits are 0."""

        def infer(self, inputs, *, share_outputs=False):
            assert not share_outputs
            return {"logits": np.zeros((1, inputs["input_ids"].shape[1], 5), np.float32)}

    class Wrong:
        """Stands for a reference with one other logit, in the first of the rows."""

        def trim(self, num_tokens):
            return num_tokens

        def feed(self, tokens):
            logits = np.full((1, len(tokens), 5), 0.5, np.float32)
            logits[0, 0, 3] = wrong
            return logits

    watched = ParityTarget(Zeros(), Wrong())
    watched.infer({"input_ids": np.array([[1, 2, 3]]), "position_ids": np.array([[4, 5, 6]])})
    assert watched.steps == [StepParity(position=4, num_tokens=3, max_abs_difference=difference)]
