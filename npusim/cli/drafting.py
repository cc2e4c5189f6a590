"""The options of guessing ahead, which several commands have."""

import argparse
from pathlib import Path

from npusim.cli.parsers import DEFAULT_NUM_DRAFT, at_least

LOOKUP = "lookup"


def add_draft_options(parser: argparse._ActionsContainer) -> None:
    """--draft, whose file `draft_path` tells, and --num-draft, which is None where it is not given."""
    parser.add_argument(
        "--draft",
        metavar="MODEL|lookup",
        help="guess ahead with this ONNX model, or with what followed the last tokens earlier in the text",
    )
    parser.add_argument(
        "--num-draft",
        metavar="N",
        type=at_least(1),
        help=f"tokens to guess per step (default {DEFAULT_NUM_DRAFT})",
    )


def draft_path(draft: str | None) -> Path | None:
    """The file of the draft model; None without one."""
    return None if draft is None or draft == LOOKUP else Path(draft)
