"""Prints a short table of each run, and writes a page with its curves: of several runs, one that compares them.

    python scripts/report.py outputs/demo                               # writes outputs/demo/report.html again
    python scripts/report.py outputs/a outputs/b --output compared.html

The page is one file, without server or network. A run keeps its own up to date; docs/tracking.md says what is on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import exit_with_message  # noqa: E402
from filesystem import check_new_file  # noqa: E402
from interpreter import check_interpreter  # noqa: E402
from training.checkpoint.run_folder import RunFolder  # noqa: E402
from training.observability.run_page import RunHistory, read_history, write_run_page  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, nargs="+", help="of a run")
    parser.add_argument("--output", type=Path, help="the page; default: report.html of the one run, or here")
    arguments = parser.parse_args()
    with exit_with_message():
        check_interpreter()
        if arguments.output is not None:
            check_new_file(arguments.output, "--output", replaces=True)
        runs = [(folder, read_history(folder)) for folder in map(RunFolder, arguments.output_dir)]
        page = arguments.output or (runs[0][0].report if len(runs) == 1 else Path("report.html"))
        write_run_page(page, runs)
        for folder, history in runs:
            print_table(folder, history, page)


def print_table(folder: RunFolder, history: RunHistory, page: Path) -> None:
    rows = [("run", str(folder.path))]
    for name, key in (("training loss", "loss"), ("evaluation loss", "eval_loss")):
        if (curve := history.curves.get(key)) is not None:
            first, last = (bucket.total / bucket.count for bucket in (curve.buckets[0], curve.buckets[-1]))
            rows.append((f"{name}, first and last report", f"{first:.3f} -> {last:.3f}"))
    if (speed := history.curves.get("tokens_per_second")) is not None:
        median = statistics.median(bucket.total / bucket.count for bucket in speed.buckets)
        rows.append(("tokens/s without padding, median", f"{median:,.0f}"))
    rows += [
        ("curves, events, stages, to open in a browser", str(page)),
        ("figures of each step", str(folder.metrics)),
        ("checkpoint, to continue from", str(folder.checkpoints)),
        ("Hugging Face model", str(folder.export)),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))


if __name__ == "__main__":
    main()
