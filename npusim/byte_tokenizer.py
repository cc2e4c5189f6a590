"""The byte vocabulary as tokenizer models that openvino_genai loads, of OpenVINO's own ops alone."""

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Node, Output

from npusim.byte_vocabulary import BEGIN_TOKEN, END_TOKEN, NUM_BYTES


def build_tokenizer() -> ov.Model:
    """Strings [B] to input_ids and attention_mask [B, longest], int64: the begin token, then the bytes.

    Shorter rows are padded on the right with the end token.
    """
    text = _parameter("string_input", [-1], ov.Type.string)
    begins, ends, chars = (_i64(output) for output in ops.string_tensor_unpack(text).outputs())
    lengths = ops.subtract(ends, begins)  # [B]
    longest = ops.reduce_max(lengths, _constant([0]), True)  # [1]
    column = ops.range(_constant(0), ops.squeeze(longest, _constant([0])), _constant(1), "i64")
    is_byte = ops.less(column, ops.unsqueeze(lengths, _constant([1])))  # [B, longest]
    # One byte behind the last, so that there is one to look up in an empty batch of text.
    padded = ops.concat([chars, _constant([END_TOKEN])], 0)
    source = ops.add(ops.unsqueeze(begins, _constant([1])), column)
    in_range = ops.select(is_byte, source, ops.shape_of(chars, "i64"))
    tokens = ops.gather(padded, in_range, _constant(0))
    one_column = ops.concat([ops.shape_of(begins, "i64"), _constant([1])], 0)
    begin = ops.broadcast(_constant(BEGIN_TOKEN), one_column)
    shown = ops.broadcast(_constant(1), one_column)
    input_ids = ops.concat([begin, tokens], 1)
    attention_mask = ops.concat([shown, ops.convert(is_byte, "i64")], 1)
    return _model([_named(input_ids, "input_ids"), _named(attention_mask, "attention_mask")], text)


def build_detokenizer() -> ov.Model:
    """Token ids [B, n] int64 to strings [B]: the bytes; ids that are no bytes are left out."""
    tokens = _parameter("token_ids", [-1, -1], ov.Type.i64)
    is_byte = ops.less(tokens, _constant(NUM_BYTES))
    lengths = ops.reduce_sum(ops.convert(is_byte, "i64"), _constant([1]), False)  # [B]
    ends = ops.cum_sum(lengths, _constant(0))
    begins = ops.subtract(ends, lengths)
    kept = ops.squeeze(ops.non_zero(ops.reshape(is_byte, _constant([-1]), False), "i64"), _constant([0]))
    chars = ops.gather(ops.reshape(tokens, _constant([-1]), False), kept, _constant(0))
    packed = ops.string_tensor_pack(
        ops.convert(begins, "i32"), ops.convert(ends, "i32"), ops.convert(chars, "u8")
    )
    return _model([_named(packed, "string_output")], tokens)


def _constant(values: int | list[int]) -> Node:
    return ops.constant(np.asarray(values, dtype=np.int64))


def _i64(source: Output) -> Output:
    return ops.convert(source, "i64").output(0)


def _named(node: Node, name: str) -> Output:
    output = node.output(0)
    output.get_tensor().set_names({name})
    return output


def _parameter(name: str, shape: list[int], element_type: ov.Type) -> Node:
    parameter = ops.parameter(shape, element_type)
    parameter.set_friendly_name(name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _model(outputs: list[Output], parameter: Node) -> ov.Model:
    model = ov.Model([ops.result(output) for output in outputs], [parameter])
    for name, value in (
        ("bos_token_id", BEGIN_TOKEN),
        ("eos_token_id", END_TOKEN),
        ("pad_token_id", END_TOKEN),
    ):
        model.set_rt_info(value, name)
    return model
