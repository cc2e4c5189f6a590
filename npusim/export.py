"""Write a model as openvino_genai takes it: stateful OpenVINO IR, configuration files, a tokenizer."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import openvino as ov

from npusim import byte_vocabulary
from npusim.byte_tokenizer import build_detokenizer, build_tokenizer
from npusim.errors import ConfigError, ModelError
from npusim.model_file import read_model
from npusim.model_spec import ModelSpec, read_spec
from npusim.npuw_probe import NativeProbe, NativeVerdict, probe_layer
from npusim.onnx_attention import AttentionLayer, Sink, read_onnx_attention
from transforms import DecompositionError, FloatLogits, StatefulGQA

MODEL_FILE = "openvino_model.xml"
WEIGHTS_FILE = "openvino_model.bin"
MODEL_CONFIG = "config.json"
TOKENIZER_MODELS = ("openvino_tokenizer", "openvino_detokenizer")
TOKENIZER_CONFIGS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION_CONFIG = "generation_config.json"
BUILDER_CONFIG = "genai_config.json"
"""What onnxruntime-genai's model builder writes beside a model; it knows the special tokens."""

JsonObject = Mapping[str, str | int | list[int] | None]


class Tokenizer(Enum):
    """Where the tokenizer comes from, if not from a folder."""

    AUTO = "auto"
    """Bytes for a model of the byte vocabulary, none for any other."""
    BYTES = "bytes"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ExportedLayer:
    """One attention layer: what the file says, how it was lowered, what NPUW does with the op itself."""

    layer: AttentionLayer
    lowered: str
    native: NativeProbe


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """What was written. files are names inside folder, notes what the user should know."""

    folder: Path
    files: tuple[str, ...]
    layers: tuple[ExportedLayer, ...]
    notes: tuple[str, ...]


def export(
    model_path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | Tokenizer = Tokenizer.AUTO,
    overwrite: bool = False,
    probe_native: bool = True,
) -> ExportSummary:
    """Lower an ONNX model and write it to `folder`, ready for `openvino_genai.LLMPipeline`, on CPU or NPU.

    tokenizer: a folder that holds openvino_tokenizer.xml and openvino_detokenizer.xml (its configuration
    files come along), or one of `Tokenizer`. Without one the pipeline takes token ids, no text.
    probe_native: whether to ask the installed OpenVINO what it does without the lowering (seconds a kind of
    layer); the answer is in the summary.

    Raises ModelError for a model that cannot be lowered, ConfigError for a folder that cannot be used;
    nothing is written then.
    """
    source, target = Path(model_path), _target(folder)
    model = read_model(source)
    spec = read_spec(model)
    attention = read_onnx_attention(source)
    plan = _plan_tokenizer(tokenizer, spec)
    if not overwrite:
        _refuse_to_replace(target, plan)
    _lower(model, source)
    configs = {
        MODEL_CONFIG: _model_config(spec, attention.layers),
        GENERATION_CONFIG: _generation_config(plan, source, spec),
    }
    notes = _notes(plan, target, configs[GENERATION_CONFIG], len(attention.layers))
    return ExportSummary(
        folder=target,
        files=_write(model, plan, configs, target),
        layers=tuple(
            ExportedLayer(
                layer=layer, lowered=_lowered(layer), native=probe_layer(layer) if probe_native else NOT_ASKED
            )
            for layer in attention.layers
        ),
        notes=notes,
    )


def _lower(model: ov.Model, source: Path) -> None:
    try:
        StatefulGQA().run_on_model(model)
    except DecompositionError as error:
        raise ModelError(f"{source}: {error}") from error
    FloatLogits().run_on_model(model)  # the pipeline reads them as float32 whatever they are


NOT_ASKED = NativeProbe(verdict=NativeVerdict.NOT_PROBED, reason="not asked for")


def _plan_tokenizer(tokenizer: str | os.PathLike[str] | Tokenizer, spec: ModelSpec) -> Path | Tokenizer:
    """A folder that holds a tokenizer, or BYTES or NONE."""
    is_bytes = spec.vocab_size == byte_vocabulary.VOCAB_SIZE
    if isinstance(tokenizer, Tokenizer):
        if tokenizer is Tokenizer.BYTES and not is_bytes:
            raise ConfigError(
                f"a byte tokenizer for a vocabulary of {spec.vocab_size}; the byte vocabulary has "
                f"{byte_vocabulary.VOCAB_SIZE} tokens, give the folder of the model's own tokenizer"
            )
        if tokenizer is Tokenizer.AUTO:
            return Tokenizer.BYTES if is_bytes else Tokenizer.NONE
        return tokenizer
    given = Path(tokenizer)
    missing = [f"{name}.xml" for name in TOKENIZER_MODELS if not (given / f"{name}.xml").is_file()]
    if missing:
        raise ConfigError(
            f"{given}: no {missing[0]} there; convert the model's tokenizer with openvino_tokenizers "
            "(convert_tokenizer --with-detokenizer) and give that folder"
        )
    return given


def _target(folder: str | os.PathLike[str]) -> Path:
    """Where to write to. Raises ConfigError for what can be no folder."""
    if not os.fspath(folder):
        raise ConfigError("the folder to write to has no name; give one")
    target = Path(folder)
    try:
        if target.exists() and not target.is_dir():
            raise ConfigError(f"{target}: a file; give a folder to write to")
    except OSError as error:
        raise _unwritable(target, error.strerror) from error
    return target


