"""`npusim plan`: KV memory of a model at any length, nothing allocated."""

import argparse
from collections.abc import Mapping
from dataclasses import replace

from npusim.cache_plan import LayerCache, plan_caches
from npusim.cli.config_help import config_keys
from npusim.cli.output import Json, new_table, plain, print_json, print_sentences, stdout
from npusim.cli.parsers import (
    Subparsers,
    add_command,
    add_config_option,
    at_least,
    parse_config,
)
from npusim.cli.tables import print_table
from npusim.config import LLMConfig
from npusim.config_choices import KVLayout
from npusim.config_options import MAX_PROMPT_LEN, MIN_RESPONSE_LEN
from npusim.config_values import ConfigValue
from npusim.errors import ConfigError
from npusim.model_file import read_model
from npusim.model_spec import ModelSpec, read_spec

LAYOUT_KEY, DEFAULT_LAYOUT = "NPUSIM_KV_LAYOUT", KVLayout.RING.value

DESCRIPTION = """\
Show how many bytes of KV cache a model needs at a context length: every layer
linear, and with the layout asked for, which gives windowed layers buffers of
their window's size. Nothing is compiled or allocated; a request allocates
exactly these bytes."""

EPILOG = f"""\
examples:
  npusim plan model.onnx --max-length 131072
  npusim plan model.onnx --layout ROLLING -c NPUSIM_KV_SLACK=16
  npusim plan model.onnx --json | jq .total_nbytes

exit code: 0, 2 for wrong usage or an unusable file

{config_keys()}"""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "plan", "KV memory per layer, linear against window-sized", DESCRIPTION, EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="ONNX file of a language model")
    parser.add_argument(
        "--max-length",
        metavar="N",
        type=at_least(1),
        help="tokens that can be stored; default: what the settings give",
    )
    parser.add_argument(
        "--layout",
        type=str.upper,
        choices=[layout.value for layout in KVLayout],
        help=f"slots of windowed layers, as -c {LAYOUT_KEY} (default: {DEFAULT_LAYOUT})",
    )
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Plan both layouts and print them side by side."""
    spec = read_spec(read_model(options.model))
    config = _config(options, spec)
    chosen = plan_caches(spec, config)
    linear = plan_caches(spec, replace(config, kv_layout=KVLayout.LINEAR))
    if options.json:
        print_json(_report_json(spec, config, chosen, linear))
    else:
        _print_report(config, chosen, linear)
        print_sentences(stdout(), _notes(spec, config))
    return 0


def _config(options: argparse.Namespace, spec: ModelSpec) -> LLMConfig:
    """The settings with the length and layout of the command line; a length needs no rotary tables."""
    settings: dict[str, ConfigValue] = {**parse_config(options.config)}
    if options.layout is not None:
        _refuse_both("--layout", LAYOUT_KEY, settings)
        settings[LAYOUT_KEY] = options.layout
    settings.setdefault(LAYOUT_KEY, DEFAULT_LAYOUT)
    if options.max_length is None:
        return LLMConfig.from_mapping(settings).fitted(spec.max_positions)
    sized = {MAX_PROMPT_LEN: options.max_length, MIN_RESPONSE_LEN: 1}
    for key in sized:
        _refuse_both("--max-length", key, settings)
    return LLMConfig.from_mapping({**settings, **sized}).fitted(None)


def _refuse_both(option: str, key: str, settings: Mapping[str, ConfigValue]) -> None:
    if key in settings:
        raise ConfigError(f"{option} and -c {key}={settings[key]} set the same; give one of the two")


def _notes(spec: ModelSpec, config: LLMConfig) -> list[str]:
    if spec.max_positions is None or config.capacity <= spec.max_positions:
        return []
    return [
        f"note: the model's position tables have {spec.max_positions:,} rows; a request for more tokens is "
        "refused"
    ]


def _total(caches: tuple[LayerCache, ...]) -> int:
    return sum(cache.nbytes for cache in caches)


def _print_report(config: LLMConfig, chosen: tuple[LayerCache, ...], linear: tuple[LayerCache, ...]) -> None:
    table = new_table()
    for heading in ("layer", "window", "heads", "layout"):
        table.add_column(heading, no_wrap=True)
    for heading in ("slots", "bytes", "bytes if linear"):
        table.add_column(heading, no_wrap=True, justify="right")
    for cache, full in zip(chosen, linear, strict=True):
        layer = cache.layer
        cells = (
            str(layer.number),
            "-" if layer.local_window_size < 0 else str(layer.local_window_size),
            f"{layer.kv_num_heads} x {layer.head_size} {cache.cache_type.get_type_name()}",
            cache.key_layout.name,
            f"{cache.layout.capacity:,}",
            f"{cache.nbytes:,}",
            f"{full.nbytes:,}",
        )
        table.add_row(*(plain(cell) for cell in cells))
    console = stdout()
    print_table(console, table)
    total, all_linear = _total(chosen), _total(linear)
    console.print(
        plain(
            f"{config.capacity:,} tokens: {total:,} bytes ({_mebibytes(total)}), "
            f"linear {all_linear:,} ({_mebibytes(all_linear)}), {total / all_linear:.0%} of it"
        )
    )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _report_json(
    spec: ModelSpec, config: LLMConfig, chosen: tuple[LayerCache, ...], linear: tuple[LayerCache, ...]
) -> dict[str, Json]:
    return {
        "capacity": config.capacity,
        "max_positions": spec.max_positions,
        "total_nbytes": _total(chosen),
        "linear_nbytes": _total(linear),
        "config": dict(config.to_mapping()),
        "layers": [
            {
                "index": cache.layer.index,
                "number": cache.layer.number,
                "name": cache.layer.name,
                "local_window_size": cache.layer.local_window_size,
                "layout": cache.key_layout.name,
                "slots": cache.layout.capacity,
                "shape": list(cache.shape),
                "element_type": cache.cache_type.get_type_name(),
                "nbytes": cache.nbytes,
                "linear_nbytes": full.nbytes,
            }
            for cache, full in zip(chosen, linear, strict=True)
        ],
    }
