"""The real NPUW as a target: what runs language models on an NPU, here on the CPU device.

The openvino wheel brings the NPU plugin, and its LLM runtime needs no NPU when it is told to use the CPU. A
request of this module has the interface of `npusim.LLMInferRequest`, so whatever drives the simulator drives
it. NPUW takes some calls that it then answers wrong without a word; they are refused here, each with its
reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from npusim.config_values import ConfigValue, checked_mapping
from npusim.errors import CapacityError, ModelError, NpuSimError, TrimError
from npusim.infer_request import InferRequest
from npusim.kv_manager import CacheGroup
from npusim.model_file import read_model
from npusim.model_spec import read_spec
from npusim.npuw_config import NPUWConfig, read_config
from npusim.npuw_keys import check_keys
from npusim.npuw_profile import NPUWLengths
from npusim.stage import Stage
from npusim.static_graph import LogitsArray
from npusim.step_inputs import StepInputs, check_step
from npusim.whole_number import shown, whole_number
from transforms import DecompositionError, find_gqa
from transforms.stateful import StatefulGQA

_STATEFUL_INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx"}


def unavailable_reason() -> str | None:
    """Why NPUW cannot be used here; None where it can."""
    try:
        ov.Core().get_property("NPU", "SUPPORTED_PROPERTIES")
    except RuntimeError as error:
        return f"OpenVINO {ov.get_version()} has no NPU plugin: {_last_line(error)}"
    return None


def compile_model(
    model: str | Path | ov.Model, config: Mapping[str, ConfigValue] | None = None
) -> NPUWCompiledLLM:
    """Lower a model to the stateful form and compile it with NPUW, on the CPU unless NPUW_DEVICES says else.

    config: the NPUW_LLM_* keys that `npusim.compile_model` takes too, and any property of NPUW or its
    devices. A model that is stateful already (an export of npusim, say) is taken as it is.

    Raises ConfigError (also for keys that neither NPUW nor a device knows), ModelError (also where NPUW
    itself fails, with what it said).
    """
    reason = unavailable_reason()
    if reason is not None:
        raise ModelError(f"{reason}; install the openvino wheel")
    checked = checked_mapping(config)
    check_keys(checked)
    return NPUWCompiledLLM(read_model(model), checked)


class NPUWCompiledLLM:
    """A model compiled by NPUW. notes: what had to be chosen differently from what NPUW does by default."""

    def __init__(self, model: ov.Model, config: Mapping[str, ConfigValue]) -> None:
        self.sizes = _lower(model)
        self.config: NPUWConfig = read_config(config, self.sizes.max_positions)
        self.model = model
        self.notes: tuple[str, ...] = ()
        self._compiled: ov.CompiledModel | None = self._compile()

    @property
    def lengths(self) -> NPUWLengths:
        """Prompt, capacity and block as NPUW rounds them."""
        return self.config.lengths

    def create_infer_request(self) -> NPUWInferRequest:
        """A request of its own.

        Requests of one compiled model share NPUW's count of stored tokens, so the second and every later one
        get a compilation of their own.
        """
        compiled = self._compiled or self._compile()
        self._compiled = None
        return NPUWInferRequest(self, compiled)

    def _compile(self) -> ov.CompiledModel:
        core = ov.Core()
        try:
            return core.compile_model(self.model, "NPU", dict(self.config.properties))
        except RuntimeError as error:
            failure = ModelError(f"NPUW does not compile the model: {_last_line(error)}")
            if not self.config.may_choose_pipeline:
                raise failure from error
        try:
            compiled = core.compile_model(self.model, "NPU", self.config.unpartitioned())
        except RuntimeError as error:
            raise failure from error
        self.notes = (
            f"{failure}. It does without partitioning it, which below five layers is a matter of luck: "
            "compiled with NPUW_ONLINE_PIPELINE=NONE and static attention",
        )
        return compiled


class NPUWInferRequest(InferRequest):
    """One conversation on NPUW, with the interface of `npusim.LLMInferRequest`.

    Refused, because NPUW would answer wrong without an error: a step that begins below the start of the last
    block (mask bits of dropped tokens stay set), a first step below the end of the prompt (its rows are
    copied shifted), a gap, an empty block (the process dies), and a block that would cross the capacity (an
    obscure failure in its midst).

    Of a prompt NPUW yields only the newest rows (`NPUWLengths.prefill_rows`). An exception of NPUW ends the
    conversation: it cannot say what it has stored. Nor does it tell its buffers, so there is no kv_nbytes,
    and its records have no windows. graph_seconds is all the time in NPUW, moving the cache included.
    """

    def __init__(self, compiled: NPUWCompiledLLM, openvino_compiled: ov.CompiledModel) -> None:
        super().__init__()
        self._sizes = compiled.sizes
        self._lengths = compiled.lengths
        self._compiled = openvino_compiled
        self._stored = 0
        self._earliest = 0  # where the next step may begin at the least
        self._renew()

    @property
    def num_stored_tokens(self) -> int:
        """P: tokens of the conversation that the next step attends to."""
        return self._stored

    @property
    def capacity(self) -> int:
        """C: the most tokens that can be stored; the model's rotary tables may allow fewer than NPUW."""
        positions = self._sizes.max_positions
        return self._lengths.capacity if positions is None else min(self._lengths.capacity, positions)

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt."""
        return min(self._lengths.max_prompt_len, self.capacity)

    @property
    def max_generation_tokens(self) -> int:
        """The most tokens of one generate step."""
        return self._lengths.max_generation_tokens

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._sizes.vocab_size

    def can_trim(self, num_tokens: int) -> bool:
        """Whether NPUW can go back to `num_tokens` tokens and be right; never raises."""
        length = self._length_of(num_tokens)
        return length is not None and (length == 0 or length >= self._earliest)

    def takes_back_blocks(self, *, block_size: int, num_tokens: int) -> bool:
        """True: NPUW goes back to any position from the start of its last generate step on."""
        del block_size, num_tokens  # so at every size and length
        return True

    def trim(self, num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens; return how many were removed.

        Raises TrimError, with nothing changed, where NPUW would answer wrong from there.
        """
        length = self._checked_length(num_tokens)
        removed = self._stored - length
        if length == 0:
            self.reset_state()
        self._stored = length
        return removed

    def reset_state(self) -> None:
        """Forget the conversation. (NPUW's own reset_state leaves the mask of the generate stage set.)"""
        self._renew()
        self._stored = self._earliest = 0

    @property
    def _cache_groups(self) -> tuple[CacheGroup, ...]:
        return ()

    def _renew(self) -> None:
        self._request = self._compiled.create_infer_request()

    def _run(self, step: StepInputs, stored: int) -> LogitsArray:
        check_step(step, num_stored_tokens=stored, num_embeddings=self._sizes.num_embeddings)
        self._check(step)
        if step.stage is Stage.GENERATE and step.start == 0:
            self._renew()  # what an earlier conversation left in the mask would be seen
        rows = self._run_npuw(step)
        length = len(step.tokens)
        self._stored = step.start + length
        # A prompt's rows must be taken over whole; a step leaves mask bits up to its start.
        self._earliest = self._stored if step.stage is Stage.PREFILL else step.start
        yielded = self._lengths.prefill_rows(length) if step.stage is Stage.PREFILL else length
        return rows[:, rows.shape[1] - yielded :].astype(np.float32, copy=False)

    def _run_npuw(self, step: StepInputs) -> LogitsArray:
        stop = step.start + len(step.tokens)
        feeds = {
            "input_ids": step.tokens[None],
            "attention_mask": np.ones((1, stop), np.int64),
            "position_ids": np.arange(step.start, stop, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        began = time.perf_counter()
        try:
            logits: LogitsArray = self._request.infer(feeds, share_outputs=True)["logits"]
        except RuntimeError as error:
            self.reset_state()
            raise NpuSimError(
                f"NPUW failed at position {step.start}: {_last_line(error)}; the conversation is lost, "
                "begin anew"
            ) from error
        self._graph_seconds = time.perf_counter() - began
        return logits

    def _check(self, step: StepInputs) -> None:
        length = len(step.tokens)
        if step.stage is Stage.PREFILL:
            if length > self.max_prompt_len:
                raise CapacityError(
                    f"a prompt of {length} tokens; NPUW was compiled for {self.max_prompt_len}, raise "
                    "NPUW_LLM_MAX_PROMPT_LEN or shorten the prompt"
                )
            return
        if length > self.max_generation_tokens:
            raise CapacityError(
                f"a block of {length} tokens; NPUW's generate graph has {self.max_generation_tokens} rows, "
                "raise NPUW_LLM_MAX_GENERATION_TOKEN_LEN or split the block; a new conversation begins at "
                "position 0: give position_ids, or call reset_state first"
            )
        if step.start + length > self.capacity:
            raise CapacityError(
                f"cache full: {length} tokens at position {step.start} need {step.start + length} slots, the "
                f"capacity is {self.capacity}; raise NPUW_LLM_MIN_RESPONSE_LEN, or trim or reset"
            )
        self._checked_length(step.start)

    def _length_of(self, num_tokens: object) -> int | None:
        length = whole_number(num_tokens)
        return length if length is not None and 0 <= length <= self._stored else None

    def _checked_length(self, num_tokens: int) -> int:
        """num_tokens as an int; TrimError unless `can_trim`."""
        length = self._length_of(num_tokens)
        if length is None:
            raise TrimError(
                f"trim to {shown(num_tokens)} tokens, {self._stored} are stored; keep an integer "
                f"0..{self._stored}"
            )
        if not self.can_trim(length):
            raise TrimError(
                f"a rewind to position {length}: NPUW goes back no further than {self._earliest} (the start "
                "of its last block, or the end of the prompt) and would answer wrong without an error; "
                "prefill anew"
            )
        return length


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes of a stateful model; max_positions None where the rotary tables are not known."""

    vocab_size: int
    num_embeddings: int
    max_positions: int | None


def _lower(model: ov.Model) -> _Sizes:
    """Bring a model of the caller's own to the stateful form, in place."""
    is_stateful = all(port.get_names() & _STATEFUL_INPUTS for port in model.inputs) and len(model.inputs) == 4
    if is_stateful and not find_gqa(model):
        width = model.output("logits").get_partial_shape()[2].get_length()
        return _Sizes(vocab_size=width, num_embeddings=width, max_positions=None)
    spec = read_spec(model)
    try:
        StatefulGQA().run_on_model(model)
    except DecompositionError as error:
        raise ModelError(str(error)) from error
    return _Sizes(
        vocab_size=spec.vocab_size, num_embeddings=spec.num_embeddings, max_positions=spec.max_positions
    )


def _last_line(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
