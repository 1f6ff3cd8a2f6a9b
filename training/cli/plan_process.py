"""Asks for the plan of a training command, in a process of its own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from masking import MASKED


def ask_plan(words: Sequence[str], plan: str, num_ranks: int) -> tuple[list[str], str]:
    """Return (keys, ""): the keys KEY=VALUE in which the layout that a plan proposes, on its line `use: ...`, differs
    from the command; ([], reason) where it proposes none.

    words: the training script and its arguments, without a launcher. plan: the value of the key `plan`. num_ranks: of
    the layout.
    """
    asked = [*words, "overwrite_output_dir=false", f"plan={plan}", f"world_size={num_ranks}"]
    ended = subprocess.run([sys.executable, *asked], capture_output=True, text=True)
    if used := re.search(r"^use: (.*)$", ended.stdout, re.MULTILINE):
        proposed = [word for word in shlex.split(used[1]) if "=" in word and not word.startswith("-")]
        return [word for word in proposed if word not in asked and MASKED not in word], ""
    lines = ended.stderr.strip() or ended.stdout.strip() or f"the plan ended with code {ended.returncode}"
    return [], lines.splitlines()[-1]
