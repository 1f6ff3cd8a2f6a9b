"""A quarter of an hour with a GPU: do all schedules run there, is each row right, and how fast is it.

    python benchmarks/gpu_window.py --budget 520 --state FOLDER [--rows TEXT ...]
    python benchmarks/gpu_window.py --budget 3000 --state FOLDER --device cpu --tiny      what a CPU can run, small

The items are those of `gpu_parts/items.py`, in order, each with a question and the seconds that it is expected to take.
An item starts only if it fits into what is left of the budget. FOLDER keeps state.json and report.md, rewritten after
each item, and the text of each trace; what it holds for these sources and this GPU is left out, so the same command
continues where the last call ended, also one that was killed.

The table of all items is printed last. Exit code 1 when a figure is wrong, or an item has failed or hung, in this call
or one before. Nothing is installed or downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts.items import ITEMS, SECTIONS
from benchmarks.gpu_parts.machine import find_machine
from benchmarks.gpu_parts.processes import stop_on_signals
from benchmarks.gpu_parts.rows import Result, choose_rows, run_rows
from benchmarks.gpu_parts.window import Window
from benchmarks.gpu_parts.window_state import State, describe_cells, describe_verdict


def main() -> None:
    arguments = parse_arguments()
    stop_on_signals()
    machine = find_machine(arguments.device)
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # this process: the GPUs are for the items
    state = State(arguments.state, machine, arguments.budget, arguments.tiny)
    print(f"{machine.describe()}; results: {arguments.state}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-window-") as scratch:
        window = Window(machine, Path(scratch), arguments.state, arguments.tiny)
        try:
            run_items(window, state, arguments)
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
        finally:
            window.end()
    print(f"\n{state.render_table()}", flush=True)
    sys.exit(1 if state.is_bad else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, required=True, help="seconds, from the start of this command")
    parser.add_argument("--state", type=Path, required=True, metavar="FOLDER", help="of the results")
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="only items whose name is or holds one of these"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the models at a size that takes seconds anywhere")
    arguments = parser.parse_args()
    if not choose_rows(ITEMS, arguments.rows):
        parser.error(f"no item is or holds: {', '.join(arguments.rows)}")
    return arguments


def run_items(window: Window, state: State, arguments: argparse.Namespace) -> None:
    def show(result: Result) -> None:
        state.add(result)
        if state.is_done(result.name):  # the table at the end says why others have not run
            text = f"{describe_verdict(result)} | {result.name} | {describe_cells(result)}"
            print(f"{text} | {result.seconds:.0f} s", flush=True)

    chosen = choose_rows(ITEMS, arguments.rows)
    ends = psutil.Process().create_time() + arguments.budget
    for section in SECTIONS:
        left = [item for item in section.items if item in chosen and not state.is_done(item.name)]
        run_rows([window.build_row(item) for item in left], ends - time.time(), show, section.count_jobs())


if __name__ == "__main__":
    main()
