"""Starts the real command through a real launcher, and looks after what is left of it."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from support.hosts import TwoHosts
from support.workers import FORKSERVER, free_port, redirect_output

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MARK = "PIPELINE_TEST_LAUNCH"  # in the environment of each process of a launch
PORT_OF_HOSTS = "29517"  # the hosts have all ports to themselves
SECONDS = 600  # after which a launch counts as hanging: 15 on two idle cores, many times that on busy ones


@dataclass(frozen=True)
class Ended:
    code: int
    output: str  # stdout and stderr as they came
    seconds_after_error: float  # from our first error message to the launcher's end; 0 without one
    left_alive: list[int]  # processes that outlive the launcher

    def errors(self) -> list[str]:
        """The lines that our own commands say."""
        return [line for line in self.output.splitlines() if line.startswith("error")]


def run_deepspeed(
    arguments: Sequence[str],
    cwd: Path,
    num_gpus: int = 2,
    while_running: Callable[[Launch], None] | None = None,
    root: Path = ROOT,
) -> Ended:
    """root: the project, or a copy of it."""
    launcher = ["deepspeed", "--num_gpus", str(num_gpus), "--master_port", str(free_port())]
    return run([*launcher, str(root / "trainer_base_ds_mp.py"), *arguments], cwd, while_running)


def run_supervised(
    output_dir: Path, arguments: Sequence[str], cwd: Path, while_running: Callable[[Launch], None] | None = None
) -> Ended:
    launcher = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(ROOT / "trainer_base_ds_mp.py")]
    supervisor = [sys.executable, str(ROOT / "scripts" / "supervise.py"), "--output_dir", str(output_dir), "--"]
    return run([*supervisor, *launcher, *arguments], cwd, while_running)


def run_torchrun(
    arguments: Sequence[str],
    cwd: Path,
    nproc_per_node: int = 2,
    while_running: Callable[[Launch], None] | None = None,
) -> Ended:
    launcher = [
        "torchrun",
        "--nproc_per_node",
        str(nproc_per_node),
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(free_port()),
    ]
    return run([*launcher, str(ROOT / "trainer_base_ds_mp.py"), *arguments], cwd, while_running)


SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[next(place for place, word in enumerate(sys.argv) if place and not word.startswith("--")):]
tasks = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


def _restore_signals() -> None:
    """Restore the signals that a process started by nohup, or in the background, ignores."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def run_slurm(arguments: Sequence[str], cwd: Path, while_running: Callable[[Launch], None] | None = None) -> Ended:
    """scripts/slurm.sh over a stand-in for srun, which starts two tasks and returns the highest of their codes."""
    stand_ins = cwd / "bin"
    stand_ins.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    variables = {
        "PATH": f"{stand_ins}:{BIN}:{os.environ['PATH']}", "MASTER_PORT": free_port(), "SLURM_SUBMIT_DIR": ROOT,
        "SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1,
        "SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_JOB_ID": 1,
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in variables.items()]
    return run(["env", *words, "bash", str(ROOT / "scripts" / "slurm.sh"), *arguments], cwd, while_running)


def run_alone(
    arguments: Sequence[str],
    cwd: Path,
    root: Path = ROOT,
    while_running: Callable[[Launch], None] | None = None,
) -> Ended:
    """root: the project, or a copy of it."""
    return run([sys.executable, str(root / "trainer_base_ds_mp.py"), *arguments], cwd, while_running)


def run_forked(arguments: Sequence[str], cwd: Path) -> Ended:
    """Does what `run_alone` does in a fork of a process that has already imported what the trainer needs."""
    log = cwd / "launch.log"
    process = FORKSERVER.Process(target=_run_trainer, args=(list(arguments), cwd, log))
    process.start()
    process.join(SECONDS)
    alive = process.is_alive()
    process.kill()
    assert not alive, f"hangs: ...{log.read_text()[-2000:]}"
    return Ended(process.exitcode, log.read_text(), 0.0, [])


