"""Write the table of settings in README.md anew, from npusim.config. Run after a setting has changed."""

import argparse
from pathlib import Path

from npusim.cli.config_help import settings_table

BEGIN, END = "<!-- settings -->", "<!-- /settings -->"


def main() -> None:
    """Replace what stands between the two marks."""
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    path = Path(__file__).parents[1] / "README.md"
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n{settings_table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
