"""What the decode loop refuses, and that it does so before anything runs."""

import numpy as np
import pytest
from tiny_llm import new_request, text
from tiny_model import TinyModel
from toy_target import ToyTarget, hashed, plain_greedy

from npusim.errors import CapacityError, ConfigError, InputError
from npusim.speculative import DraftModel, PromptLookup, Scripted, generate

VOCAB = 11
ONE_WINDOW = TinyModel(windows=(4, -1))
PROMPT = [3, 9, 1, 4, 7]
TRUTH = plain_greedy(hashed(vocab_size=VOCAB), PROMPT, 9)


@pytest.mark.parametrize(
    ("prompt", "arguments", "error", "message"),
    [
        ([], {}, InputError, "prompt_ids is empty"),
        (
            [3, 11],
            {},
            InputError,
            "token 1 of prompt_ids is 11, outside the vocabulary of the target: 0 to 10",
        ),
        ([3, -1], {}, InputError, "token 1 of prompt_ids is -1"),
        ([0.5], {}, InputError, "flat sequence of integers: 'float' object"),
        ([[1, 2]], {}, InputError, "flat sequence of integers: 'list' object"),
        (np.array([[1, 2]]), {}, InputError, "flat sequence of integers: only integer scalar"),
        (np.array([[1]]), {}, InputError, "flat sequence of integers: only integer scalar"),
        (3, {}, InputError, "flat sequence of integers: 'int' object is not iterable"),
        (None, {}, InputError, "flat sequence of integers: 'NoneType' object is not iterable"),
        ("35", {}, InputError, "flat sequence of integers: 'str' object"),
        ([3, 1.0], {}, InputError, "flat sequence of integers: 'float' object"),
        (np.array([3.0]), {}, InputError, "flat sequence of integers"),
        ([3, True], {}, InputError, "token 1 of prompt_ids is True; a token id is an integer"),
        (np.array([True]), {}, InputError, "flat sequence of integers"),
        ([1] * 17, {}, CapacityError, "the prompt has 17 tokens, the target takes 16"),
        (PROMPT, {"max_new_tokens": -1}, InputError, "max_new_tokens is -1"),
        (PROMPT, {"max_new_tokens": 2.5}, InputError, "max_new_tokens is 2.5; it must be an integer of 0 or"),
        (
            PROMPT,
            {"max_new_tokens": float("nan")},
            InputError,
            "max_new_tokens is nan; it must be an",
        ),
        (PROMPT, {"max_new_tokens": True}, InputError, "max_new_tokens is True; it must be an integer"),
        (
            PROMPT,
            {"max_new_tokens": np.float32(4)},
            InputError,
            r"max_new_tokens is np.float32\(4.0\);",
        ),
        (PROMPT, {"max_new_tokens": None}, InputError, "max_new_tokens is None; it must be an integer"),
        (
            PROMPT,
            {"eos_token_id": 3.5},
            InputError,
            "eos_token_id is 3.5, outside the vocabulary",
        ),
        (PROMPT, {"eos_token_id": 3.0}, InputError, "eos_token_id is 3.0, outside the vocabulary"),
        (PROMPT, {"eos_token_id": True}, InputError, "eos_token_id is True, outside the vocabulary"),
        (
            PROMPT,
            {"num_draft_tokens": 1.5, "drafter": PromptLookup()},
            InputError,
            "num_draft_tokens is 1.5",
        ),
        (
            PROMPT,
            {"num_draft_tokens": "4"},
            InputError,
            "num_draft_tokens is '4'; it must be an integer",
        ),
        (
            PROMPT,
            {"drafter": DraftModel(ToyTarget(vocab_size=13))},
            InputError,
            "the draft model has a vocabulary of 13 tokens, the target one of 11; a draft model must share",
        ),
        (
            PROMPT,
            {"drafter": DraftModel(ToyTarget(vocab_size=10))},
            InputError,
            "the draft model has a vocabulary of 10 tokens, the target one of 11; a draft model must share",
        ),
        (PROMPT, {"eos_token_id": 11}, InputError, "eos_token_id is 11, outside the vocabulary"),
        (PROMPT, {"eos_token_id": -1}, InputError, "eos_token_id is -1, outside the vocabulary"),
        (
            PROMPT,
            {"num_draft_tokens": -1},
            InputError,
            "num_draft_tokens is -1; it must be an integer of 0",
        ),
        (
            PROMPT,
            {"num_draft_tokens": 0, "drafter": PromptLookup()},
            InputError,
            "num_draft_tokens is 0; it must be an integer of 1 or more with a drafter",
        ),
    ],
)
def test_arguments_that_cannot_hold_are_refused_before_the_target_is_touched(
    prompt: list[int], arguments: dict[str, int], error: type[Exception], message: str
) -> None:
    target = ToyTarget()
    generate(target, [1, 2], max_new_tokens=2)
    calls = list(target.calls)
    with pytest.raises(error, match=message):
        generate(target, prompt, **{"max_new_tokens": 4, **arguments})
    assert target.calls == calls
    assert generate(target, PROMPT, max_new_tokens=4).tokens == TRUTH[:4]


