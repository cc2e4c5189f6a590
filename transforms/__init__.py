"""OpenVINO transformations that turn a language model with GroupQueryAttention into exact static branches."""

from transforms.cache_type import ConvertCache
from transforms.decompose_gqa import BlockTokens, DecomposeGQA, tokens_in_attention_mask
from transforms.empty_past import RemoveEmptyPast
from transforms.errors import DecompositionError
from transforms.execution_form import ExecutionForm
from transforms.float_logits import FloatLogits
from transforms.gqa_node import GQANode, find_gqa, node_label, read_gqa
from transforms.key_layout import Branch, KeyLayout
from transforms.new_rows import KeepNewRows
from transforms.plain_weights import PlainWeights
from transforms.splits_to_slices import SplitsToSlices
from transforms.stateful import StatefulGQA
from transforms.static_shapes import StaticShapes
from transforms.unfused_gate import UnfusedGate

__all__ = [
    "BlockTokens",
    "Branch",
    "ConvertCache",
    "DecomposeGQA",
    "DecompositionError",
    "ExecutionForm",
    "FloatLogits",
    "GQANode",
    "KeepNewRows",
    "KeyLayout",
    "PlainWeights",
    "RemoveEmptyPast",
    "SplitsToSlices",
    "StatefulGQA",
    "StaticShapes",
    "UnfusedGate",
    "find_gqa",
    "node_label",
    "read_gqa",
    "tokens_in_attention_mask",
]
