"""The settings of -c as help text, from the configuration itself."""

from npusim.config import OPTIONS


def config_keys() -> str:
    """Every key with its meaning and default, for the end of a command's help."""
    entries = [f"  {option.key}  (default {option.default})\n      {option.meaning}" for option in OPTIONS]
    return "settings (-c KEY=VALUE), named as NPUW names them; own ones begin with NPUSIM_:\n" + "\n".join(
        entries
    )


def settings_table() -> str:
    """Every key as a row of a Markdown table, for the README."""
    rows = [f"| `{option.key}` | {option.default} | {option.meaning} |" for option in OPTIONS]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
