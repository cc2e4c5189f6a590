"""The decode loop, one for plain and speculative decoding: plain is a draft of no tokens.

Each target step verifies [last token] + draft in one block, at explicit positions. The block begins where the
last emitted token belongs, so the target itself drops the rows of a rejected draft.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from npusim.errors import CapacityError, ConfigError, InputError
from npusim.speculative.drafters import Drafter, DraftModel
from npusim.speculative.sampling import Greedy, SamplingRule
from npusim.speculative.target import KnowsRewinds, Target, checked_tokens, feed, whole_number
from npusim.trace import StepRecord, Traced

_GREEDY = Greedy()


class FinishReason(Enum):
    """Why a generation ended."""

    EOS = "eos"
    LENGTH = "length"  # max_new_tokens were emitted
    CAPACITY = "capacity"  # the last token emitted has no room in the cache


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the target.

    position: of the first token fed. proposed, accepted: draft tokens in the block, and those of them that
    were emitted. tokens: what was emitted, the target's own last token included unless the end came before.
    record: what the target did in the call (stage, slots written, tokens trimmed, times, ..); only in what
    on_step gets, and None where the target keeps no records (`Traced`). Equality leaves it out: it has times.
    """

    position: int
    proposed: int
    accepted: int
    tokens: tuple[int, ...]
    record: StepRecord | None = field(default=None, compare=False)

    @property
    def emitted(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` emitted, and how.

    tokens: new ones only; the first comes from the prefill. steps: the target steps after the prefill.
    """

    tokens: list[int]
    steps: tuple[Step, ...]
    finish_reason: FinishReason

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all draft tokens; 0 if there were none."""
        proposed = sum(step.proposed for step in self.steps)
        return sum(step.accepted for step in self.steps) / proposed if proposed else 0.0

    @property
    def tokens_per_target_step(self) -> float:
        """Tokens emitted per target step, prefill and its token apart; 0 if the prefill was all."""
        return sum(step.emitted for step in self.steps) / len(self.steps) if self.steps else 0.0


def generate(
    target: Target,
    prompt_ids: Sequence[int] | npt.NDArray[np.integer],
    *,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 4,
    eos_token_id: int | None = None,
    sampler: SamplingRule = _GREEDY,
    on_step: Callable[[Step], None] | None = None,
) -> Generation:
    """Continue a prompt, from position 0 of a new conversation, with or without a drafter.

    Whatever the drafter proposes, the tokens are those of plain decoding (with sampling: their distribution
    is). With a cache that rounds (float16, quantized, NPUW) near ties may fall the other way: a block reads
    its own rows before they are rounded. Blocks are shortened to the target's block size, to what is left of
    its capacity and of max_new_tokens; the last token emitted need not be stored. Afterwards the target holds
    the prompt and all new tokens but the last, as after plain decoding; where its cache cannot go back by the
    last block, also what that block had rejected.

    max_new_tokens: 0 does nothing at all. num_draft_tokens: most drafts per step, at least 1 with a drafter.
    eos_token_id: ends the generation and is its last token. on_step: called after every call of the target,
    the prefill first, with the target's record of the call; a step_listener of the target's goes on hearing.

    Raises InputError, CapacityError or ConfigError before the target is touched for arguments that cannot
    hold, among them a draft model of another vocabulary and a drafter for a target whose cache cannot always
    drop a rejected draft; InputError for a drafter that proposes more than asked or no token ids; what the
    target and the drafter raise passes through.
    """
    _check_roles(target, drafter, sampler, on_step)
    prompt = checked_tokens(prompt_ids, target.vocab_size, "prompt_ids")
    _check_prompt(target, prompt)
    _check_numbers(target, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)
    _check_drafting(target, drafter, num_draft_tokens)
    if drafter is not None:
        _check_rewinds(target, num_draft_tokens, len(prompt) + max_new_tokens - 1)
    if max_new_tokens == 0:
        return Generation(tokens=[], steps=(), finish_reason=FinishReason.LENGTH)

    verifier = sampler.verifier()
    sequence = _Sequence(prompt, limit=max_new_tokens, eos_token_id=eos_token_id, capacity=target.capacity)
    with _reporting(target, on_step) as report:
        report(sequence.emit(0, verifier.verify(feed(target, prompt, 0)[-1:], []), proposed=0))
        steps: list[Step] = []
        while (reason := sequence.finish_reason) is None:
            wanted = min(num_draft_tokens, target.max_generation_tokens - 1, sequence.room_for_drafts)
            draft = _proposal(drafter, sequence.tokens, wanted, target.vocab_size)
            position = len(sequence.tokens) - 1
            rows = feed(target, [sequence.tokens[-1], *draft], position)
            steps.append(sequence.emit(position, verifier.verify(rows, draft), proposed=len(draft)))
            report(steps[-1])
    kept = len(sequence.tokens) - 1
    if target.num_stored_tokens > kept and target.can_trim(kept):
        target.trim(kept)
    return Generation(tokens=sequence.tokens[len(prompt) :], steps=tuple(steps), finish_reason=reason)


@contextmanager
def _reporting(target: Target, on_step: Callable[[Step], None] | None) -> Iterator[Callable[[Step], None]]:
    """A function that hands a step to on_step, with the target's newest record of a call."""
    if on_step is None:
        yield lambda _step: None
        return
    if not isinstance(target, Traced):
        yield on_step
        return
    newest: list[StepRecord] = []
    before = target.step_listener

    def listen(record: StepRecord) -> None:
        newest[:] = [record]
        if before is not None:
            before(record)

    target.step_listener = listen
    try:
        yield lambda step: on_step(replace(step, record=newest.pop() if newest else None))
    finally:
        target.step_listener = before


class _Sequence:
    """Prompt and emitted tokens, and when they must end."""

    def __init__(self, prompt: list[int], *, limit: int, eos_token_id: int | None, capacity: int) -> None:
        self.tokens = list(prompt)
        self._end = len(prompt) + limit
        self._eos_token_id = eos_token_id
        self._capacity = capacity

    @property
    def room_for_drafts(self) -> int:
        """Drafts that fit: a step stores all tokens and the draft, and emits one more than the draft."""
        return min(self._capacity - len(self.tokens), self._end - len(self.tokens) - 1)

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.tokens[-1] == self._eos_token_id:
            return FinishReason.EOS
        if len(self.tokens) == self._end:
            return FinishReason.LENGTH
        return FinishReason.CAPACITY if len(self.tokens) > self._capacity else None

    def emit(self, position: int, verified: list[int], *, proposed: int) -> Step:
        """Append what the target verified, up to the end token. All but the last verified are drafts."""
        accepted = len(verified) - 1
        if self._eos_token_id in verified:
            verified = verified[: verified.index(self._eos_token_id) + 1]
        self.tokens += verified
        return Step(
            position=position,
            proposed=proposed,
            accepted=min(accepted, len(verified)),
            tokens=tuple(verified),
        )


def _proposal(drafter: Drafter | None, tokens: list[int], wanted: int, vocab_size: int) -> list[int]:
    if drafter is None or wanted < 1:
        return []
    # A copy: what a drafter does to its list must not reach the sequence.
    draft = checked_tokens(drafter.propose(list(tokens), wanted), vocab_size, "the draft")
    if len(draft) > wanted:
        raise InputError(f"the drafter proposed {len(draft)} tokens and was asked for {wanted} at most")
    return draft


def _check_roles(target: object, drafter: object, sampler: object, on_step: object) -> None:
    if not isinstance(target, Target):
        raise InputError(
            f"the target is a {type(target).__name__}, which is no request of npusim; wrap one of OpenVINO "
            "in npusim.OpenVINOTarget"
        )
    if drafter is not None and not isinstance(drafter, Drafter):
        raise InputError(
            f"the drafter is a {type(drafter).__name__} without a method propose; wrap a function in "
            "npusim.Scripted, a request in npusim.DraftModel"
        )
    if not isinstance(sampler, SamplingRule):
        raise InputError(
            f"the sampler is {sampler!r}; give npusim.Greedy() or npusim.Sampler(temperature=..)"
        )
    if on_step is not None and not callable(on_step):
        raise InputError(f"on_step is {on_step!r}; a function of one Step is needed")


def _check_prompt(target: Target, prompt: list[int]) -> None:
    if not prompt:
        raise InputError("prompt_ids is empty; a generation needs at least 1 token to continue")
    if len(prompt) > target.max_prompt_len:
        raise CapacityError(
            f"the prompt has {len(prompt)} tokens, the target takes {target.max_prompt_len}; shorten the "
            "prompt or compile the target with a larger NPUW_LLM_MAX_PROMPT_LEN"
        )


def _check_numbers(target: Target, *, max_new_tokens: int, eos_token_id: int | None) -> None:
    limit = whole_number(max_new_tokens)
    if limit is None or limit < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer of 0 or more")
    if eos_token_id is None:
        return
    eos = whole_number(eos_token_id)
    if eos is None or not 0 <= eos < target.vocab_size:
        raise InputError(
            f"eos_token_id is {eos_token_id!r}, outside the vocabulary of the target: integers from 0 to "
            f"{target.vocab_size - 1}; leave it out to generate up to max_new_tokens"
        )


def _check_drafting(target: Target, drafter: Drafter | None, num_draft_tokens: int) -> None:
    least = 0 if drafter is None else 1
    number = whole_number(num_draft_tokens)
    if number is None or number < least:
        raise InputError(
            f"num_draft_tokens is {num_draft_tokens!r}; it must be an integer of {least} or more"
            + (" with a drafter; leave the drafter out to decode plainly" if drafter else "")
        )
    if drafter is not None and target.max_generation_tokens < 2:
        raise ConfigError(
            "a draft is verified in blocks of at least 2 tokens, and the target takes generate steps of "
            f"{target.max_generation_tokens}; compile it with NPUW_LLM_MAX_GENERATION_TOKEN_LEN of 2 or more "
            "or leave the drafter out"
        )
    if isinstance(drafter, DraftModel) and drafter.vocab_size != target.vocab_size:
        raise InputError(
            f"the draft model has a vocabulary of {drafter.vocab_size} tokens, the target one of "
            f"{target.vocab_size}; a draft model must share the target's"
        )


def _check_rewinds(target: Target, num_draft_tokens: int, num_tokens: int) -> None:
    """num_tokens: the most that the generation may store."""
    block = min(num_draft_tokens + 1, target.max_generation_tokens)
    longest = min(num_tokens, target.capacity)
    if isinstance(target, KnowsRewinds) and not target.takes_back_blocks(
        block_size=block, num_tokens=longest
    ):
        raise ConfigError(
            f"the target's cache cannot drop every rejected draft: within the {longest} tokens of this "
            f"generation, storing a block of {block} can push out rows that a window needs once drafts are "
            "rejected; compile the target with NPUSIM_COMMIT=DEFERRED or another NPUSIM_KV_LAYOUT, or leave "
            "the drafter out"
        )
