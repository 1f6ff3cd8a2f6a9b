"""Write the table of all keys into docs/configure.md, from the schema and the comments of `conf/`.

python scripts/list_keys.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from training.config.key_table import render_keys  # noqa: E402

PAGE = ROOT / "docs" / "configure.md"
START, END = "<!-- table of keys: scripts/list_keys.py -->", "<!-- end of the table of keys -->"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(replace_table(PAGE.read_text(), render_keys()))


def replace_table(page: str, table: str) -> str:
    """Returns the page with `table` between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    main()
