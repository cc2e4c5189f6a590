"""The static-graph, host-managed-KV pipeline of an NPU language model, exact and inspectable on a CPU."""

from npusim import npuw, reference
from npusim.compiled_llm import CompiledLLM, compile_model
from npusim.errors import (
    CapacityError,
    ConfigError,
    InputError,
    KVLeakError,
    ModelError,
    NpuSimError,
    TrimError,
)
from npusim.request import LLMInferRequest
from npusim.speculative import (
    Drafter,
    DraftModel,
    FinishReason,
    Generation,
    Greedy,
    OpenVINOTarget,
    PromptLookup,
    Sampler,
    Scripted,
    Step,
    Target,
    generate,
)

__all__ = [
    "CapacityError",
    "CompiledLLM",
    "ConfigError",
    "DraftModel",
    "Drafter",
    "FinishReason",
    "Generation",
    "Greedy",
    "InputError",
    "KVLeakError",
    "LLMInferRequest",
    "ModelError",
    "NpuSimError",
    "OpenVINOTarget",
    "PromptLookup",
    "Sampler",
    "Scripted",
    "Step",
    "Target",
    "TrimError",
    "compile_model",
    "generate",
    "npuw",
    "reference",
]
