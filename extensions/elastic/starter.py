"""`scripts/supervise.py --elastic`: fits a command to the remaining hosts, by `plan=search`.

    python scripts/supervise.py --output_dir outputs/X --elastic --hosts_command "cat hostfile" -- \\
        deepspeed --hostfile {hostfile} trainer_base_ds_mp.py -cn X global_batch_size=64 train_file=data.jsonl

The command of `--hosts_command` is run before each start: it prints the remaining hosts, one line "NAME slots=N" each.
The first start takes the given layout. If a later one, also after a restart of the supervisor, finds another number of
slots, `plan=search` chooses a layout with as many ranks as can be used; the global batch stays. In the command,
{hostfile} is a file of the hosts that are used and {num_ranks} the number of ranks.
"""

from __future__ import annotations

import re
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from console import pluralize
from errors import UserError
from filesystem import write_atomically
from training.cli.plan_process import ask_plan
from training.plan_command.layout_keys import change_keys

FIRST_SLOTS = "first_slots"  # in output_dir
Starter = Callable[[Sequence[str]], list[str]]


def open_elastic(values: Namespace, say: Callable[[str], None]) -> Starter | None:
    """Returns what fits each start to the remaining hosts; None without `--elastic`. values: of the options. Raises
    UserError."""
    if values.elastic != (values.hosts_command is not None):
        raise UserError(
            "--elastic and --hosts_command go together: the hosts that are left are what the command prints"
        )
    return Elastic(values.hosts_command, values.output_dir, say).fit if values.elastic else None


class Elastic:
    """Fits the command to the remaining hosts. hosts_command: a shell command that prints them. say: prints a line to
    the user."""

    def __init__(self, hosts_command: str, output_dir: Path, say: Callable[[str], None]) -> None:
        self._hosts_command, self._output_dir, self._say = hosts_command, output_dir, say
        self._num_slots: int | None = None  # of the first start

    def fit(self, command: Sequence[str]) -> list[str]:
        """Returns the command for the remaining hosts. Raises UserError when there are none, or no layout fits them."""
        try:
            return self._fit(command)
        except UserError as error:
            raise UserError(f"cannot start on the hosts that are left: {error}") from None

    def _fit(self, command: Sequence[str]) -> list[str]:
        hosts = read_hosts(self._hosts_command)
        num_slots = sum(hosts.values())
        if self._num_slots is None:
            self._num_slots = self._recall_slots(command, num_slots)
        if self._num_slots == num_slots:
            return self._fill_in(command, hosts, num_slots)
        batched, reason = change_keys(command, self._find_batch(command, self._num_slots)), ""
        for num_ranks in range(num_slots, 0, -1):
            keys, reason = search_layout(batched, num_ranks)
            if not reason:
                changed = change_keys(batched, keys)
                self._say(
                    f"slots left: {num_slots} of {self._num_slots} ({', '.join(hosts)}); used: {num_ranks}, with "
                    f"{' '.join(word for word in changed if word not in command)}"
                )
                return self._fill_in(changed, hosts, num_ranks)
        raise UserError(f"no layout fits the slots that are left, {num_slots} of {self._num_slots}: {reason}")

    def _recall_slots(self, command: Sequence[str], num_slots: int) -> int:
        """Returns the slots of the run's first start, read from `output_dir` if this script was restarted since."""
        file = self._output_dir / FIRST_SLOTS
        continues = any(word.lstrip("+").startswith("resume=") for word in command)
        if continues and file.is_file():
            return _read_slots(file)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"{num_slots}\n")
        return num_slots

    def _find_batch(self, command: Sequence[str], num_slots: int) -> list[str]:
        """Returns the keys that keep the global batch of the first start, which may depend on its number of ranks."""
        keys, reason = search_layout(command, num_slots)
        if reason:
            raise UserError(f"the global batch of the first start, on {num_slots} slots, is not known: {reason}")
        batch = [key for key in keys if key.startswith("global_batch_size=")]  # none where the command itself gives it
        return [*batch, "micro_batch_size=1", "gradient_accumulation_steps=null"]

    def _fill_in(self, command: Sequence[str], hosts: Mapping[str, int], num_ranks: int) -> list[str]:
        lines, left = [], num_ranks
        for name, slots in hosts.items():
            if left:
                lines.append(f"{name} slots={min(slots, left)}\n")
            left -= min(slots, left)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        hostfile = self._output_dir / "hostfile"
        hostfile.write_text("".join(lines))
        return [word.replace("{hostfile}", str(hostfile)).replace("{num_ranks}", str(num_ranks)) for word in command]


def _read_slots(file: Path) -> int:
    try:
        return int(file.read_text())
    except ValueError:
        raise UserError(
            f"{file} does not hold the number of slots of the first start; write it there, or delete the file to start "
            "from the slots that are left"
        ) from None


def read_hosts(hosts_command: str) -> dict[str, int]:
    """Returns host -> slots, as the command prints them. Raises UserError when it fails or prints none."""
    ended = subprocess.run(hosts_command, shell=True, capture_output=True, text=True)
    found = re.findall(r"^\s*([^\s#]+)\s+slots=(\d+)", ended.stdout, re.MULTILINE)
    hosts = {name: int(slots) for name, slots in found if int(slots)}
    if ended.returncode or not hosts:
        raise UserError(
            f"--hosts_command '{hosts_command}' ended with code {ended.returncode} and named "
            f"{pluralize(len(hosts), 'host')}; it "
            "prints a line 'NAME slots=N' for each host that is left"
        )
    return hosts


def search_layout(command: Sequence[str], num_ranks: int) -> tuple[list[str], str]:
    """Returns the keys in which the fastest layout for `num_ranks` differs from the command, and "", or no keys and the
    reason."""
    script = next((place for place, word in enumerate(command) if word.endswith(".py")), None)
    if script is None:
        raise UserError("--elastic: the command names no .py file whose plan could be asked for")
    return ask_plan(command[script:], "search", num_ranks)
