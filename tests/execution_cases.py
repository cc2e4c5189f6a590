"""One lowered GroupQueryAttention as a model to run: the cases that the execution form is tested on."""

from collections import Counter
from dataclasses import dataclass, replace

import gqa_models
import numpy as np
import openvino as ov
from gqa_models import GQA, TokenCount
from numpy.typing import NDArray
from openvino import Output

from transforms import Branch, DecomposeGQA, KeepNewRows, KeyLayout

SINKS = (0.7, -1.1, 2.3, 0.2, -0.4, 1.6, 0.9, -2.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One lowered op and the step it is run at: P stored tokens, n real rows."""

    gqa: GQA
    stored: int
    num_tokens: int
    branch: Branch = Branch.GENERATE
    layout: KeyLayout = KeyLayout.LINEAR

    def device_form(self, layers: int = 1) -> ov.Model:
        """The op lowered by DecomposeGQA, presents cut to the new rows."""
        source = gqa_models.build_layers([self.gqa] * layers, num_tokens=TokenCount())
        model = ov.Core().read_model(source)
        always_full = self.branch is Branch.PREFILL and self.gqa.capacity > 0
        DecomposeGQA(
            self.branch,
            key_layout=self.layout,
            block_tokens=None if always_full else _num_tokens,
        ).run_on_model(model)
        KeepNewRows().run_on_model(model)
        return model

    def feeds(self, model: ov.Model) -> dict[str, NDArray[np.generic]]:
        """Random rows for every input, the step's lengths, rotary positions far from 0, 1, 2."""
        rng = np.random.default_rng(self.stored + 17 * self.num_tokens)
        total = self.stored + self.num_tokens
        fixed = {
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "num_tokens": np.array(self.num_tokens, np.int32),
        }
        feeds: dict[str, NDArray[np.generic]] = {}
        for port in model.inputs:
            name, kind = port.get_any_name(), port.element_type.to_dtype()
            drawn = (1.3 * rng.normal(size=port.shape)).astype(kind)
            feeds[name] = fixed.get(name, drawn)
        return feeds


def _num_tokens(model: ov.Model) -> Output:
    return model.input("num_tokens").get_node().output(0)


def run(model: ov.Model, feeds: dict[str, NDArray[np.generic]]) -> list[NDArray[np.floating]]:
    """All outputs of a model on one thread, computed in float32."""
    config = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    request.infer(feeds)
    return [np.array(request.get_output_tensor(i).data) for i in range(len(compiled.outputs))]


def types(model: ov.Model) -> Counter[str]:
    """How often each op type occurs."""
    return Counter(node.get_type_name() for node in model.get_ops())


def make_case(heads: tuple[int, int], rows: int, past: int, **options: object) -> Case:
    """A case with values that differ from the op's defaults; the block lacks one row where it can."""
    gqa = GQA(
        num_heads=heads[0],
        kv_num_heads=heads[1],
        sequence_length=rows,
        capacity=past,
        scale=0.31,
        **options,
    )
    return Case(gqa=gqa, stored=max(past - 2, 0), num_tokens=max(rows - 1, 1))


def sinks(case: Case) -> Case:
    """The case with a different sink for every head."""
    return replace(case, gqa=replace(case.gqa, head_sink=SINKS[: case.gqa.num_heads]))
