"""Lossless speculative decoding: the loop, drafters, acceptance, and an adapter for OpenVINO requests."""

from npusim.speculative.drafters import Drafter, DraftModel, PromptLookup, Scripted
from npusim.speculative.generation import FinishReason, Generation, Step, generate
from npusim.speculative.openvino_target import OpenVINOTarget
from npusim.speculative.sampling import Greedy, Sampler, SamplingRule, Verifier
from npusim.speculative.target import Target

__all__ = [
    "DraftModel",
    "Drafter",
    "FinishReason",
    "Generation",
    "Greedy",
    "OpenVINOTarget",
    "PromptLookup",
    "Sampler",
    "SamplingRule",
    "Scripted",
    "Step",
    "Target",
    "Verifier",
    "generate",
]
