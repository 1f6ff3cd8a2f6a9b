"""Groups of real processes that are started once and run many cases.

    with WorkerGroup(2) as group:
        results = group.run(function, *args)      # one result a rank

`function` is a module-level function; it runs on every rank with an initialised gloo process group. An exception on any
rank is raised here with that rank's stack trace. When a rank does not answer after that, since it has ended or waits
for one that failed, new processes are started for the next case; so they are when cases have left many threads or much
memory behind.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from training.distributed.ranks import find_free_port

FORKSERVER = multiprocessing.get_context("forkserver")
# By the folder that pytest is started in: the forkserver of Python 3.11 does not take over sys.path.
GPU_WATCH = "tests.support.gpu_watch"
FORKSERVER.set_forkserver_preload(["tests.support.preload"])
_SECONDS_A_CASE = 600
_MOST_THREADS = 40  # of an idle worker; see `_run_in_group`
_MOST_MEMORY = 2**30  # bytes of an idle worker. It begins with half of that; hundreds of cases leave fragments


class WorkerError(AssertionError):
    pass


class WorkerGroup:
    def __init__(self, world_size: int, log_dir: Path) -> None:
        self.world_size, self._log_dir = world_size, log_dir
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; the results in the order of ranks."""
        self.send(function, *args, **kwargs)
        answers = [self._answer(rank) for rank in range(self.world_size)]
        failed = [f"rank {rank}:\n{answer}" for rank, (succeeded, answer) in enumerate(answers) if not succeeded]
        if self._lost or any(_is_worn_out(process.pid) for process in self._processes):
            self.close()
        if failed:
            raise WorkerError("\n".join(failed))
        return [answer for _, answer in answers]

    def send(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Starts a case, and waits for nothing."""
        from torch.distributed import TCPStore

        if not self._processes:
            self._start()
        self._failed = self._lost = False
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where the ranks meet
        for pipe in self._pipes:
            pipe.send((self._store.port, function, args, kwargs))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Waits for a rank; once one has failed the others are not waited for long, they may hang on it."""
        try:
            if self._pipes[rank].poll(5 if self._failed else _SECONDS_A_CASE):
                succeeded, answer = self._pipes[rank].recv()
                self._failed = self._failed or not succeeded
                return succeeded, answer
        except EOFError:
            pass
        self._failed = self._lost = True
        return False, f"no answer (ended or hanging); its output is in {self._log_dir}"

    def _start(self) -> None:
        for rank in range(self.world_size):
            ours, theirs = FORKSERVER.Pipe()
            log = self._log_dir / f"world{self.world_size}_rank{rank}.log"
            process = FORKSERVER.Process(target=_work, args=(theirs, rank, self.world_size, log))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # an idle worker ends when its pipe does
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
        self._processes, self._pipes = [], []


def _is_worn_out(pid: int) -> bool:
    return count_threads(pid) > _MOST_THREADS or psutil.Process(pid).memory_info().rss > _MOST_MEMORY


def count_threads(pid: int | str) -> int:
    """The number of threads of a process, by its id or "self"."""
    return len(os.listdir(f"/proc/{pid}/task"))


def free_port() -> int:
    return find_free_port()


def redirect_output(log: Path) -> None:
    """Redirects the output of this process to `log`."""
    with open(log, "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _work(pipe: Connection, rank: int, world_size: int, log: Path) -> None:
    redirect_output(log)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            port, function, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        os.environ["MASTER_PORT"] = str(port)
        try:
            pipe.send((True, _run_in_group(function, args, kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _run_in_group(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs in its own process group. Every gloo group keeps three threads, one of which wakes a hundred times a
    second, for as long as something holds the group; an engine makes several of them."""
    import torch.distributed as dist

    from training.distributed.process import join_process_group, leave_process_group

    join_process_group()
    try:
        return function(*args, **kwargs)
    finally:
        _drop_engines()
        if dist.is_initialized():
            leave_process_group()
        freeze_what_stays()


def freeze_what_stays() -> None:
    """Takes what is not garbage by now, such as imported modules and caches, out of Python's garbage collection. Each
    later one, as a run makes at its evaluations and saves, would look through it again."""
    gc.collect()
    gc.freeze()


def _drop_engines() -> None:
    """DeepSpeed's hooks on the output of a forward pass and on gradients refer to the engine, its optimizer and the
    parameters, which refer to them: circles that Python's garbage collection does not see, because a part of each is in
    the autograd graph (0.19.8)."""
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.module import PipelineModule
    from torch.nn import Parameter

    for found in gc.get_objects():
        # its type: a weak proxy of what is gone has one, and no class
        if issubclass(type(found), (DeepSpeedEngine, DeepSpeedOptimizer, PipelineModule, Parameter)):
            found.__dict__.clear()
    gc.collect()