def _refuse_to_replace(target: Path, plan: Path | Tokenizer) -> None:
    """ConfigError where a file of the folder would be replaced; those of a tokenizer that lies there stay."""
    names = [MODEL_FILE, WEIGHTS_FILE]
    if not (isinstance(plan, Path) and plan.resolve() == target.resolve()):
        names += [MODEL_CONFIG, GENERATION_CONFIG]
        if plan is not Tokenizer.NONE:
            names += [f"{name}.{kind}" for name in TOKENIZER_MODELS for kind in ("xml", "bin")]
    for name in names:
        if (target / name).exists():
            raise ConfigError(
                f"{target}: holds a file {name} already; give another folder, or overwrite it (--overwrite)"
            )


def _write(
    model: ov.Model, plan: Path | Tokenizer, configs: Mapping[str, JsonObject], target: Path
) -> tuple[str, ...]:
    """Write everything; the names of the files. Raises ConfigError where the folder cannot be written to."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Weights as they are: rounding them to float16, OpenVINO's default, would change the logits.
        ov.save_model(model, target / MODEL_FILE, compress_to_fp16=False)
        files = [MODEL_FILE, WEIGHTS_FILE]
        files += _write_tokenizer(plan, target)
        files += _write_configs(plan, configs, target)
    except OSError as error:
        raise _unwritable(target, error.strerror) from error
    except RuntimeError as error:  # of save_model
        raise _unwritable(target, str(error).strip().splitlines()[-1]) from error
    return tuple(files)


def _unwritable(target: Path, reason: str | None) -> ConfigError:
    return ConfigError(f"{target}: cannot be written ({reason}); give another folder")


def _write_tokenizer(plan: Path | Tokenizer, target: Path) -> list[str]:
    if plan is Tokenizer.NONE:
        return []
    if isinstance(plan, Path):
        wanted = [f"{name}.{kind}" for name in TOKENIZER_MODELS for kind in ("xml", "bin")]
        return _copy(plan, target, [*wanted, *TOKENIZER_CONFIGS])
    written = []
    for name, model in zip(TOKENIZER_MODELS, (build_tokenizer(), build_detokenizer()), strict=True):
        ov.save_model(model, target / f"{name}.xml", compress_to_fp16=False)
        written += [f"{name}.xml", f"{name}.bin"]
    return written


def _copy(source: Path, target: Path, names: list[str]) -> list[str]:
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        if (source / name).resolve() != (target / name).resolve():
            shutil.copyfile(source / name, target / name)
    return present


def _write_configs(plan: Path | Tokenizer, configs: Mapping[str, JsonObject], target: Path) -> list[str]:
    """The configuration files: those of the tokenizer's folder, else as given."""
    copied = _copy(plan, target, list(configs)) if isinstance(plan, Path) else []
    for name, content in configs.items():
        if name not in copied:
            (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return list(configs)


def _model_config(spec: ModelSpec, layers: tuple[AttentionLayer, ...]) -> JsonObject:
    first = layers[0]
    windows = [layer.local_window_size for layer in layers if layer.local_window_size > 0]
    return {
        "model_type": "stateful_gqa",
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.kv_num_heads,
        "head_dim": spec.layers[0].head_size,
        "max_position_embeddings": spec.max_positions,
        "sliding_window": max(windows) if windows else None,
    }


def _generation_config(plan: Path | Tokenizer, source: Path, spec: ModelSpec) -> JsonObject:
    """What ends a text: the end token where it is known, and the positions that the model has."""
    if spec.max_positions is None:
        return _token_ids(plan, source)
    return {**_token_ids(plan, source), "max_length": spec.max_positions}


def _token_ids(plan: Path | Tokenizer, source: Path) -> JsonObject:
    """Special tokens: of the byte vocabulary, or what the model builder noted beside the model."""
    if plan is Tokenizer.BYTES:
        end = byte_vocabulary.END_TOKEN
        return {"bos_token_id": byte_vocabulary.BEGIN_TOKEN, "eos_token_id": end, "pad_token_id": end}
    noted = source.parent / BUILDER_CONFIG
    if not noted.is_file():
        return {}
    try:
        model = json.loads(noted.read_text(encoding="utf-8"))["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{noted}: not a configuration of onnxruntime-genai ({error}); remove it") from error
    return {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in model}


def _lowered(layer: AttentionLayer) -> str:
    """What became of a layer, in words."""
    window = layer.local_window_size
    parts = ["one ScaledDotProductAttention", "a full cache"]
    parts.append(f"a mask of {window} positions" if window > 0 else "a causal mask")
    if layer.sink is Sink.HEAD_SINK:
        parts.append("the sink as its sixth input")
    elif layer.sink is Sink.SMOOTH_SOFTMAX:
        parts.append("a sink of 0 as its sixth input")
    if layer.rotary is not None:
        parts.append("rotary from position_ids")
    return ", ".join(parts)


def _notes(plan: Path | Tokenizer, target: Path, generation: JsonObject, num_layers: int) -> tuple[str, ...]:
    """What the user should know; asked before anything is written."""
    notes = []
    if plan is Tokenizer.NONE and (target / f"{TOKENIZER_MODELS[0]}.xml").exists():
        notes.append(
            "the tokenizer that was in the folder was left there; the pipeline takes text through it"
        )
    elif plan is Tokenizer.NONE:
        notes.append("no tokenizer: the pipeline takes token ids (an openvino.Tensor), no text")
    if not isinstance(plan, Path) and "eos_token_id" not in generation:
        notes.append(
            "no end token is known: give max_new_tokens or eos_token_id, or a text goes on for all positions"
        )
    if num_layers <= MAX_UNREPEATED_LAYERS:
        notes.append(
            f'NPUW may fail to partition a model of {num_layers} layers ("undeclared parameters"); if so, '
            "pass NPUW_ONLINE_PIPELINE=NONE"
        )
    return tuple(notes)


MAX_UNREPEATED_LAYERS = 4
"""From five equal layers on NPUW partitions by repeated blocks; below, it cuts where a count says."""