def test_a_target_without_room_for_a_draft_refuses_a_drafter() -> None:
    target = ToyTarget(max_generation_tokens=1)
    with pytest.raises(ConfigError, match="NPUW_LLM_MAX_GENERATION_TOKEN_LEN of 2 or more"):
        generate(target, PROMPT, max_new_tokens=4, drafter=PromptLookup())
    assert target.calls == []
    assert generate(target, PROMPT, max_new_tokens=4).tokens == TRUTH[:4]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ([1, 2, 3], "the drafter proposed 3 tokens and was asked for 2 at most"),
        ([1, 11], "token 1 of the draft is 11, outside the vocabulary of the target: 0 to 10"),
        ([-1], "token 0 of the draft is -1, outside"),
        ([2.0], "the draft must be a flat sequence of integers: 'float' object"),
    ],
)
def test_a_draft_that_breaks_the_agreement_is_refused_before_it_is_fed(
    draft: list[int], message: str
) -> None:
    target = ToyTarget()
    with pytest.raises(InputError, match=message):
        generate(target, PROMPT, max_new_tokens=9, drafter=Scripted(lambda *_: draft), num_draft_tokens=2)
    assert target.stored == PROMPT


WRONG = Scripted(lambda _tokens, num_tokens: [0] * num_tokens)


@pytest.mark.parametrize(
    ("options", "new_tokens", "refused"),
    [
        ({"layout": "ROLLING"}, 9, True),
        ({"layout": "ROLLING", "slack": 5}, 9, True),
        ({"layout": "ROLLING", "slack": 5}, 3, False),  # 9 rows: nothing is evicted before
        ({"layout": "ROLLING", "slack": 5}, 4, True),
        ({"layout": "ROLLING", "commit": "DEFERRED"}, 9, False),
        ({"layout": "RING"}, 9, False),
        ({"layout": "RING", "commit": "DEFERRED"}, 9, False),
        ({"layout": "LINEAR"}, 9, False),
        ({"layout": "GATHERED"}, 9, False),
    ],
)
def test_a_cache_that_cannot_drop_every_draft_refuses_a_drafter_beforehand(
    options: dict[str, str | int], new_tokens: int, refused: bool
) -> None:
    request, prompt = new_request(ONE_WINDOW, **options), text(7)
    plain = generate(request, prompt, max_new_tokens=new_tokens).tokens
    request.reset_state()
    arguments = {"max_new_tokens": new_tokens, "drafter": WRONG, "num_draft_tokens": 2}
    if refused:
        message = "within the .* tokens of .* a block of 3 can push out rows .* NPUSIM_COMMIT"
        with pytest.raises(ConfigError, match=message):
            generate(request, prompt, **arguments)
        assert request.num_stored_tokens == 0
    else:
        assert generate(request, prompt, **arguments).tokens == plain
