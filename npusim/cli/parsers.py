"""Options that several commands share, and their conversion from text."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from npusim.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object

MAX_PROMPT_LEN = "NPUW_LLM_MAX_PROMPT_LEN"
MIN_RESPONSE_LEN = "NPUW_LLM_MIN_RESPONSE_LEN"
MAX_GENERATION_TOKEN_LEN = "NPUW_LLM_MAX_GENERATION_TOKEN_LEN"
PROMPT_LEN_STEP = 64


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
    config: Mapping[str, str], *, prompt_len: int, max_new_tokens: int, block_len: int = 1
) -> dict[str, str | int]:
    """The config with the sizes that were left open chosen for this one generation.

    prompt_len is rounded up to a multiple of 64, as NPUW does; block_len is the largest generate block.
    """
    rounded = -(-max(prompt_len, 1) // PROMPT_LEN_STEP) * PROMPT_LEN_STEP
    sizes = {
        MAX_PROMPT_LEN: rounded,
        MIN_RESPONSE_LEN: max(max_new_tokens, 1),
        MAX_GENERATION_TOKEN_LEN: block_len,
    }
    return {**sizes, **config}


def token_ids(text: str) -> list[int]:
    """Comma separated token ids, for argparse."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3") from error


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
