"""The static-graph, host-managed-KV pipeline of an NPU language model, exact and inspectable on a CPU."""

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

__all__ = [
    "CapacityError",
    "CompiledLLM",
    "ConfigError",
    "InputError",
    "KVLeakError",
    "LLMInferRequest",
    "ModelError",
    "NpuSimError",
    "TrimError",
    "compile_model",
]
