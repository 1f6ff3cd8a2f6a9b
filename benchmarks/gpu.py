"""Half an hour with a GPU: is it right, is it fast, and why.

    python benchmarks/gpu.py [--parts right,fast,why] [--rows TEXT ...] [--minutes N] [--row-seconds N]
        [--output FOLDER]
    python benchmarks/gpu.py --device cpu --tiny      everything that a CPU can run, small, to see that all works

*right* trains a small model in every way and compares with the plain Hugging Face model in one process. *fast* measures
1B, 3B and 8B next to the `Trainer` of transformers, the plan and known figures, and each feature on and off. *why*
traces one step: top kernels, idle share, waits. Each row is a run of the trainer's own command in processes of its own,
with a time limit; out of memory, a crash and a hang are rows too. A part ends within its minutes: rows that no time is
left for say so.

The report (report.md, report.json, logs/) is written row by row, into benchmarks/results/GPU-DATE/ unless --output
says otherwise; what only shows that all runs (a CPU, --tiny) goes to outputs/gpu/. Exit code 1 when a figure is wrong
or a row failed. Nothing is installed or downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts.fast import Fast
from benchmarks.gpu_parts.machine import Machine, find_machine
from benchmarks.gpu_parts.processes import stop_on_signals
from benchmarks.gpu_parts.report import Report, choose_folder
from benchmarks.gpu_parts.right import Right
from benchmarks.gpu_parts.rows import choose_rows, count_jobs, run_rows
from benchmarks.gpu_parts.why import Why

PARTS = {"right": Right, "fast": Fast, "why": Why}
_MINUTES = {"cuda": 7.5, "cpu": 15.0}  # of a part: a session with a GPU is often cut into tens of minutes
# Of right, whose rows say nothing of time and so run side by side; most of a row is imports, on one core a rank.
_CORES_PER_ROW = {"cuda": 2, "cpu": 1}


def main() -> None:
    arguments = parse_arguments()
    stop_on_signals()
    machine = find_machine(arguments.device)
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # this process: the GPUs are for the rows
    folder = arguments.output or choose_folder(machine, arguments.tiny)
    report = Report(folder, machine, {key: str(value) for key, value in vars(arguments).items()})
    print(f"{machine.describe()}; report: {folder}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as scratch:
        try:
            counts = [run_part(part, arguments, machine, report, Path(scratch) / part) for part in arguments.parts]
        except KeyboardInterrupt:
            sys.exit(f"\nstopped; what has run is in {folder}/report.md")
    if not any(counts):
        sys.exit(f"no row of {', '.join(arguments.parts)} is or holds: {', '.join(arguments.rows)}")
    print(f"\nreport: {folder}/report.md", flush=True)
    sys.exit(1 if report.is_bad else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="right,fast,why", help="with commas between")
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="only rows whose name is or holds one of these"
    )
    parser.add_argument("--minutes", type=float, help="that each part may take: 7.5, on a CPU 15")
    parser.add_argument("--row-seconds", type=float, help="that each row may take, in place of its own limit")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the shapes at a size that takes seconds anywhere")
    parser.add_argument("--output", type=Path, help="folder of the report")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return arguments


def run_part(part: str, arguments: argparse.Namespace, machine: Machine, report: Report, scratch: Path) -> int:
    """Returns how many rows it has."""
    scratch.mkdir()
    measured = PARTS[part](machine, scratch, report.folder / "logs" / part, arguments.tiny)
    rows = choose_rows(measured.list_rows(), arguments.rows)
    if arguments.row_seconds is not None:
        rows = [replace(row, limit=arguments.row_seconds) for row in rows]
    jobs = count_jobs(_CORES_PER_ROW[machine.device]) if part == "right" else 1
    minutes = arguments.minutes or _MINUTES[machine.device]
    report.begin(part, measured.TITLE, measured.COLUMNS)
    return len(run_rows(rows, minutes * 60, lambda result: report.add(part, result), jobs))


if __name__ == "__main__":
    main()
