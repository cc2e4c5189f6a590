"""Rewrite the attention of the device form into the form that a CPU executes fast. Same numbers."""

from collections.abc import Callable

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Output
from openvino.passes import ModelPass

from transforms.device_attention import DeviceAttention, find_attention
from transforms.form_choice import AttentionForm, AttentionSizes, choose_form
from transforms.opset import OutputKey, concat, i64, key_of, reshape
from transforms.rotary import read_rotation, rotate

FormChoice = Callable[[AttentionSizes], AttentionForm]


class ExecutionForm(ModelPass):
    """Rewrite every SDPA that DecomposeGQA made; `rewritten` counts the last run.

    Keys and values are not repeated for the query heads: the G query heads of one KV head become rows,
    [1, KV, G S, D], since query head h = kv G + g reads KV head kv, and so do scores and masks. The scale is
    put on Q. A sink becomes one more column of scores that the softmax sees and the values do not. What else
    is done is chosen per layer from its sizes (`choose_form` unless another rule is given). An SDPA of
    another shape is left as it is. What layers share (masks prepared for rows or for a sink column) is built
    once.

    Raises TypeError, with the model unchanged, where the rule chooses no AttentionForm.
    """

    def __init__(self, choose: FormChoice = choose_form) -> None:
        super().__init__()
        self._choose = choose
        self.rewritten = 0

    def run_on_model(self, model: ov.Model) -> bool:
        """Rewrite what matches; True when the model changed. A second run finds nothing."""
        self.rewritten = 0
        masks = _Masks()
        for attention, form in [(found, self._form_of(found)) for found in find_attention(model)]:
            _replace(attention, _matmuls(attention, masks, join=form is AttentionForm.JOINED))
            self.rewritten += 1
        if self.rewritten:
            model.validate_nodes_and_infer_types()
        return self.rewritten > 0

    def _form_of(self, attention: DeviceAttention) -> AttentionForm:
        form = self._choose(attention.sizes)
        if not isinstance(form, AttentionForm):
            name = attention.node.get_friendly_name()
            raise TypeError(f"{name}: the rule chose {form!r}; an AttentionForm is needed")
        return form


class _Masks:
    """Masks in the shapes the forms need, each built once per mask of the device form."""

    def __init__(self) -> None:
        self._as_rows: dict[tuple[OutputKey, int], Output] = {}
        self._with_sink: dict[OutputKey, Output] = {}

    def as_rows(self, attention: DeviceAttention) -> Output:
        """[1, 1 or H, S, K] -> [1, 1 or KV, G S, K]: repeated for the G heads of a KV head, or regrouped."""
        mask, sizes = attention.mask, attention.sizes
        _, heads, length, num_keys = mask.get_shape()
        if heads == sizes.num_heads:
            return _shaped(mask, [1, sizes.kv_num_heads, sizes.rows, num_keys])
        if length == 1:
            return mask  # one row, which broadcasts to all
        key = (key_of(mask), sizes.rows)
        if key not in self._as_rows:
            group = sizes.rows // length
            repeated = ops.broadcast(mask, i64([1, group, length, num_keys])).output(0)
            self._as_rows[key] = reshape(repeated, [1, 1, sizes.rows, num_keys])
        return self._as_rows[key]

    def with_sink_column(self, attention: DeviceAttention) -> Output:
        """The same with one more column: nothing is ever added to the sink."""
        mask = self.as_rows(attention)
        key = key_of(mask)
        if key not in self._with_sink:
            shape = [*mask.get_shape()[:3], 1]
            zeros = ops.constant(np.zeros(shape), dtype=mask.get_element_type()).output(0)
            self._with_sink[key] = concat([mask, zeros], 3)
        return self._with_sink[key]


def _matmuls(attention: DeviceAttention, masks: _Masks, *, join: bool) -> Output:
    """Scores per key range, one softmax over all of them, values per key range: [1, KV, G S, Dv].

    With the keys joined, the CPU plugin runs the four ops from the first MatMul to the second as one kernel.
    The scale is not among them: on Q it is S H D products, on the scores S H K of them, and a score may leave
    float32 where a scaled one does not.
    """
    keys, values = attention.keys, attention.values
    if join:
        keys, values = (concat(list(keys), 2),), (concat(list(values), 2),)
    query = _as_rows(attention, _scaled_query(attention))
    scores = [ops.matmul(query, rows, False, True).output(0) for rows in keys]
    weights = _weights(attention, masks, scores)
    parts = [ops.matmul(weight, rows, False, False) for weight, rows in zip(weights, values, strict=True)]
    result = parts[0]
    for part in parts[1:]:
        result = ops.add(result, part)
    return result.output(0)


def _scaled_query(attention: DeviceAttention) -> Output:
    """Q times the scale, [1, H, S, D].

    Where Q is rotated, which is linear, it is scaled before: behind the rotation the CPU plugin would copy it
    once more, for 5 us a layer.
    """
    rotation = read_rotation(attention.query)
    if rotation is None:
        return ops.multiply(attention.query, attention.scale).output(0)
    scaled = ops.multiply(rotation.source, attention.scale).output(0)
    return rotate(scaled, rotation.cos, rotation.sin, interleaved=False)


def _weights(attention: DeviceAttention, masks: _Masks, scores: list[Output]) -> list[Output]:
    """Softmax over the joined scores, cut back into the ranges: each [1, KV, G S, length]."""
    lengths = [source.get_shape()[3] for source in scores]
    joined = concat(scores, 3)
    if attention.sink is None:
        weights = ops.softmax(ops.add(joined, masks.as_rows(attention)), 3).output(0)
        cuts = lengths
    else:
        with_sink = concat([joined, _sink_rows(attention, attention.sink)], 3)
        weights = ops.softmax(ops.add(with_sink, masks.with_sink_column(attention)), 3).output(0)
        cuts = [*lengths, 1]
    if len(cuts) == 1:
        return [weights]
    return list(ops.variadic_split(weights, i64(3), i64(cuts)).outputs())[: len(lengths)]


def _as_rows(attention: DeviceAttention, source: Output) -> Output:
    """[1, H, S, X] -> [1, KV, G S, X]: the query heads of one KV head become rows."""
    sizes = attention.sizes
    return _shaped(source, [1, sizes.kv_num_heads, sizes.rows, source.get_shape()[3]])


def _sink_rows(attention: DeviceAttention, sink: Output) -> Output:
    """[1, H, 1, 1] -> [1, KV, G S, 1]: the sink of each row's query head."""
    sizes = attention.sizes
    repeated = sink
    if sizes.sequence_length > 1:
        shape = i64([1, sizes.num_heads, sizes.sequence_length, 1])
        repeated = ops.broadcast(sink, shape).output(0)
    return _as_rows(attention, repeated)


def _shaped(source: Output, shape: list[int]) -> Output:
    """Reshape; a source that has the shape already is returned as it is."""
    return source if list(source.get_shape()) == shape else reshape(source, shape)


def _replace(attention: DeviceAttention, result: Output) -> None:
    """Put the rows, back as [1, H, S, Dv], in the place of the SDPA, under its name."""
    old = attention.node.output(0)
    new = ops.reshape(result, i64(list(old.get_shape())), False)
    new.set_friendly_name(attention.node.get_friendly_name())
    names = old.get_names()
    old.get_tensor().set_names(set())
    old.replace(new.output(0))
    new.output(0).get_tensor().add_names(names)
