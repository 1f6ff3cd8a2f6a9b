"""Runs a training command until the run has finished, and restarts it from the newest complete checkpoint when it
fails.

    python scripts/supervise.py --output_dir outputs/llama_7b_pp4 --max_restarts 3 -- \\
        deepspeed trainer_base_ds_mp.py -cn llama_7b_pp4 train_file=data.jsonl

When it is restarted itself, such as by a scheduler, it continues the run, and ends if that has finished. Whether a run
has finished is read from `completed.json`, and why it has not from `ended.json`, since launchers hide the exit codes of
ranks. The command runs in its own process group; processes that remain after its launcher has ended are killed before
the next start, as are all of them when nothing in `output_dir` has changed for `--stuck_minutes`. SIGTERM, SIGINT and
SIGHUP are passed to its ranks: they save and exit, and nothing is restarted. Exit code: 0 when the run has finished,
128 + N after signal N, else that of `ended.json`, else the command's own (1 when that is 0). What does not train, such
as `evaluate_only=true`, is run once, and its exit code is the command's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import UserError, exit_with_message
from extension import check_not_removed, load_extensions, load_part
from masking import mask_text
from models.storage.steps import list_checkpoints
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.timeline import name_start

CONFIG_DIR = Path(__file__).resolve().parents[1] / "conf"

MARK = b"SUPERVISED_RUN"  # in the environment of each process that the command starts
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_LEAVE = 10  # for what is left of a run, between SIGTERM and SIGKILL
TRAINER = "trainer_base_ds_mp.py"
Starter = Callable[[Sequence[str]], list[str]]
"""Takes the command of a start and returns the one that is started. Raises UserError where none can be."""
WATCHED = ("metrics.jsonl", "checkpoints", "logs", "logs/*", "checkpoints/*", "hf*")


class Supervisor:
    """Runs one command at a time, and forwards signals to it."""

    def __init__(self, output_dir: Path, stuck_seconds: float | None) -> None:
        self._output_dir, self._stuck_seconds = output_dir, stuck_seconds
        self._seen, self._seen_at = self._look(), 0.0  # what was in output_dir, and since when, by this host's clock
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = b""
        self._record_before = self._read_record()
        self._ended_before = self._read_ended()
        self.signum = 0
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:  # under nohup
                continue
            signal.signal(signum, self._forward)

    @property
    def finished(self) -> bool:
        """Whether the run has finished since this object was made; the record of an earlier run does not count."""
        return self._read_record() not in (None, self._record_before)

    @property
    def keeps_record(self) -> bool:
        """Whether the record of an earlier run that had finished is still there."""
        return self._record_before is not None and self._read_record() == self._record_before

    def _read_record(self) -> int | None:
        """Returns when the completion record was written, in ns, or None where there is none."""
        try:
            return (self._output_dir / "completed.json").stat().st_mtime_ns
        except OSError:  # not there, or a disk that does not answer for now
            return None

    def _read_ended(self) -> tuple[int, dict[str, Any]]:
        """Returns when the record of an end before the run's was written, in ns, and what it says; 0 where there is
        none."""
        folder = RunFolder(self._output_dir)
        try:
            return folder.ended.stat().st_mtime_ns, folder.read_ended()
        except OSError:
            return 0, {}

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Runs the command and waits until all its processes have ended. Returns the exit code, which is that of the
        rank that ended first if it has left a record, and the same in words."""
        code, before = self._run(command), self._ended_before
        self._ended_before = self._read_ended()
        record = self._ended_before[1]
        if self._ended_before == before or not record:
            return code, f"code {code}"
        words = f"{record.get('reason')}, rank {record.get('rank')}: {record.get('message')}"
        return record["code"], f"code {record['code']} ({words})"

    def _run(self, command: Sequence[str]) -> int:
        self._seen, self._seen_at = self._look(), time.monotonic()
        self._mark = uuid.uuid4().hex.encode()
        self._process = subprocess.Popen(command, start_new_session=True, env={**os.environb, MARK: self._mark})
        if self.signum:  # it came while there was no process to pass it to
            self._forward(self.signum, None)
        while self._process.poll() is None:
            if self._stuck_seconds is not None and self._seconds_without_change() > self._stuck_seconds:
                say(
                    f"nothing in {self._output_dir} has changed for {self._stuck_seconds / 60:g} minutes: ending the "
                    "run"
                )
                break  # `_end_all` ends it
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._end_all()
        return self._process.wait()

    def _seconds_without_change(self) -> float:
        """Returns for how long `output_dir` has looked the same. Its times are compared with each other only: the clock
        of a shared file system is not this host's."""
        found = self._look()
        if found != self._seen:
            self._seen, self._seen_at = found, time.monotonic()
        return time.monotonic() - self._seen_at

    def _look(self) -> dict[str, tuple[int, int]]:
        """Returns size and time of each watched file and folder in `output_dir`."""
        found = {}
        for pattern in WATCHED:
            for path in self._output_dir.glob(pattern):
                with suppress(OSError):
                    found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found

    def _end_all(self) -> None:
        """Ends the remaining processes of the command, found by their mark, since ranks may have their own sessions
        (torchrun's do)."""
        for signum, seconds in ((signal.SIGTERM, SECONDS_TO_LEAVE), (signal.SIGKILL, SECONDS_TO_LEAVE)):
            deadline = time.monotonic() + seconds
            _signal(self._processes(), signum)
            while self._processes():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)

    def _forward(self, signum: int, frame: object) -> None:
        """Forwards a signal to the ranks alone if there are any: launchers kill theirs when they get one, before a save
        is complete. A rank's RANK is not this process's own, which all inherit in some containers."""
        self.signum = signum
        processes = self._processes()
        ranks = {
            pid
            for pid, (parent, environment) in processes.items()
            if _is_rank(environment) and not _is_rank(processes.get(parent, (0, {}))[1])
        }
        _signal(ranks or processes, signum)

    def _processes(self) -> dict[int, tuple[int, dict[bytes, bytes]]]:
        """Returns process id -> (parent, initial environment) of all living processes that the command has started."""
        if self._process is not None:
            self._process.poll()  # without a wait an ended child counts as alive
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


