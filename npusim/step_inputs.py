"""Check the tensors of one call: everything wrong with them is found before anything changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov

from npusim.errors import InputError
from npusim.stage import Stage
from npusim.static_graph import TokenArray

INPUT_NAMES = ("input_ids", "attention_mask", "position_ids")

TensorLike: TypeAlias = npt.NDArray[np.generic] | ov.Tensor | list[list[int]]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One call: tokens [n] at positions start .. start + n - 1."""

    tokens: TokenArray
    start: int

    @property
    def stage(self) -> Stage:
        """More than one token at position 0 starts a conversation; all else continues one (NPUW's rule)."""
        is_prompt = self.start == 0 and len(self.tokens) > 1
        return Stage.PREFILL if is_prompt else Stage.GENERATE


def read_step(inputs: Mapping[str, TensorLike], *, num_stored_tokens: int, num_embeddings: int) -> StepInputs:
    """The call that `inputs` describe: input_ids [1, n], position_ids [1, n], attention_mask [1, T].

    attention_mask and position_ids may be absent; both then mean "continue at num_stored_tokens".

    Raises InputError, naming what was got and what is allowed.
    """
    unknown = sorted(set(inputs) - set(INPUT_NAMES))
    if unknown:
        raise InputError(f"unknown input {unknown[0]!r}; inputs are {', '.join(INPUT_NAMES)}")
    if "input_ids" not in inputs:
        raise InputError("input_ids is missing; set it, or pass it to infer")
    tokens = _read_row("input_ids", inputs["input_ids"])
    if tokens.size == 0:
        raise InputError("input_ids is empty; a call needs at least 1 token")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= num_embeddings:
        bad = lowest if lowest < 0 else highest
        raise InputError(f"input_ids contains {bad}; token ids are 0..{num_embeddings - 1}")
    start = num_stored_tokens
    if "position_ids" in inputs:
        start = _read_start(inputs["position_ids"], len(tokens), num_stored_tokens)
    if "attention_mask" in inputs:
        _check_attention_mask(inputs["attention_mask"], start, len(tokens))
    return StepInputs(tokens, start)


def _read_row(name: str, value: TensorLike) -> TokenArray:
    """A tensor [1, n] of integers as an int64 array [n]."""
    array = _as_array(name, value)
    if array.dtype.kind not in "iu" and array.size:
        raise InputError(f"{name} is {array.dtype}; an integer type such as int64 is needed")
    if array.ndim != 2 or array.shape[0] != 1:
        batch = f" (batch {array.shape[0]})" if array.ndim == 2 else ""
        raise InputError(f"{name} has shape {list(array.shape)}{batch}; [1, tokens] is needed, batch is 1")
    row: TokenArray = array[0].astype(np.int64, copy=False)
    return row


def _as_array(name: str, value: TensorLike) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(value.data if isinstance(value, ov.Tensor) else value)
    except ValueError as error:
        raise InputError(f"{name} is no array: {error}; [1, tokens] integers are needed") from error


def _read_start(value: TensorLike, length: int, num_stored_tokens: int) -> int:
    positions = _read_row("position_ids", value)
    if len(positions) != length:
        raise InputError(f"position_ids has {len(positions)} entries for {length} tokens; give one each")
    start = int(positions[0])
    if start < 0:
        raise InputError(f"position_ids begins at {start}; positions are 0 or more")
    if start > num_stored_tokens:
        raise InputError(
            f"position_ids begins at {start}, but {num_stored_tokens} tokens are stored: positions "
            f"{num_stored_tokens}..{start - 1} would be a gap; begin at {num_stored_tokens} or before"
        )
    if length > 1 and not np.array_equal(positions, np.arange(start, start + length)):
        raise InputError(
            f"position_ids {positions.tolist()[:8]} are not consecutive; "
            f"a block at {start} has positions {start}..{start + length - 1}"
        )
    return start


def _check_attention_mask(value: TensorLike, start: int, length: int) -> None:
    mask = _read_row("attention_mask", value)
    total = start + length
    if len(mask) != total or not (mask == 1).all():
        raise InputError(
            f"attention_mask has {len(mask)} entries with sum {int(mask.sum())}; {start} tokens before the "
            f"block and {length} in it need {total} ones, or leave the mask out"
        )
