"""What commands that generate do first: read the models, choose the sizes left open, compile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import npusim
from npusim.cli.output import progress
from npusim.cli.parsers import sized_config
from npusim.model_file import read_model
from npusim.model_spec import read_spec


@dataclass(frozen=True, kw_only=True)
class GenerationSizes:
    """Tokens of the prompt, tokens to generate, rows of the largest generate block."""

    prompt_len: int
    max_new_tokens: int
    block_len: int


@dataclass(frozen=True, kw_only=True)
class CompiledModels:
    """Models for one generation, a model and perhaps its draft model, and the config of them all."""

    config: dict[str, str | int]
    models: tuple[npusim.CompiledLLM, ...]


def compile_models(paths: Sequence[Path], given: Mapping[str, str], sizes: GenerationSizes) -> CompiledModels:
    """Compile for one generation; `given` holds the settings of the command line.

    Raises ConfigError or ModelError for settings, lengths or models that cannot be.
    """
    with progress("compiling", len(paths)) as advance:
        models = [read_model(path) for path in paths]
        config = sized_config(
            given,
            prompt_len=sizes.prompt_len,
            max_new_tokens=sizes.max_new_tokens,
            block_len=sizes.block_len,
            max_positions={
                str(path): read_spec(model).max_positions for path, model in zip(paths, models, strict=True)
            },
        )
        compiled = []
        for model in models:
            compiled.append(npusim.compile_model(model, config))
            advance()
    return CompiledModels(config=config, models=tuple(compiled))
