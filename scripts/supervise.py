"""Runs a training command until the run has finished, and starts it again from the newest whole checkpoint when it
fails.

    python scripts/supervise.py --output_dir outputs/llama_7b_pp4 --max_restarts 3 -- \\
        deepspeed trainer_base_ds_mp.py -cn llama_7b_pp4 train_file=data.jsonl

    python scripts/supervise.py --output_dir outputs/X --elastic --hosts_command "cat hostfile" -- \\
        deepspeed --hostfile {hostfile} trainer_base_ds_mp.py -cn X global_batch_size=64 train_file=data.jsonl

With `--elastic` the command of `--hosts_command` is run before each start: it prints the hosts that are left, a line
"NAME slots=N" each. The first start takes the layout that is given. Where a later one, also one of this script started
again, finds another number of slots, `plan=search` chooses the layout, of as many ranks as can be used; the global
batch stays. In the command, {hostfile} is a file of the hosts that are used and {num_ranks} the number of ranks.

Started again itself, such as by a scheduler, it continues what is there, and ends when that has finished. Whether a
run has finished is read from `completed.json`, not from the launcher's exit code, which hides the ranks'. The
command gets a process group of its own; whatever is left of it when its launcher has ended is killed before the next
start, and so is all of it when nothing in `output_dir` has changed for `--stuck_minutes`. SIGTERM and SIGINT go on to
its ranks: they save and leave, and nothing is started again. Exit code: 0 when the run has finished, 128 + N after
signal N, else the command's own (1 when that is 0).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.elastic import Elastic, ElasticError

MARK = b"SUPERVISED_RUN"  # in the environment of each process that the command starts
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_LEAVE = 10  # for what is left of a run, between SIGTERM and SIGKILL
WATCHED = ("metrics.jsonl", "checkpoints", "logs", "logs/*", "checkpoints/*", "hf*")


class Supervisor:
    """One command at a time, and the signals that are for it."""

    def __init__(self, output_dir: Path, stuck_seconds: float | None) -> None:
        self._output_dir, self._stuck_seconds = output_dir, stuck_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = b""
        self._record_before = self._read_record()
        self.signum = 0
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._forward)

    @property
    def finished(self) -> bool:
        """Whether a run has ended, or has found itself ended, since; the record of an earlier one says nothing about
        this one."""
        return self._read_record() not in (None, self._record_before)

    def _read_record(self) -> int | None:
        """When it was written, in ns; None where there is none."""
        try:
            return (self._output_dir / "completed.json").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def run(self, command: Sequence[str]) -> int:
        """Starts the command and waits for its end, and for that of all its processes; its exit code."""
        started = time.time()
        self._mark = uuid.uuid4().hex.encode()
        self._process = subprocess.Popen(command, start_new_session=True, env={**os.environb, MARK: self._mark})
        while self._process.poll() is None:
            if (
                self._stuck_seconds is not None
                and time.time() - max(started, self._last_change()) > self._stuck_seconds
            ):
                say(
                    f"nothing in {self._output_dir} has changed for {self._stuck_seconds / 60:g} minutes: ending the "
                    "run"
                )
                break  # `_end_all` ends it
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._end_all()
        return self._process.wait()

    def _last_change(self) -> float:
        """Seconds since the epoch; 0 when there is nothing yet."""
        times = [0.0]
        for pattern in WATCHED:
            for path in self._output_dir.glob(pattern):
                with suppress(FileNotFoundError):
                    times.append(path.stat().st_mtime)
        return max(times)

    def _end_all(self) -> None:
        """Ends what is left of the command. A launcher's ranks may have sessions of their own (torchrun's do), so it
        goes by the mark."""
        for signum, pause_watchdog in ((signal.SIGTERM, SECONDS_TO_LEAVE), (signal.SIGKILL, SECONDS_TO_LEAVE)):
            deadline = time.monotonic() + pause_watchdog
            _signal(self._processes(), signum)
            while self._processes():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)

    def _forward(self, signum: int, frame: object) -> None:
        """To the ranks alone where there are any: launchers kill theirs when they are asked to end, and a save takes
        its time."""
        self.signum = signum
        processes = self._processes()
        ranks = {
            pid
            for pid, (parent, environment) in processes.items()
            if b"RANK" in environment and b"RANK" not in processes.get(parent, (0, {}))[1]
        }
        _signal(ranks or processes, signum)

    def _processes(self) -> dict[int, tuple[int, dict[bytes, bytes]]]:
        """Process id -> (parent, environment at its start), of all living processes that the command has started."""
        if self._process is not None:
            self._process.poll()  # a child that nobody has waited for counts as alive
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = dict(
                    entry.partition(b"=")[::2] for entry in (folder / "environ").read_bytes().split(b"\0")
                )
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended, or is not ours to read
                continue
            if environment.get(MARK) == self._mark and state != "Z":
                found[int(folder.name)] = (int(parent), environment)
        return found


def _signal(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def build_restart(command: Sequence[str], output_dir: Path) -> list[str]:
    """The command with `resume=latest` where there is something to resume; it never deletes what the first start has
    made."""
    kept = [word for word in command if not word.startswith(("resume=", "overwrite_output_dir="))]
    return [*kept, "resume=latest"] if (output_dir / "checkpoints" / "latest").is_file() else list(command)


def build_start(command: Sequence[str], output_dir: Path) -> list[str]:
    """The first start: the command, which continues what is there already (the whole job may have been started again)
    unless it says itself what is to become of it."""
    if any(word.startswith("resume=") or word == "overwrite_output_dir=true" for word in command):
        return list(command)
    return build_restart(command, output_dir)


def supervise(
    command: Sequence[str],
    output_dir: Path,
    max_restarts: int,
    stuck_minutes: float | None = None,
    elastic: Elastic | None = None,
) -> int:
    """The exit code of this script."""
    supervisor = Supervisor(output_dir, None if stuck_minutes is None else 60 * stuck_minutes)
    attempt = build_start(command, output_dir)
    for restarts in range(max_restarts + 1):
        try:
            code = supervisor.run(attempt if elastic is None else elastic.fit(attempt))
        except ElasticError as error:
            say(f"cannot start on the hosts that are left: {error}")
            return 1
        if supervisor.finished:
            return 0
        if supervisor.signum:
            return 128 + supervisor.signum
        if restarts < max_restarts:
            attempt = build_restart(command, output_dir)
            say(
                f"the run ended with code {code} before it had finished; start {restarts + 2} of {max_restarts + 1}: "
                f"{' '.join(attempt)}"
            )
    say(f"the run has not finished after {max_restarts + 1} starts; {output_dir}/logs says why")
    return code if code > 0 else 1


def say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="that of the run")
    parser.add_argument("--max_restarts", type=int, default=3)
    parser.add_argument(
        "--stuck_minutes",
        type=float,
        help="longer than a step, an evaluation and a save take; without it nothing counts as stuck",
    )
    parser.add_argument("--elastic", action="store_true", help="continue on the hosts that are left")
    parser.add_argument("--hosts_command", help="with --elastic: prints the hosts that are left, 'NAME slots=N' a line")
    parser.add_argument("command", nargs="+", help="the training command, after --")
    arguments = parser.parse_args()
    if arguments.elastic != (arguments.hosts_command is not None):
        parser.error("--elastic and --hosts_command go together: the hosts that are left are what the command prints")
    elastic = Elastic(arguments.hosts_command, arguments.output_dir, say) if arguments.elastic else None
    sys.exit(
        supervise(arguments.command, arguments.output_dir, arguments.max_restarts, arguments.stuck_minutes, elastic)
    )


if __name__ == "__main__":
    main()
