"""Give a language model the fixed shapes of one branch."""

from collections.abc import Mapping

import openvino as ov
from openvino import Output, PartialShape
from openvino.passes import ModelPass

from transforms.errors import DecompositionError
from transforms.gqa_node import GQANode, find_gqa, read_gqa


class StaticShapes(ModelPass):
    """Batch 1, S tokens in the block, C past rows per layer, an attention_mask of a fixed length.

    `past_length` is one C for all nodes or a mapping from node name (`node_label`) to C. The mask is
    `attention_length` long, C + S where nothing else is said; it may be shorter where C is a window's, since
    a buffer may have more slots than a sequence ever has tokens. The head size of the caches may be symbolic:
    it follows from the query's. Run it before DecomposeGQA.

    Raises DecompositionError for an input whose role is unknown, for a node of `past_length` that is not
    there, for shapes that the graph cannot have and for a dimension that stays dynamic; the shapes of the
    model are then what they were. TypeError for a length that is no whole number.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        past_length: int | Mapping[str, int],
        attention_length: int | None = None,
    ) -> None:
        super().__init__()
        _check_lengths(sequence_length, past_length, attention_length)
        longest = past_length if isinstance(past_length, int) else max(past_length.values(), default=0)
        self._sequence_length = sequence_length
        self._past_length = past_length
        self._attention_length = attention_length or sequence_length + longest

    def run_on_model(self, model: ov.Model) -> bool:
        """Reshape all inputs; True, as the shapes were set."""
        before = {i: p.get_partial_shape() for i, p in enumerate(model.inputs)}
        past = self._past_shapes(model)
        shapes = {
            i: past.get(source.get_node().get_friendly_name()) or self._shape_of(source)
            for i, source in enumerate(model.inputs)
        }
        try:
            model.reshape(shapes)
        except RuntimeError as error:
            raise DecompositionError(
                f"the model cannot have these shapes ({_reason(error)}); export it with dynamic ones"
            ) from error
        try:
            _check_static(model)
        except DecompositionError:
            model.reshape(before)
            raise
        return True

    def _past_shapes(self, model: ov.Model) -> dict[str, PartialShape]:
        """Shape of every cache input by its parameter's name."""
        shapes = {}
        gqas = [read_gqa(node) for node in find_gqa(model)]
        self._check_names([gqa.name for gqa in gqas])
        for gqa in gqas:
            length = self._length_for(gqa)
            shape = PartialShape([1, gqa.kv_num_heads, length, gqa.cache_channels])
            for past in (gqa.past_key, gqa.past_value):
                shapes[_parameter_behind(past, gqa.name).get_friendly_name()] = shape
        return shapes

    def _length_for(self, gqa: GQANode) -> int:
        if isinstance(self._past_length, int):
            return self._past_length
        if gqa.name not in self._past_length:
            raise DecompositionError(f"past_length has no entry for {gqa.name}; give one for every node")
        return self._past_length[gqa.name]

    def _check_names(self, names: list[str]) -> None:
        if isinstance(self._past_length, int):
            return
        unknown = sorted(set(self._past_length) - set(names))
        if unknown:
            raise DecompositionError(
                f"past_length names {unknown}, which the model does not have; its nodes are {names}"
            )

    def _shape_of(self, source: Output) -> PartialShape:
        """Shape of an input that is no cache.

        Those of the tokens are set even where the model fixes them: its lengths are those of another block.
        """
        shape, name = source.get_partial_shape(), source.get_any_name()
        if name in ("input_ids", "position_ids"):
            return PartialShape([1, self._sequence_length])
        if name == "attention_mask":
            return PartialShape([1, self._attention_length])
        if shape.is_static:
            return shape
        raise DecompositionError(
            f"input {name} has shape {shape}; only input_ids, attention_mask, position_ids and the caches of "
            "GroupQueryAttention may be dynamic"
        )


def _check_lengths(
    sequence_length: int, past_length: int | Mapping[str, int], attention_length: int | None
) -> None:
    pasts = [*past_length.values()] if isinstance(past_length, Mapping) else [past_length]
    mask = [] if attention_length is None else [attention_length]
    if not all(isinstance(length, int) for length in (sequence_length, *pasts, *mask)):
        raise TypeError(
            f"sequence_length={sequence_length!r}, past_length={past_length!r}, "
            f"attention_length={attention_length!r}; whole numbers are needed"
        )
    if sequence_length < 1 or min(pasts, default=0) < 0 or any(length < sequence_length for length in mask):
        raise DecompositionError(
            f"sequence_length={sequence_length}, past_length={past_length}, "
            f"attention_length={attention_length}; the first is at least 1, the second at least 0, the third "
            "at least the first"
        )


def _reason(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _parameter_behind(past: Output, name: str) -> ov.Node:
    source = past.get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    if source.get_type_name() != "Parameter":
        raise DecompositionError(
            f"{name}: its past comes from {source.get_friendly_name()} ({source.get_type_name()}); "
            "a model input is needed"
        )
    return source


def _check_static(model: ov.Model) -> None:
    for node in model.get_ordered_ops():
        for output in node.outputs():
            if output.get_partial_shape().is_dynamic:
                raise DecompositionError(
                    f"{node.get_friendly_name()} ({node.get_type_name()}) keeps the dynamic shape "
                    f"{output.get_partial_shape()}; every dimension must follow from the static inputs"
                )
