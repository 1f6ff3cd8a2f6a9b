"""This process: its device and cores, its group with the others, and where what libraries print goes."""

from __future__ import annotations

import logging
import logging.handlers
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

import console
from training.distributed import host_share
from training.distributed.ranks import Ranks

T = TypeVar("T")
# A process that joins without a GPU builds and loads DeepSpeed's op for `inference_all_reduce`, which nothing here
# calls: 25 s of compiling once, and a rank that is killed meanwhile (as the others are when one finds a mistake) leaves
# a lock on which every later run hangs silently (torch's FileBaton; seen with deepspeed 0.19.8). No op counts as
# compatible, so none is built.
deepspeed.ops.__compatible_ops__ = {}


_SECONDS_OF_SILENCE = 120.0
_SILENCE = (
    "the GPUs have been silent since they connected, for 2 minutes; if that lasts, end the run and try it with "
    "NCCL_P2P_DISABLE=1 (docs/errors.md, GPUs that never answer)"
)


def has_accelerator() -> bool:
    return get_accelerator().device_name() != "cpu"


def current_device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def describe_device() -> str:
    """What the driver calls the accelerator; "cpu" without one."""
    if not has_accelerator():
        return "cpu"
    return torch.get_device_module(get_accelerator().device_name()).get_device_name()


def find_device(ranks: Ranks) -> int | None:
    """The number of this rank's card, or None without an accelerator. Raises UserError when there are too few."""
    if not has_accelerator():
        return None
    accelerator = get_accelerator()
    may_share = host_share.may_share_gpus(accelerator.visible_devices_envs())
    return host_share.choose_gpu(ranks.local_rank, ranks.local_size, accelerator.device_count(), may_share)


def take_device(ranks: Ranks) -> None:
    """This rank's card, and its share of the host's cores.

    Threads without a share fight over the cores (the deepspeed launcher sets nothing) or leave them idle (torchrun sets
    one a rank), on a card too, where the optimizer runs on the host with offload_optimizer=cpu. Raises UserError when
    there are fewer cards than ranks.
    """
    card = find_device(ranks)
    if card is not None:
        get_accelerator().set_device(card)
        os.environ["LOCAL_RANK"] = str(card)  # what DeepSpeed's engine, module and process group take the device from
    if host_share.has_chosen_threads():
        return
    cores, cores_per_task = sorted(os.sched_getaffinity(0)), host_share.read_cores_per_task()
    share = host_share.count_threads(len(cores), ranks.local_size, cores_per_task)
    torch.set_num_threads(share)
    # A rank with a card is not pinned: cores in the order of ranks may lie at another socket than its card, and all
    # that it starts later (NCCL's proxies, loaders, the thread that pins) would be held to its own threads' cores.
    if card is None and cores_per_task is None and share * ranks.local_size <= len(cores):
        os.sched_setaffinity(0, cores[ranks.local_rank * share : (ranks.local_rank + 1) * share])


def synchronize() -> None:
    """Waits until the accelerator has done all that it was given; nothing without one."""
    get_accelerator().synchronize()


def choose_interface() -> None:
    """Tells gloo the network interface that leads to the main host. By default it takes the one that this host's
    name resolves to, which is often the loopback, and then no other host can reach it. A name that someone has set is
    kept.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            )  # sends nothing: it asks for the route
        except OSError:
            return
        address = probe.getsockname()[0]
    if not address.startswith("127."):
        for name, addresses in psutil.net_if_addrs().items():
            if address in (entry.address for entry in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def join_process_group(timeout: timedelta | None = None) -> None:
    """Waits for the other ranks. timeout: of its collectives, torch's own by default."""
    deepspeed.init_distributed(**({} if timeout is None else {"timeout": timeout}))
    with _hint_at_silence():
        dist.barrier()


@contextmanager
def _hint_at_silence() -> Iterator[None]:
    """Says what to try when the first message between cards does not arrive. All ranks are there by then: DeepSpeed
    binds their cards, with which NCCL connects all of them before `init_distributed` returns (0.19.8, comm/torch.py).
    """
    hint = threading.Timer(_SECONDS_OF_SILENCE, console.say, [_SILENCE])
    hint.daemon = True
    if has_accelerator() and dist.get_rank() == 0:
        hint.start()
    try:
        yield
    finally:
        hint.cancel()


def make_host_group() -> dist.ProcessGroup | None:
    """A group of all ranks for what is in the host's memory; all of them call it. None: the default group is one."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def leave_process_group() -> None:
    comm.destroy_process_group()


def broadcast_from_main(compute: Callable[[], T], ranks: Ranks) -> T:
    """What rank 0 computes, on every rank: numbers on which all must agree, or they hang."""
    computed: list[Any] = [compute() if ranks.is_main else None]
    dist.broadcast_object_list(computed, src=0)
    return computed[0]


def gather_hosts() -> list[str]:
    """The name of each rank's host."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


_OWN_HANDLERS = ("DeepSpeed", "transformers", "datasets")  # loggers that do not leave it to the root


def buffer_library_logs() -> None:
    """From now on nothing that libraries log is to be seen, until `redirect_output_to_log` says where it goes."""
    held = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    for name in (None, *_OWN_HANDLERS):
        logging.getLogger(name).handlers = [held] if name is None else []
        logging.getLogger(name).propagate = True
    logging.captureWarnings(True)


def redirect_output_to_log(file: Path, ranks: Ranks) -> None:
    """All that libraries print, what was buffered included, goes to this rank's log file. Their warnings are also shown
    on the screen, each once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    console.redirect_to_console(file)
    sys.stdout = open(file, "a", buffering=1)
    root = logging.getLogger()
    held, root.handlers = root.handlers, [logging.StreamHandler(sys.stdout)]
    if ranks.is_main:
        root.addHandler(_WarningEcho(file))
    for handler in held:
        if isinstance(handler, logging.handlers.MemoryHandler):
            for record in handler.buffer:
                root.handle(record)


class _WarningEcho(logging.Handler):
    """Shows a library's warnings, without a stack trace and each text once. Those about code that will change are for
    developers."""

    def __init__(self, log: Path) -> None:
        super().__init__(logging.WARNING)
        self._log, self._shown = log, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        source, text = record.name.partition(".")[0], record.getMessage().strip().partition("\n")[0]
        if record.name == "py.warnings":  # "FILE:LINE: CATEGORY: TEXT"
            source, _, text = text.partition(": ")[2].partition(": ")
        if text not in self._shown and source not in ("DeprecationWarning", "FutureWarning"):
            self._shown.add(text)
            console.say(f"warning ({source}): {text}; more in {self._log}")
