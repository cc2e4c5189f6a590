"""Read and check the tensors of one call: all that is wrong with them is found before anything changes."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import openvino as ov

from npusim.errors import InputError
from npusim.stage import Stage
from npusim.static_graph import TokenArray

INPUT_NAMES = ("input_ids", "attention_mask", "position_ids")

TensorLike: TypeAlias = npt.NDArray[np.generic] | ov.Tensor | list[list[int]]
Port: TypeAlias = ov.Output | ov.ConstOutput

_INT64 = np.dtype(np.int64)
_NAMES = frozenset(INPUT_NAMES)


class StepInputs(NamedTuple):
    """One call as given: tokens [n] from position `start` on; their positions [n], None where left out."""

    tokens: TokenArray
    start: int
    given_positions: TokenArray | None

    @property
    def positions(self) -> TokenArray:
        """Of each token, [n]."""
        if self.given_positions is not None:
            return self.given_positions
        return np.arange(self.start, self.start + len(self.tokens), dtype=np.int64)

    @property
    def is_prompt(self) -> bool:
        """More than one token at position 0 starts a conversation; all else continues one (NPUW's rule)."""
        return self.start == 0 and len(self.tokens) > 1

    @property
    def stage(self) -> Stage:
        """What the call is."""
        return Stage.PREFILL if self.is_prompt else Stage.GENERATE


def tensor_name(key: object, known: tuple[str, ...]) -> str:
    """Which of the known names a name or a port of a model is; InputError where it is none of them."""
    if isinstance(key, str) and key in known:
        return key
    if isinstance(key, Port):
        for name in known:
            if name in key.get_names():
                return name
    raise InputError(f"unknown input {key!r}; inputs are {', '.join(INPUT_NAMES)}")


def named_inputs(inputs: object) -> Mapping[str, TensorLike]:
    """What was passed to `infer`, by name; InputError for what is no mapping of inputs."""
    if type(inputs) is dict and _NAMES.issuperset(inputs):
        return inputs  # as nearly every call gives them
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs is a {type(inputs).__name__}; give a mapping from input name to tensor")
    return {tensor_name(key, INPUT_NAMES): value for key, value in inputs.items()}


def as_tensor(name: str, value: TensorLike) -> ov.Tensor:
    """An input as a tensor, which shares the memory of a C-contiguous, writable array."""
    if isinstance(value, ov.Tensor):
        return value
    array = _as_array(name, value)
    if array.dtype.kind not in "iufb":
        raise InputError(f"{name} is {array.dtype}; an integer type such as int64 is needed")
    # OpenVINO knows the machine's byte order alone.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return ov.Tensor(array, shared_memory=array.flags.c_contiguous and array.flags.writeable)


def read_step(inputs: Mapping[str, TensorLike], *, num_stored_tokens: int) -> StepInputs:
    """The call that `inputs` describe: input_ids [1, n], position_ids [1, n], attention_mask [1, T].

    attention_mask and position_ids may be absent; both then mean "continue at num_stored_tokens".

    Raises InputError for types, shapes and a mask that contradicts the positions; whether the call can be
    made, `check_step` says.
    """
    if "input_ids" not in inputs:
        raise InputError("input_ids is missing; set it, or pass it to infer")
    tokens = _read_row("input_ids", inputs["input_ids"])
    length = len(tokens)
    if length == 0:
        raise InputError("input_ids is empty; a call needs at least 1 token")
    start, positions = num_stored_tokens, None
    if "position_ids" in inputs:
        positions = _read_row("position_ids", inputs["position_ids"])
        if len(positions) != length:
            raise InputError(f"position_ids has {len(positions)} entries for {length} tokens; give one each")
        start = int(positions[0])
    # Past the Python function that a named tuple is made by: the caches are cold after a run.
    step = tuple.__new__(StepInputs, (tokens, start, positions))
    if "attention_mask" in inputs:
        _check_attention_mask(_read_row("attention_mask", inputs["attention_mask"]), step)
    return step


def check_step(step: StepInputs, *, num_stored_tokens: int, num_embeddings: int) -> None:
    """InputError, naming what was got and what is allowed, for a call that cannot be made."""
    tokens = step.tokens.tolist()
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= num_embeddings:
        bad = lowest if lowest < 0 else highest
        raise InputError(f"input_ids contains {bad}; token ids are 0..{num_embeddings - 1}")
    if step.given_positions is not None:
        _check_positions(step.given_positions, num_stored_tokens)


def _read_row(name: str, value: TensorLike) -> TokenArray:
    """A tensor [1, n] of integers as an int64 array [n]."""
    array = value if type(value) is np.ndarray else _as_array(name, value)
    dtype = array.dtype
    if dtype is not _INT64 and dtype.kind not in "iu" and array.size:
        raise InputError(f"{name} is {array.dtype}; an integer type such as int64 is needed")
    if array.ndim != 2 or len(array) != 1:
        batch = f" (batch {array.shape[0]})" if array.ndim == 2 else ""
        raise InputError(f"{name} has shape {list(array.shape)}{batch}; [1, tokens] is needed, batch is 1")
    row = array[0]
    return row if dtype is _INT64 else _as_int64(name, row)


def _as_int64(name: str, row: npt.NDArray[np.generic]) -> TokenArray:
    if row.dtype == np.uint64 and row.size and int(row.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{name} contains {row.max()}, which no int64 holds")
    return row.astype(np.int64)


def _as_array(name: str, value: TensorLike) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(value.data if isinstance(value, ov.Tensor) else value)
    except ValueError as error:
        raise InputError(f"{name} is no array: {error}; [1, tokens] integers are needed") from error


def _check_positions(positions: TokenArray, num_stored_tokens: int) -> None:
    start, length = int(positions[0]), len(positions)
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


def _check_attention_mask(mask: TokenArray, step: StepInputs) -> None:
    length = len(step.tokens)
    total = step.start + length
    if len(mask) != total or not (mask == 1).all():
        raise InputError(
            f"attention_mask has {len(mask)} entries with sum {int(mask.sum())}; {step.start} tokens before "
            f"the block and {length} in it need {total} ones, or leave the mask out"
        )
