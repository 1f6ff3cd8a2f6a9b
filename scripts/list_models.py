"""Which models work: every family of causal language models of the installed `transformers` is tried, and the table in
docs/models.md says what came of it.

    python scripts/list_models.py --train                      # writes the table; --train: five SGD steps, too
    python scripts/list_models.py --families llama bloom       # prints these rows
    python scripts/list_models.py --train --check              # fails where the table says something else

A small model of each family, with a layer of each kind that its published config has, must give the loss and the
gradients that `transformers` gives. A family that was not run is not listed as proven.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.family_trials import SECONDS, Trial, try_families  # noqa: E402

PAGE = ROOT / "docs/models.md"
START, END = "<!-- table of families: scripts/list_models.py -->", "<!-- end of the table of families -->"
NOT_STACKED = "not stacked"
FIGURE = re.compile(r"\d+e[+-]\d+")
HEAD = (
    "| model_type | how | gradients | 5 SGD steps | 5 SGD steps, ep2 | what stands in the way |",
    "|---|---|---|---|---|---|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", metavar="MODEL_TYPE", help="print the rows of these only")
    parser.add_argument("--train", action="store_true", help="with five SGD steps through the engine on two stages")
    parser.add_argument("--check", action="store_true", help="fail where the table in docs/models.md says otherwise")
    parser.add_argument("--workers", type=int, default=2, help="families that are tried at a time (2)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that one family may take ({SECONDS:.0f})")
    options = parser.parse_args()
    families = options.families or list_families()
    trials = try_families(families, options.train, options.workers, options.seconds, report_progress)
    if options.check:
        sys.exit(check(trials, read_table(PAGE.read_text())))
    if options.families:
        print("\n".join([*HEAD, *(write_row(name, trial) for name, trial in trials.items())]))
    else:
        PAGE.write_text(replace_table(PAGE.read_text(), trials))
        print(
            f"{count_proven(trials)} of {len(trials)} model types are proven, those around others not counted; "
            f"the table is in {PAGE.relative_to(ROOT)}"
        )


def list_families() -> list[str]:
    """Returns each model_type once: causal language models, and multimodal models that wrap one."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Names: the mapping of classes also has those that unwrapping a model has registered in this process.
    published = {CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    wrapping = {config for config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if "text_config" in config.sub_configs}
    return sorted(name for name, config in CONFIG_MAPPING.items() if config in published | wrapping)


def report_progress(model_type: str, trial: Trial) -> None:
    print(f"{model_type:28} {trial.how:8} {trial.reason[:100]}", file=sys.stderr, flush=True)


def count_proven(trials: Mapping[str, Trial]) -> int:
    """Returns the number of proven model types; text models and their wrappers count once."""
    return sum(trial.how in ("file", "generic") for trial in trials.values())


def write_row(model_type: str, trial: Trial) -> str:
    measured = (trial.gradients, trial.steps, trial.divided)
    figures = [f"{figure:.0e}" if figure is not None else "" for figure in measured]
    figures[-1] = figures[-1] if trial.is_stacked else NOT_STACKED
    return f"| `{model_type}` | {trial.how} | {' | '.join(figures)} | {write_reason(trial)} |"


def write_reason(trial: Trial) -> str:
    """Returns the reason as the text of a table cell, in which nothing is a link."""
    return trial.reason.replace("|", "/").replace("](", "] (").encode("ascii", "replace").decode()


def replace_table(page: str, trials: Mapping[str, Trial]) -> str:
    before, rest = page.split(START)
    rows = [write_row(model_type, trial) for model_type, trial in trials.items()]
    return before + "\n".join([START, "", *HEAD, *rows, "", END]) + rest.split(END)[1]


def read_table(page: str) -> dict[str, tuple[str, str, str]]:
    """Returns model_type -> (how, reason, what is said of divided experts: "figure", "not stacked" or nothing)."""
    rows = page.split(START)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): (how, reason, FIGURE.sub("figure", divided)) for name, how, _, _, divided, reason in cells}


def check(trials: Mapping[str, Trial], table: Mapping[str, tuple[str, str, str]]) -> int:
    """Exit code. Figures differ from machine to machine; that they are below the bound is what `how` says."""
    differing = 0
    for model_type, trial in trials.items():
        listed = table.get(model_type, ("", "", ""))
        divided = "figure" if trial.divided is not None else "" if trial.is_stacked else NOT_STACKED
        found = (trial.how, write_reason(trial), listed[2] if trial.steps is None else divided)  # tried in training
        if (found[0], FIGURE.sub("", found[1]), found[2]) != (listed[0], FIGURE.sub("", listed[1]), listed[2]):
            differing += 1
            print(f"{model_type}: found {found}, the table says {listed}")
    return min(differing, 1)


if __name__ == "__main__":
    main()
