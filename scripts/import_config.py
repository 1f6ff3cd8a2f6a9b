"""Makes a config of this project from one of LLaMA-Factory, axolotl, TRL, ms-swift or PaddleNLP.

    python scripts/import_config.py llama3_lora_sft.yaml -o conf/mine.yaml
    python scripts/import_config.py train.sh --project ms-swift -o conf/mine.yaml

Theirs is YAML, JSON, or a script with their command. What has no counterpart is named, with the key that takes its
place, on the screen and at the top of the file. docs/migration.md has the tables.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import UserError  # noqa: E402
from training.migration.importer import PROJECTS, import_config  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("theirs", type=Path, help="their config, or a script with their command")
    parser.add_argument("-o", "--output", type=Path, help="where to write ours; without it, it is printed")
    parser.add_argument("--project", choices=PROJECTS, help="whose config it is, where its keys do not tell")
    arguments = parser.parse_args()
    try:
        imported = import_config(arguments.theirs, arguments.project)
        text = imported.render((arguments.output or Path("mine")).stem, arguments.theirs.name)
        if arguments.output is None:
            print(text, end="")
            return
        if arguments.output.exists():
            raise UserError(f"{arguments.output} is there already; give another --output, or move it")
        arguments.output.write_text(text)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.output}: {len(imported.keys) + len(imported.groups)} keys of a {imported.project} config")
    for key, why in imported.left.items():
        print(f"  not carried over: {key}: {why}")
    plan = f"python trainer_base_ds_mp.py -cn {arguments.output.stem} plan=true world_size=N hardware=NAME"
    print(f"look at it, then: {plan}")


if __name__ == "__main__":
    main()
