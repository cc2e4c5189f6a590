"""Options that several commands share, and their conversion from text."""

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from npusim.config import LLMConfig
from npusim.config_choices import KVLayout
from npusim.config_options import MAX_GENERATION_TOKEN_LEN, MAX_PROMPT_LEN, MIN_RESPONSE_LEN
from npusim.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object

COMMIT = "NPUSIM_COMMIT"
PROMPT_LEN_STEP = 64
DEFAULT_NUM_DRAFT = 4


def add_command(
    subparsers: Subparsers, name: str, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A sub-command whose help keeps its line breaks."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_max_new_tokens_option(parser: argparse.ArgumentParser) -> None:
    """--max-new-tokens N."""
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=at_least(1),
        default=64,
        help="most tokens to generate (default 64)",
    )


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """-c KEY=VALUE, repeatable; read it with `parse_config`."""
    parser.add_argument(
        "-c",
        "--config",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the pipeline; may be given several times, keys are listed below",
    )


def parse_config(settings: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE texts as a config. Raises ConfigError for a text without '=' and a key given twice."""
    config: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"-c {setting}: a setting is KEY=VALUE, e.g. -c {MAX_PROMPT_LEN}=128")
        if key in config:
            raise ConfigError(f"-c {setting}: {key} is given twice (first {config[key]}); give it once")
        config[key] = value.strip()
    return config


def sized_config(
    config: Mapping[str, str],
    *,
    prompt_len: int,
    max_new_tokens: int,
    block_len: int = 1,
    max_positions: Mapping[str, int | None] | None = None,
    length_option: str = "--max-new-tokens",
) -> dict[str, str | int]:
    """The config with what was left open chosen for this one generation.

    prompt_len is rounded up to a multiple of 64, as NPUW does, as far as the model has positions; block_len
    is the largest generate block, 1 where nothing is drafted. With drafts a ROLLING layout commits DEFERRED:
    else the first rejected draft could not be taken back. max_positions: of each model, by its file.
    length_option: what a message tells to lower.

    Raises ConfigError for settings that cannot be, and for a generation that does not fit a model.
    """
    settings = LLMConfig.from_mapping(config)
    chosen: dict[str, str | int] = {
        MIN_RESPONSE_LEN: max(max_new_tokens, 1),
        MAX_GENERATION_TOKEN_LEN: block_len,
    }
    if MAX_PROMPT_LEN not in config:
        response_len = settings.min_response_len if MIN_RESPONSE_LEN in config else max(max_new_tokens, 1)
        longest = _longest_prompt(prompt_len, response_len, max_positions or {}, length_option)
        chosen[MAX_PROMPT_LEN] = max(longest, settings.prefill_chunk_size or 1)
    if block_len > 1 and settings.kv_layout is KVLayout.ROLLING:
        chosen[COMMIT] = "DEFERRED"
    return {**chosen, **config}


def refuse_idle(options: argparse.Namespace, needed: str, *names: str) -> None:
    """ConfigError for the first option of `names` that was given: it does nothing without what is needed."""
    for name in names:
        if getattr(options, name.lstrip("-").replace("-", "_")) is not None:
            raise ConfigError(f"{name} does nothing without {needed}; give that too, or leave {name} out")


def _longest_prompt(
    prompt_len: int, response_len: int, max_positions: Mapping[str, int | None], length_option: str
) -> int:
    """prompt_len rounded up, as far as that and the response fit the positions of every model."""
    longest = -(-max(prompt_len, 1) // PROMPT_LEN_STEP) * PROMPT_LEN_STEP
    for file, limit in max_positions.items():
        if limit is None:
            continue
        room = limit - response_len + 1  # the last token generated needs no position
        if room < prompt_len:
            raise ConfigError(
                f"{file}: a prompt of {prompt_len} tokens and {response_len} new ones need "
                f"{prompt_len + response_len - 1} positions, the model's shortest table has {limit}; lower "
                f"{length_option} (or {MIN_RESPONSE_LEN}, where it is given) or shorten the prompt"
            )
        longest = min(longest, room)
    return longest


def token_ids(text: str) -> list[int]:
    """Comma separated token ids, for argparse."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3") from error


def utf8_text(text: str) -> str:
    """Text for argparse: the bytes of the argument read as UTF-8, whatever the locale made of them."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{text!a} is no UTF-8 text") from error


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer that is not below `least`."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; the least is {least}")
        return value

    return integer


def temperature(text: str) -> float:
    """A number of 0 (greedy) or more, for argparse."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; 0 is greedy, above it is sampling")
    return value


def probability(text: str) -> float:
    """A number above 0 and at most 1, for argparse."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no probability; give a number above 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value
