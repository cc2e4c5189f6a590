"""The settings of -c as help text, from the configuration itself."""

import textwrap

from npusim.config_options import OPTIONS

WIDTH, INDENT = 80, 6 * " "


def config_keys() -> str:
    """Every key with its meaning and default, for the end of a command's help."""
    lines = ["settings (-c KEY=VALUE), named as NPUW names them; own ones begin with NPUSIM_:"]
    for option in OPTIONS:
        lines.append(f"  {option.key}  (default {option.default})")
        lines += textwrap.wrap(option.meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)


def settings_table() -> str:
    """Every key as a row of a Markdown table, for the README."""
    rows = [f"| `{option.key}` | {option.default} | {option.meaning} |" for option in OPTIONS]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
