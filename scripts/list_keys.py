"""Write the table of all keys into docs/configure.md, from the schema and the comments of `conf/`.

    python scripts/list_keys.py
    python scripts/list_keys.py --json_schema FILE

With `--json_schema` it writes the JSON Schema of a run's config instead, which editors complete and check keys by.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import exit_with_message  # noqa: E402
from filesystem import check_new_file  # noqa: E402
from training.config.json_schema import build_json_schema  # noqa: E402
from training.config.key_table import render_keys  # noqa: E402

PAGE = ROOT / "docs" / "configure.md"
START, END = "<!-- table of keys: scripts/list_keys.py -->", "<!-- end of the table of keys -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json_schema", type=Path, metavar="FILE", help="write the JSON Schema there instead")
    file = parser.parse_args().json_schema
    if file is None:
        PAGE.write_text(replace_table(PAGE.read_text(), render_keys()))
        return
    with exit_with_message():
        schema = build_json_schema()
        check_new_file(file, "--json_schema", replaces=True)
        file.write_text(json.dumps(schema, indent=2) + "\n")


def replace_table(page: str, table: str) -> str:
    """Returns the page with `table` between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    main()