def _run_trainer(arguments: list[str], cwd: Path, log: Path) -> None:
    redirect_output(log)
    torch.set_num_threads(1)
    os.chdir(cwd)
    sys.argv = [str(ROOT / "trainer_base_ds_mp.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_code(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `python -c code` as a fork of a process that has already imported torch and DeepSpeed."""
    streams = [cwd / name for name in ("stdout.txt", "stderr.txt")]
    process = FORKSERVER.Process(target=_run_code, args=(code, cwd, streams))
    process.start()
    process.join(SECONDS)
    alive = process.is_alive()
    process.kill()
    output, errors = (stream.read_text() for stream in streams)
    assert not alive, f"hangs: ...{errors[-2000:]}"
    return subprocess.CompletedProcess(code, process.exitcode, output, errors)


def _run_code(code: str, cwd: Path, streams: Sequence[Path]) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    torch.set_num_threads(1)
    os.chdir(cwd)
    exec(code, {"__name__": "__main__"})


def list_launcher_words(hosts: TwoHosts, slots: int, folder: Path) -> list[str]:
    """The deepspeed launcher for both hosts, with `slots` ranks on each; "{rank}" is the host's number."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{name} slots={slots}\n" for name in hosts.names))
    meeting = ["--master_addr", hosts.addresses[0], "--master_port", PORT_OF_HOSTS]
    return ["deepspeed", "--hostfile", str(hostfile), "--no_ssh", "--node_rank", "{rank}", *meeting]


def run_on_hosts(
    hosts: TwoHosts,
    launcher: Sequence[str],
    arguments: Sequence[str],
    cwd: Path,
    while_running: Callable[[Launch], None] | None = None,
) -> list[Ended]:
    """The same trainer started on both hosts, "{rank}" in the launcher's words being the host's number."""
    launches: list[Launch] = []
    try:
        for host in (0, 1):
            folder = cwd / f"host{host}"
            folder.mkdir()
            words = [word.replace("{rank}", str(host)) for word in launcher]
            launches.append(
                Launch(hosts.command(host, [*words, str(ROOT / "trainer_base_ds_mp.py"), *arguments]), folder)
            )
        if while_running is not None:
            while_running(launches[0])
        return [launch.end() for launch in launches]
    finally:
        for launch in launches:
            launch.kill()


class Launch:
    """A launcher and its ranks, while they run."""

    def __init__(self, command: Sequence[str], cwd: Path) -> None:
        self.mark, self.log = uuid.uuid4().hex, cwd / "launch.log"
        launched = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        }
        environment = {
            **launched,
            MARK: self.mark,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.started = time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_restore_signals,
            )

    def processes(self) -> dict[int, str]:
        """Process id -> command line, of all that is alive."""
        alive = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                    and " Z " not in (folder / "stat").read_text()
                ):
                    alive[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it ended while we looked, or is not ours
                pass
        return alive

    def wait_for(self, text: str) -> None:
        """Until the output holds `text`."""
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() - self.started < SECONDS, self.log.read_text()
            time.sleep(0.05)

    def wait_until_gone(self, seconds: float = SECONDS) -> None:
        """Until no process is alive: a launcher may end before its ranks do."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.processes():
            assert time.monotonic() < deadline, f"left: {self.processes()}"
            time.sleep(0.1)

    def rank(self, local_rank: int) -> int:
        """The process id of a rank that the deepspeed launcher started."""
        (pid,) = (pid for pid, command in self.processes().items() if f"--local_rank={local_rank} " in command)
        return pid

    def end(self) -> Ended:
        """Waits for the launcher; whatever is left is ended here."""
        first_error = None
        while self.process.poll() is None:
            now = time.monotonic()
            assert now - self.started < SECONDS, f"hangs: ...{self.log.read_text()[-2000:]}"
            if first_error is None and "\nerror" in self.log.read_text():
                first_error = now
            time.sleep(0.1)
        seconds = time.monotonic() - first_error if first_error else 0.0
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)  # what is about to end, ends
        return Ended(self.process.returncode, self.log.read_text(), seconds, self.kill())

    def kill(self) -> list[int]:
        left_alive = sorted(self.processes())
        for pid in left_alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return left_alive


def run(command: Sequence[str], cwd: Path, while_running: Callable[[Launch], None] | None = None) -> Ended:
    launch = Launch(command, cwd)
    try:
        if while_running is not None:
            while_running(launch)
        return launch.end()
    finally:
        launch.kill()
