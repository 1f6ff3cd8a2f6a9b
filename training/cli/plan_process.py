"""Asks for the plan of a training command, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence


def ask_plan(words: Sequence[str], plan: str, num_ranks: int) -> tuple[list[str], str]:
    """Return the keys of the layout that a plan proposes on its line `use: KEY=VALUE ...`, or no keys and the reason.

    words: the training script and its arguments, without a launcher. plan: the value of the key `plan`. num_ranks: of
    the layout.
    """
    planned = ["overwrite_output_dir=false", f"plan={plan}", f"world_size={num_ranks}"]
    ended = subprocess.run([sys.executable, *words, *planned], capture_output=True, text=True)
    used = re.search(r"^use: (.*)$", ended.stdout, re.MULTILINE)
    lines = (
        ended.stderr.strip() or ended.stdout.strip() or f"the plan ended with code {ended.returncode}"
    ).splitlines()
    return (used[1].split(), "") if used else ([], lines[-1])
