"""Where the ONNX files are that the tests run."""

from pathlib import Path

_TESTS = Path(__file__).parent / "models"
_BUILT_IN = Path(__file__).parent.parent / "npusim" / "models"

# Read by OpenVINO's frontend and run by ONNX Runtime.
READABLE = {
    "llama": _TESTS / "llama.onnx",
    "phi3_window8": _TESTS / "phi3_window8.onnx",
    "qwen3": _TESTS / "qwen3.onnx",
    "gemma3_alternating": _TESTS / "gemma3_alternating.onnx",
    "gptoss_attention": _TESTS / "gptoss_attention.onnx",
    "swa_target": _BUILT_IN / "swa_target.onnx",
    "swa_draft": _BUILT_IN / "swa_draft.onnx",
}

# Refused by OpenVINO's frontend.
UNREADABLE = {
    "gemma2_softcap": _TESTS / "gemma2_softcap.onnx",
    "gptoss_moe": _TESTS / "gptoss_moe.onnx",
}
