"""A stateful OpenVINO model as a target: an `openvino.InferRequest` given the manners of `LLMInferRequest`.

OpenVINO keeps the KV cache of such a model in variable states and never shortens them: a rejected draft would
stay as history. Here a rewind cuts the states themselves, so it is exact.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from openvino import InferRequest, Tensor

from npusim.errors import CapacityError, InputError, ModelError, TrimError
from npusim.speculative.target import TokenArray, checked_tokens
from npusim.whole_number import shown, whole_number

_FED = frozenset({"input_ids", "attention_mask", "position_ids", "beam_idx"})


class OpenVINOTarget:
    """Speaks the request interface over a stateful model on a plugin whose states can be read and set (CPU).

    The model: inputs input_ids [1, n] and attention_mask [1, T], and position_ids [1, n] and beam_idx [1] if
    it has them; output logits [1, n, vocab_size] (or fewer rows, the newest); one state per K and V, each
    with a row per stored token on `sequence_axis`. Compile it with `KV_CACHE_PRECISION` f32: an 8-bit cache,
    the default of the CPU plugin, makes logits depend on how the tokens were cut into blocks, and then a
    speculative run may differ from a plain one.

    capacity, max_generation_tokens, max_prompt_len: a model of dynamic shape has no such limits; they are
    refusals on its behalf. The latter two are the capacity if left out. vocab_size: needed only where the
    last dimension of logits is dynamic.

    A call that OpenVINO itself fails leaves the rows below its first position, exact and usable.
    """

    def __init__(
        self,
        request: InferRequest,
        *,
        capacity: int,
        max_generation_tokens: int | None = None,
        max_prompt_len: int | None = None,
        vocab_size: int | None = None,
        sequence_axis: int = 2,
    ) -> None:
        self._request = request
        self._inputs = _input_names(request)
        self.capacity = _limit("capacity", capacity)
        self.max_generation_tokens = _limit(
            "max_generation_tokens", capacity if max_generation_tokens is None else max_generation_tokens
        )
        self.max_prompt_len = _limit("max_prompt_len", capacity if max_prompt_len is None else max_prompt_len)
        self.vocab_size = _limit("vocab_size", _vocab_size(request) if vocab_size is None else vocab_size)
        if not request.query_state():
            raise ModelError(
                "the model has no variable states, so no KV cache to rewind; make it stateful, or compile "
                "the original with npusim.compile_model"
            )
        self._sequence_axis = _sequence_axis(request, sequence_axis)
        self._stored = 0
        self._rows_in_doubt = False
        self.reset_state()
        self._check_empty()

    @property
    def num_stored_tokens(self) -> int:
        return self._stored

    def infer(
        self, inputs: Mapping[str, TokenArray], *, share_outputs: bool = False
    ) -> Mapping[str, npt.NDArray[np.floating]]:
        """Run input_ids [1, n] at position_ids [1, n] (left out: continue); other inputs are made here.

        Refusals (InputError, CapacityError) come before the state is touched.
        """
        input_ids, start = self._checked(inputs)
        count = input_ids.shape[1]
        if start == 0 and count > 1:
            self.reset_state()
        else:
            self._cut(start)
        feeds: dict[str, npt.NDArray[np.integer]] = {
            "input_ids": input_ids,
            "attention_mask": np.ones((1, start + count), dtype=np.int64),
            "position_ids": np.arange(start, start + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self._rows_in_doubt = True
        outputs = self._request.infer(
            {name: feeds[name] for name in self._inputs}, share_outputs=share_outputs
        )
        self._rows_in_doubt = False
        self._stored = start + count
        return {"logits": outputs["logits"]}

    def can_trim(self, num_tokens: int) -> bool:
        number = whole_number(num_tokens)
        return number is not None and 0 <= number <= self._stored

    def trim(self, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens; the number dropped. TrimError for more than are stored."""
        kept = whole_number(num_tokens)
        if kept is None or not self.can_trim(kept):
            raise TrimError(
                f"trim to {shown(num_tokens)} tokens: {self._stored} are stored; keep an integer "
                f"0..{self._stored}"
            )
        dropped = self._stored - kept
        self._cut(kept)
        return dropped

    def reset_state(self) -> None:
        self._request.reset_state()
        self._stored = 0
        self._rows_in_doubt = False

    def _check_empty(self) -> None:
        """InputError where states without a token have rows on the axis said to count tokens."""
        for state in self._request.query_state():
            shape = list(state.state.shape)
            if shape[self._sequence_axis]:
                raise InputError(
                    f"sequence_axis is {self._sequence_axis}, on which state {state.name} {shape} has rows "
                    "before any token is stored; give the axis that grows with the tokens"
                )

    def _cut(self, num_tokens: int) -> None:
        """Shorten every state to `num_tokens` rows."""
        if num_tokens == self._stored and not self._rows_in_doubt:
            return
        if num_tokens == 0:
            self.reset_state()
            return
        axis = self._sequence_axis
        for state in self._request.query_state():
            rows = state.state
            shape = list(rows.shape)
            if shape[axis] < num_tokens:
                raise ModelError(
                    f"state {state.name} of shape {shape} holds {shape[axis]} rows on axis {axis} where "
                    f"{num_tokens} tokens are stored; a rewind needs one row per token, see sequence_axis"
                )
            if shape[axis] > num_tokens:
                shape[axis] = num_tokens
                kept = Tensor(rows.element_type, shape)
                Tensor(rows, [0] * len(shape), shape).copy_to(kept)
                state.state = kept
        self._stored = num_tokens
        self._rows_in_doubt = False

    def _checked(self, inputs: Mapping[str, TokenArray]) -> tuple[TokenArray, int]:
        """input_ids [1, n] and the position of its first token; all that can be refused is refused here."""
        if not isinstance(inputs, Mapping):
            raise InputError(f"inputs is a {type(inputs).__name__}; give a mapping from input name to array")
        unknown = set(inputs) - {"input_ids", "position_ids"}
        if unknown or "input_ids" not in inputs:
            raise InputError(f"inputs are input_ids and, if wanted, position_ids; got {list(inputs)}")
        input_ids = _as_array("input_ids", inputs["input_ids"])
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise InputError(f"input_ids has shape {list(input_ids.shape)}; it must be [1, n] with n >= 1")
        checked_tokens(input_ids[0], self.vocab_size, "input_ids")
        count = input_ids.shape[1]
        start = self._first_position(inputs, count)
        self._check_room(start, count)
        return input_ids.astype(np.int64, copy=False), start

    def _first_position(self, inputs: Mapping[str, TokenArray], count: int) -> int:
        if "position_ids" not in inputs:
            return self._stored
        position_ids = _as_array("position_ids", inputs["position_ids"])
        given = position_ids.tolist()
        start = int(position_ids.flat[0]) if position_ids.dtype.kind in "iu" and position_ids.size else -1
        if start < 0 or given != [list(range(start, start + count))]:
            raise InputError(
                f"position_ids must be [1, {count}], integers consecutive from 0 or more; got {given}"
            )
        return start

    def _check_room(self, start: int, count: int) -> None:
        prefill = start == 0 and count > 1
        stage, most = (
            ("prefill", self.max_prompt_len) if prefill else ("generate step", self.max_generation_tokens)
        )
        if count > most:
            raise CapacityError(f"a {stage} takes at most {most} tokens, got {count}; feed fewer at a time")
        if start > self._stored:
            raise InputError(
                f"a gap: position {start} was given and {self._stored} tokens are stored; continue at "
                f"{self._stored} or below"
            )
        if start + count > self.capacity:
            raise CapacityError(
                f"{count} tokens at position {start} need room for {start + count}, capacity is "
                f"{self.capacity}; trim first or use a larger capacity"
            )


