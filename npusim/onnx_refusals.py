"""Why an ONNX file is refused: by what it says itself, and by what OpenVINO's frontend says of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from npusim.onnx_attention import AttentionLayer, OnnxAttention

Refusals = tuple[str, ...]
"""Why something is refused, a sentence each; empty where it is not."""


@dataclass(frozen=True, kw_only=True)
class FileRefusals:
    """Of each layer, in file order, and of the file as a whole."""

    layers: tuple[Refusals, ...]
    model: Refusals


def refusals_by_file(layer: AttentionLayer) -> Refusals:
    """What the file's own attributes rule out; OpenVINO's frontend refuses most of it, but names no node."""
    heads, kv_heads, window = layer.num_heads, layer.kv_num_heads, layer.local_window_size
    rules = (
        (layer.softcap != 0, f"softcap={layer.softcap:g}: only softcap=0 is lowered"),
        (layer.has_qk_norm, "QK norm inside the op is not lowered; export it outside of the op"),
        (not layer.has_past, "no past_key and past_value: there is no KV cache to manage"),
        (
            heads < 1 or kv_heads < 1 or heads % kv_heads != 0,
            f"num_heads={heads}, kv_num_heads={kv_heads}: must be a positive multiple",
        ),
        (
            window == 0 or window < -1,
            f"local_window_size={window}: a window counts the query itself, so 1 is the least; -1 is none",
        ),
        (
            window > 0 and not layer.causal,
            f"local_window_size={window} with causal=0: a window needs causal attention",
        ),
        (
            layer.smooth_softmax not in (-1, 0, 1),
            f"smooth_softmax={layer.smooth_softmax}: 1 adds a logit of 0, 0 and -1 none",
        ),
    )
    return tuple(reason for broken, reason in rules if broken)


def refusals_by_message(attention: OnnxAttention, message: str) -> FileRefusals:
    """What the frontend says that refuses the file: by the layer it names, and as a whole."""
    reasons = {failure.output: failure.reason for failure in _failures(message)}
    return FileRefusals(
        layers=tuple((reasons[layer.name],) if layer.name in reasons else () for layer in attention.layers),
        model=_frontend_refusals(message, attention.op_counts),
    )


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One op type that the frontend could not convert; `output` names the (first) node, if it says so."""

    kind: str
    output: str | None
    reason: str


def _failures(message: str) -> list[_Failure]:
    """The entries of OpenVINO's "failed operations" log: "-- KIND with a message:", text, blank line."""
    failures = []
    for match in re.finditer(
        r"^-- (\S+) with a message:\n(.*?)\n\s*\n", message + "\n\n", re.DOTALL | re.MULTILINE
    ):
        kind, text = match.groups()
        node = re.search(r"<Node\([^)]*\): ([^>]*)>", text)
        failures.append(
            _Failure(kind=kind, output=node and node.group(1), reason=text.strip().splitlines()[-1].strip())
        )
    return failures


def _frontend_refusals(message: str, op_counts: Mapping[str, int]) -> Refusals:
    """Why OpenVINO does not read the file, a line each.

    Ops without a rule come first and alone: what fails after them mostly fails because of them.
    """
    missing = re.search(r"^-- No conversion rule found for operations: (.*)$", message, re.MULTILINE)
    if missing:
        return tuple(
            f"OpenVINO's ONNX frontend has no rule for {kind} ({op_counts.get(kind, 0)} nodes)"
            for kind in missing.group(1).strip().split(", ")
        )
    failures = _failures(message)
    if failures:
        return tuple(
            f"OpenVINO's ONNX frontend cannot convert {failure.kind}: {failure.reason}"
            for failure in failures
        )
    return (f"OpenVINO cannot read the file: {message.strip().splitlines()[-1]}",)
