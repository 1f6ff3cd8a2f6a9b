"""The command that trains with a layout of the search, as it is typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from extensions.search.space import Candidate
from training.config.schema import NOT_GIVEN
from training.plan_command.layout_keys import change_keys

OF_A_PLAN = ("plan", "world_size")  # keys that a run does not read
GIVEN_BY_THE_USER = ("model_name_or_path", "train_file", "output_dir")  # keys without a default


def build_command(candidate: Candidate, words: Sequence[str]) -> list[str]:
    """Return the words of the command. words: the arguments of the search's own command."""
    ranks = candidate.plan.layout.world_size
    launcher = ["--num_gpus", str(ranks)] if ranks <= _count_slots(candidate) else ["--hostfile", "hostfile"]
    kept = [word for word in words if word.partition("=")[0] not in OF_A_PLAN]
    return ["deepspeed", *launcher, "trainer_base_ds_mp.py", *change_keys(kept, candidate.overrides)]


def render_command(command: Sequence[str], width: int | None) -> str:
    """Return the command as text; where it is wider than `width` characters, in lines that end in a backslash, so that
    it can be pasted."""
    lines = [""]
    for word in map(shlex.quote, command):
        if width is not None and lines[-1] and len(f"{lines[-1]} {word} \\") > width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def list_needs(candidate: Candidate) -> Iterator[str]:
    """Yield what the command does not say and a run needs: keys that nothing gives, and the file of its hosts."""
    if missing := [key for key in GIVEN_BY_THE_USER if getattr(candidate.keys, key) == NOT_GIVEN]:
        yield f"the command needs {' '.join(f'{key}=...' for key in missing)} too"
    ranks, slots = candidate.plan.layout.world_size, _count_slots(candidate)
    if ranks > slots:
        yield (
            f"hostfile has a line 'NAME slots={slots}' for each host, {ranks} slots in all; Slurm and torchrun: "
            "docs/several_hosts.md"
        )


def _count_slots(candidate: Candidate) -> int:
    return candidate.plan.run.hardware.cards_per_node