def _input_names(request: InferRequest) -> list[str]:
    names = [port.get_any_name() for port in request.model_inputs]
    unknown = sorted(set(names) - _FED)
    if unknown or not {"input_ids", "attention_mask"} <= set(names):
        raise ModelError(
            f"the model takes {names}; a stateful language model takes input_ids and attention_mask, may "
            "take position_ids and beam_idx, and takes nothing else"
        )
    return names


def _as_array(name: str, value: TokenArray) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different length
        raise InputError(f"{name} is no array: {error}; it must be [1, n]") from error


def _sequence_axis(request: InferRequest, value: object) -> int:
    axis = whole_number(value)
    least_rank = min(len(state.state.shape) for state in request.query_state())
    if axis is None or not -least_rank <= axis < least_rank:
        raise InputError(
            f"sequence_axis is {shown(value)}; the states have {least_rank} axes, 0 to {least_rank - 1}"
        )
    return axis


def _vocab_size(request: InferRequest) -> int:
    for port in request.model_outputs:
        if "logits" in port.get_names():
            size = port.get_partial_shape()[-1]
            if size.is_static:
                return int(size.get_length())
            raise ModelError("the last dimension of logits is dynamic; say vocab_size")
    raise ModelError("the model has no output named logits")


def _limit(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None or number < 1:
        raise InputError(f"{name} is {shown(value)}; it must be an integer of at least 1")
    return number
