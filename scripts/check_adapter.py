"""Say what an engine's loader makes of a folder with an adapter of a mixture of experts, without the engine: which keys
it takes, in which orientation and shape, which it refuses, and which it would leave out or load wrongly.

    python scripts/check_adapter.py FOLDER --engine vllm [--release 0.33.0] [--model_class Qwen3MoeForCausalLM]

Keys that differ by the numbers of layers and experts alone are one line. The base model's config.json is needed, for
its dimensions: in FOLDER, where exports have it, in the base_model_name_or_path of the adapter, or in --base. The
exit code is 0 if all is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from errors import UserError
from models.adapters.engine_check import (
    check_adapter,
    count_problems,
    describe_findings,
    find_limit,
    find_rank,
    read_dimensions,
)
from models.adapters.engines import ENGINES, MODEL_CLASSES, find_engine, find_model_class
from models.adapters.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_fields
from models.storage.tensor_files import load_json, open_safetensors


def main() -> int:
    """Returns the exit code: 0 if the engine takes all, 1 if not, 2 after one line that says what to fix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with adapter_config.json")
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES))
    parser.add_argument("--release", help="of the engine; the table is of one, which is the default")
    parser.add_argument("--model_class", choices=sorted(MODEL_CLASSES), help="by default that of the model_type")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the base model, or a folder with its config.json")
    args = parser.parse_args()
    try:
        return check(args.folder, args.engine, args.release, args.model_class, args.base)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def check(folder: Path, engine_name: str, release: str | None, class_name: str | None, base: Path | None) -> int:
    """Print the findings and return the exit code. Raises UserError for a folder that cannot be read, for values in its
    config that no adapter can have, and for a release or a class of models that the tables do not have."""
    engine = find_engine(engine_name, release)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{folder} holds no {ADAPTER_WEIGHTS}")
    fields, file = load_json(folder / ADAPTER_CONFIG), open_safetensors(folder / ADAPTER_WEIGHTS)
    # peft takes a pattern as target_modules too; whether the engine does is a finding
    check_fields(folder / ADAPTER_CONFIG, {**fields, "target_modules": []})
    config = load_base_config(folder, fields, base)
    class_name = class_name or find_model_class(str(config.get("model_type")))
    dimensions = read_dimensions(config)
    if dimensions is None:
        raise UserError(f"the config.json of the base model of {folder} lacks the sizes of a mixture; give --base")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    findings = check_adapter(shapes, fields, engine_name, class_name, dimensions, release)
    print(f"{engine_name} {engine.release}, {class_name}: experts {engine.forms[class_name].value}")
    print("\n".join(describe_findings(findings)))
    if (limit := find_limit(find_rank(fields), engine)) is not None:
        print(f"start {engine_name} with --max-lora-rank {limit}")
    problems = count_problems(findings)
    print(", ".join(f"{count} {problem}" for problem, count in sorted(problems.items())) or "all taken")
    return 1 if problems else 0


def load_base_config(folder: Path, fields: dict[str, Any], base: Path | None) -> dict[str, Any]:
    """Return the fields of the base model's config.json; of a model around a text model, those of the text model.
    Raises UserError where there is none."""
    named = Path(str(fields.get("base_model_name_or_path"))).expanduser()
    for place in (base,) if base is not None else (folder, named):
        if (place / "config.json").is_file():
            config = load_json(place / "config.json")
            text = config.get("text_config")
            return {**config, **text} if isinstance(text, Mapping) else config
    raise UserError(f"{base or folder} has no config.json of the base model; give its folder as --base")


if __name__ == "__main__":
    sys.exit(main())
