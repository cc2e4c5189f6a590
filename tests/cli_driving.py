"""What the tests of the command line share: models, and tokens to expect of them."""

import functools
from pathlib import Path

from npusim.native import NativeModel

TESTS = Path(__file__).parent
LLAMA = str(TESTS / "models" / "llama.onnx")
SOFTCAP = str(TESTS / "models" / "gemma2_softcap.onnx")
TARGET = str(TESTS.parent / "npusim" / "models" / "swa_target.onnx")
DRAFT = str(TESTS.parent / "npusim" / "models" / "swa_draft.onnx")
PROMPT = "Return a list of the "


native_model = functools.cache(NativeModel)


def native_greedy(path: str, prompt_ids: list[int], count: int) -> list[int]:
    """Greedy tokens by the native reference alone."""
    model = native_model(path)
    model.reset()
    row = model.feed(prompt_ids)[0, -1]
    tokens = [int(row.argmax())]
    while len(tokens) < count:
        tokens.append(int(model.feed(tokens[-1:])[0, -1].argmax()))
    return tokens
