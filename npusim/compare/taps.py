"""Look into a model through its logits: rows from within it, appended as further columns.

Every runtime hands back logits, one row per token, whatever it does to the rest of a model: NPUW drops
outputs that it does not know and renames caches. So what is to be seen is concatenated to the logits,
[1, S, vocab + w0 + w1 ...], and cut off again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
import openvino as ov
import openvino.opset13 as ops
from onnx import helper
from openvino import Output

from npusim.errors import ModelError
from npusim.onnx_attention import GQA_TYPE
from transforms import find_gqa

LOGITS = "logits"
UNTAPPED_LOGITS = "logits.untapped"

Rows = npt.NDArray[np.floating]


def attention_outputs(model: ov.Model) -> list[Output]:
    """The attention of every layer in execution order: of GroupQueryAttention, or of what it became."""
    lowered = "ScaledDotProductAttention"
    nodes = find_gqa(model) or [node for node in model.get_ordered_ops() if node.get_type_name() == lowered]
    return [node.output(0) for node in nodes]


def tap(model: ov.Model, outputs: Sequence[Output]) -> tuple[int, ...]:
    """Append the rows of `outputs` to the logits, in place; their widths.

    An output is [1, S, width] or [1, heads, S, D], which becomes [1, S, heads * D]. Raises ModelError for a
    model without logits and for an output of which heads or head size are unknown.
    """
    result = _logits_result(model)
    logits = result.input_value(0)
    rows = [_as_rows(output) for output in outputs]
    kind = logits.get_element_type()
    columns = [row if row.get_element_type() == kind else ops.convert(row, kind).output(0) for row in rows]
    joined = ops.concat([logits, *columns], 2).output(0)
    names = logits.get_names()
    logits.get_tensor().set_names(set())
    result.input(0).replace_source_output(joined)
    joined.get_tensor().set_names(names)
    model.validate_nodes_and_infer_types()
    return tuple(row.get_partial_shape()[2].get_length() for row in rows)


def tap_onnx(model: onnx.ModelProto) -> None:
    """Append the attention of every GroupQueryAttention to the logits, in place."""
    graph = model.graph
    port = next((port for port in graph.output if port.name == LOGITS), None)
    if port is None:
        raise ModelError(f"no output {LOGITS}; the outputs are {[port.name for port in graph.output][:4]}")
    for node in graph.node:
        node.input[:] = [UNTAPPED_LOGITS if name == LOGITS else name for name in node.input]
        node.output[:] = [UNTAPPED_LOGITS if name == LOGITS else name for name in node.output]
    kind = port.type.tensor_type.elem_type
    columns = []
    for node in [node for node in graph.node if node.op_type == GQA_TYPE]:
        columns.append(f"{node.output[0]}.tapped")
        graph.node.append(helper.make_node("Cast", [node.output[0]], [columns[-1]], to=kind))
    graph.node.append(helper.make_node("Concat", [UNTAPPED_LOGITS, *columns], [LOGITS], axis=-1))
    port.CopyFrom(helper.make_tensor_value_info(LOGITS, kind, None))


def cut(rows: Rows, widths: Sequence[int]) -> tuple[Rows, tuple[Rows, ...]]:
    """Logits [n, vocab] and what was tapped [n, width] each, from rows [n, vocab + sum(widths)]."""
    vocab = rows.shape[1] - sum(widths)
    logits, *tapped = np.split(rows, vocab + np.cumsum([0, *widths[:-1]]), axis=1)
    return logits, tuple(tapped)


def _logits_result(model: ov.Model) -> ov.Node:
    for result in model.get_results():
        if LOGITS in result.output(0).get_names() | result.input_value(0).get_names():
            return result
    raise ModelError(f"the model has no output {LOGITS}")


def _as_rows(output: Output) -> Output:
    """[1, S, width]; heads are merged as GroupQueryAttention merges them."""
    shape = output.get_partial_shape()
    if shape.rank.get_length() == 3 and shape[2].is_static:
        return output
    if shape.rank.get_length() != 4 or shape[1].is_dynamic or shape[3].is_dynamic:
        raise ModelError(f"{output.get_node().get_friendly_name()}: shape {shape} leaves its width unknown")
    width = shape[1].get_length() * shape[3].get_length()
    # In five dimensions: the CPU plugin fuses a transpose in four into an attention kernel before it.
    five = ops.unsqueeze(output, np.array([4], np.int64))
    swapped = ops.transpose(five, np.array([0, 2, 1, 3, 4], np.int64))
    return ops.reshape(swapped, np.array([0, 0, width], np.int64), True).output(0)