def _is_rank(environment: Mapping[bytes, bytes]) -> bool:
    """Returns whether a launcher has told the process its rank. Where this script itself was given RANK, as in some
    containers, every process has that, and only ranks have LOCAL_RANK."""
    name = b"RANK" if b"RANK" not in os.environb else b"LOCAL_RANK"
    return name in environment


def _signal(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def build_restart(command: Sequence[str], output_dir: Path) -> list[str]:
    """Returns the command with `resume=auto` if it continues the run in `output_dir`, and with
    `overwrite_output_dir=false`: what the first start has saved is never deleted. Of a key that is given twice the last
    value counts, and it does over that of the config."""
    return [*command, "overwrite_output_dir=false", *(["resume=auto"] if continues(command, output_dir) else [])]


def continues(command: Sequence[str], output_dir: Path) -> bool:
    """Returns whether a restart of the command continues a run in `output_dir`. A checkpoint that the command or its
    config names is where the run starts, until it has recorded that it did."""
    folder, start = RunFolder(output_dir), name_start(read_key(command, "resume"))
    if start is not None and folder.read_started().get("resume") != start:
        return False
    return bool(list_steps(output_dir) or folder.read_completed())


def list_steps(output_dir: Path) -> dict[str, int]:
    """Returns name -> inode of the checkpoints in `output_dir`, whole or not."""
    found = {}
    for path in list_checkpoints(RunFolder(output_dir).checkpoints):
        with suppress(OSError):
            found[path.name] = path.stat().st_ino
    return found


def _is_key(word: str, key: str) -> bool:
    return word.startswith((f"{key}=", f"+{key}=", f"++{key}="))


def overwrites(command: Sequence[str]) -> bool:
    """Returns whether the command deletes the checkpoints of an earlier run."""
    value = read_key(command, "overwrite_output_dir")
    return value is True or str(value).lower() in ("true", "1", "yes", "y", "on")


def trains(command: Sequence[str]) -> bool:
    """Returns whether the command is for a run that trains, as far as that can be known."""
    composed = compose_command(tuple(command))
    if composed is None:
        return True
    from training.config.schema import is_training  # imported already

    return is_training(composed)


def build_start(command: Sequence[str], output_dir: Path) -> list[str]:
    """Returns the command of the first start. It continues an existing run (the whole job may have been restarted)
    unless it, or its config, has `overwrite_output_dir`, or names a checkpoint that the run has not started from
    yet."""
    if overwrites(command) or not continues(command, output_dir):
        return list(command)
    return build_restart(command, output_dir)


def find_output_dir(command: Sequence[str]) -> Path | None:
    """Returns the `output_dir` of a training command; None where it cannot be known."""
    found = read_key(command, "output_dir")
    return None if found is None else Path(found)


def read_key(command: Sequence[str], key: str) -> Any:
    """Returns the value of a key in the composed config of a training command; of a command that does not start the
    trainer, or that the trainer would refuse, the last value that is given in it, as text. None where it has none."""
    composed = compose_command(tuple(command))
    if composed is not None:
        return OmegaConf.select(composed, key, throw_on_resolution_failure=False, throw_on_missing=False)
    given = [word.partition("=")[2].strip("'\"") for word in command if _is_key(word, key)]
    return given[-1] if given else None


@cache
def compose_command(command: tuple[str, ...]) -> DictConfig | None:
    """Returns the config that a training command composes; None where it cannot be known."""
    script = next((place for place, word in enumerate(command) if Path(word).name == TRAINER), None)
    if script is None:
        return None
    from training.cli.command_line import check_command_line, clean_arguments  # a second of imports
    from training.config.schema import register_schema

    register_schema()
    try:
        return check_command_line(clean_arguments(command[script:])[1:], CONFIG_DIR, "base")
    except (UserError, OmegaConfBaseException):  # the run reports it
        return None


def supervise(
    command: Sequence[str],
    output_dir: Path,
    max_restarts: int,
    stuck_minutes: float | None = None,
    starters: Sequence[Starter] = (),
) -> int:
    """Runs the command until it has finished or `max_restarts` is reached, and returns the exit code of this script.
    starters: change the command of each start, one after the other. Raises UserError as they do."""
    supervisor = Supervisor(output_dir, None if stuck_minutes is None else 60 * stuck_minutes)
    once = not trains(command)  # an evaluation has no end to wait for, and is of the checkpoint that it names
    attempt = list(command) if once else build_start(command, output_dir)
    before = list_steps(output_dir).items() if overwrites(command) else set()
    for restarts in range(max_restarts + 1):
        try:
            started = reduce(lambda words, start: start(words), starters, attempt)
        except UserError:
            if supervisor.signum:  # Ctrl-C ends the commands that a starter runs too
                return 128 + supervisor.signum
            raise
        if supervisor.signum:  # while a starter was at work
            return 128 + supervisor.signum
        code, how = supervisor.run(started)
        if supervisor.finished:
            return 0
        if supervisor.signum:
            return 128 + supervisor.signum
        if once:
            return code
        if before & list_steps(output_dir).items() or (overwrites(command) and supervisor.keeps_record):
            say(
                f"the run ended with {how} before it had deleted what the run before it has left; that is not deleted "
                "by a restart: start this again when the cause is fixed"
            )
            return code if code > 0 else 1
        if restarts < max_restarts:
            attempt = build_restart(command, output_dir)
            say(
                f"the run ended with {how} before it had finished; start {restarts + 2} of {max_restarts + 1}: "
                f"{' '.join(attempt)}"
            )
    say(f"the run has not finished after {max_restarts + 1} starts, the last with {how}; {output_dir}/logs says why")
    return code if code > 0 else 1


def say(text: str) -> None:
    try:
        print(f"supervise: {mask_text(text)}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more, and the run goes on
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def open_closed_streams() -> None:
    """Opens the null device in place of standard streams that this process was started without (`2>&-`): the next file
    that is opened would get the number of one, and what a run prints."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stderr = sys.stderr or open(os.devnull, "w")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of extensions. Raises UserError as `load_extensions` does, and argparse.ArgumentError for one
    that is there already."""
    for option, purpose in [item for extension in load_extensions() for item in extension.options.items()]:
        flag, _, value = option.partition(" ")
        if value:
            parser.add_argument(flag, metavar=value, help=purpose)
        else:
            parser.add_argument(flag, action="store_true", help=purpose)


def open_starters(values: argparse.Namespace) -> list[Starter]:
    """Returns what extensions change each start with. values: of the options. Raises UserError as they do."""
    places = [extension.starter for extension in load_extensions() if extension.starter]
    opened = (load_part(place)(values, say) for place in places)
    return [starter for starter in opened if starter is not None]


def main() -> None:
    open_closed_streams()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="that of the run")
    parser.add_argument("--max_restarts", type=int, default=3, metavar="N", help="0 or more; by default %(default)s")
    parser.add_argument(
        "--stuck_minutes",
        type=float,
        help="longer than a step, an evaluation, and a download at start take; all work that has a bar (tokenizing, "
        "scoring, a save, an export) counts as progress, and so does an upload; without it nothing counts as stuck",
    )
    parser.add_argument("command", nargs="+", help="the training command, after --")
    with exit_with_message():
        try:
            add_options(parser)
        except argparse.ArgumentError as error:
            parser.error(str(error))
        for word in parser.parse_known_args()[1]:
            check_not_removed(word, word)
    arguments = parser.parse_args()
    try:
        starters = open_starters(arguments)
    except UserError as error:
        parser.error(str(error))
    if arguments.max_restarts < 0:
        parser.error(f"--max_restarts {arguments.max_restarts}: at least 0")
    output_dir = find_output_dir(arguments.command)
    if output_dir is not None and output_dir.resolve() != arguments.output_dir.resolve():
        say(
            f"--output_dir {arguments.output_dir} is not the command's output_dir, {output_dir}; give the same one: "
            "the checkpoints and the end of the run are looked for there"
        )
        sys.exit(2)
    try:
        code = supervise(
            arguments.command, arguments.output_dir, arguments.max_restarts, arguments.stuck_minutes, starters
        )
    except UserError as error:
        sys.exit(f"supervise: {mask_text(str(error))}")
    except OSError as error:
        if error.filename != arguments.command[0]:
            raise
        say(f"{error.filename} cannot be started: {error.strerror}; give a command that is on PATH, or its path")
        code = 127
    sys.exit(code)


if __name__ == "__main__":
    main()
