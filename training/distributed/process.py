"""This process: its device and cores, its process group, and where the output of libraries goes."""

from __future__ import annotations

import logging
import logging.handlers
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from models.layers.fused_kernels import find_triton_obstacle
from training.distributed import host_share
from training.distributed.ranks import Ranks
from training.distributed.rendezvous import choose_init_method

T = TypeVar("T")
# A process that joins without a GPU builds and loads DeepSpeed's op for `inference_all_reduce`, which nothing here
# calls: 25 s of compiling once, and a rank that is killed meanwhile (as the others are when one finds a mistake) leaves
# a lock on which every later run hangs silently (torch's FileBaton; seen with deepspeed 0.19.8). With no op declared
# compatible, none is built.
deepspeed.ops.__compatible_ops__ = {}


_SECONDS_OF_SILENCE = 120.0
_SILENCE = (
    "the GPUs have been silent since they connected, for 2 minutes; if that lasts, end the run and try it with "
    "NCCL_P2P_DISABLE=1 (docs/errors.md, GPUs that never answer)"
)

_SECONDS_BETWEEN_TOUCHES = 5.0
_OWN_TIMEOUT = "own_timeout"  # the description of a group whose timeout nobody changes


def has_accelerator() -> bool:
    """Returns whether DeepSpeed runs on an accelerator instead of the CPU."""
    return get_accelerator().device_name() != "cpu"


def has_triton() -> bool:
    """Returns whether this process has a GPU, and triton can make kernels for it."""
    return get_accelerator().device_name() == "cuda" and find_triton_obstacle() is None


def current_device() -> torch.device:
    """Return this process's device."""
    return torch.device(get_accelerator().current_device_name())


def describe_device() -> str:
    """Return the driver's name for the accelerator; "cpu" without one."""
    if not has_accelerator():
        return "cpu"
    return torch.get_device_module(get_accelerator().device_name()).get_device_name()


def measure_device_memory() -> int | None:
    """Return the bytes of the accelerator's memory; None without one."""
    if not has_accelerator():
        return None
    return get_accelerator().total_memory()


def find_device(ranks: Ranks) -> int | None:
    """Return the number of this rank's GPU; None without an accelerator. Raises UserError when there are too few."""
    if not has_accelerator():
        return None
    accelerator = get_accelerator()
    may_share = host_share.may_share_gpus(accelerator.visible_devices_envs())
    return host_share.choose_gpu(ranks.local_rank, ranks.local_size, accelerator.device_count(), may_share)


def take_device(ranks: Ranks) -> None:
    """Set this rank's GPU, and its threads to its share of the host's cores.

    Otherwise the ranks' threads compete for the cores (the deepspeed launcher sets nothing) or leave them idle
    (torchrun sets one per rank). It matters on GPUs too: with offload_optimizer=cpu the optimizer runs on the host.
    Also makes its sums exact (`sum_in_fp32`). Raises UserError when there are fewer GPUs than ranks.
    """
    sum_in_fp32()
    device = find_device(ranks)
    if device is not None:
        get_accelerator().set_device(device)
        os.environ["LOCAL_RANK"] = str(device)  # DeepSpeed's engine, module and process group read the device from it
    if host_share.has_chosen_threads():
        return
    cores, cores_per_task = sorted(os.sched_getaffinity(0)), host_share.read_cores_per_task()
    share = host_share.count_threads(len(cores), ranks.local_size, cores_per_task)
    torch.set_num_threads(share)
    # A rank with a GPU is not pinned: cores in the order of ranks may be on another socket than its GPU, and everything
    # that it starts later (NCCL's proxies, loaders, the pinning thread) would be confined to its own threads' cores.
    if device is None and cores_per_task is None and share * ranks.local_size <= len(cores):
        os.sched_setaffinity(0, cores[ranks.local_rank * share : (ranks.local_rank + 1) * share])


def sum_in_fp32() -> None:
    """Make matrix products of bf16 and fp16 sum in fp32 on a GPU, to the end: by default cuBLAS may add up the parts of
    a product in the dtype of its result (torch 2.13, `allow_bf16_reduced_precision_reduction`)."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def synchronize() -> None:
    """Wait until the accelerator has finished all queued work; does nothing without one."""
    get_accelerator().synchronize()


def choose_interface() -> None:
    """Set gloo's network interface to the one with a route to the main host: the loopback where all ranks are on one.
    By default gloo uses the one that this host's name resolves to, which other hosts may not reach, or may although no
    rank is there. A user's setting is kept."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing: UDP connect only looks up the route
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError:
            return
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def join_process_group(timeout: timedelta | None = None) -> None:
    """Initialize the process group, and wait for the other ranks. timeout: of its collectives; torch's by default.

    Raises UserError when rank 0 finds its port in use.
    """
    init_method = choose_init_method()
    choose_interface()
    # A rank uses several communicators at once (stages, replicas, experts): only with this does NCCL (2.26 and later)
    # promise that kernels of different ones, launched in the same order on all ranks, do not wait for each other
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    deepspeed.init_distributed(init_method=init_method, **({} if timeout is None else {"timeout": timeout}))
    with _hint_at_silence():
        dist.barrier()


@contextmanager
def _hint_at_silence() -> Iterator[None]:
    """Print what to try when the first message between GPUs does not arrive. All ranks are present by then: DeepSpeed
    binds their GPUs, so NCCL connects all of them before `init_distributed` returns (0.19.8, comm/torch.py)."""
    hint = threading.Timer(_SECONDS_OF_SILENCE, console.say, [_SILENCE])
    hint.daemon = True
    if has_accelerator() and dist.get_rank() == 0:
        hint.start()
    try:
        yield
    finally:
        hint.cancel()


def make_host_group() -> dist.ProcessGroup | None:
    """Create a group of all ranks for tensors in host memory; all of them call it. None where the default group can be
    used."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def make_group_with_timeout(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks, all of which call it. It keeps its timeout: `limit_collectives` leaves it alone."""
    return dist.new_group(backend="gloo", timeout=timeout, group_desc=_OWN_TIMEOUT)


def limit_collectives(timeout: timedelta) -> None:
    """Sets the timeout of the default group and of all that were made without one, by DeepSpeed for example."""
    for group in list(dist.distributed_c10d._world.pg_map):  # torch has no public way (2.13.0)
        if group.group_desc != _OWN_TIMEOUT:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def leave_process_group() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        comm.destroy_process_group()


def broadcast_from_main(compute: Callable[[], T], ranks: Ranks) -> T:
    """Return rank 0's result on every rank: for values on which all ranks must agree, or they would hang."""
    computed: list[Any] = [compute() if ranks.is_main else None]
    dist.broadcast_object_list(computed, src=0)
    return computed[0]


def gather_hosts() -> list[str]:
    """Return the host name of each rank."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


_OWN_HANDLERS = ("DeepSpeed", "transformers", "datasets")  # loggers that do not propagate to the root's handlers


def buffer_library_logs() -> None:
    """Hold back everything that libraries log, until `redirect_output_to_log` sets its destination."""
    held = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    for name in (None, *_OWN_HANDLERS):
        logging.getLogger(name).handlers = [held] if name is None else []
        logging.getLogger(name).propagate = True
    logging.captureWarnings(True)


def redirect_output_to_log(file: Path, ranks: Ranks) -> None:
    """Send everything that libraries print, including buffered logs, to this rank's log file. On the main rank their
    warnings are also shown on the screen, each once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    console.redirect_to_console(file)
    sys.stdout = console.open_unfailing(file)
    root = logging.getLogger()
    held, root.handlers = root.handlers, [logging.StreamHandler(sys.stdout)]
    if ranks.is_main:
        root.addHandler(_WarningEcho(file))
    for handler in held:
        if isinstance(handler, logging.handlers.MemoryHandler):
            for record in handler.buffer:
                root.handle(record)


@contextmanager
def touching(log: Path) -> Iterator[None]:
    """Within this context, any progress of this process sets the time of its log file, every few seconds: work that
    writes elsewhere is seen in the run's folder too, by `scripts/supervise.py`."""
    last = -math.inf

    def touch() -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _SECONDS_BETWEEN_TOUCHES:
            last = now
            with suppress(OSError):
                os.utime(log)

    with console.listen_to_progress(touch):
        yield


class _WarningEcho(logging.Handler):
    """Shows a library's warnings on the screen, without a stack trace and each text once. Deprecation and future
    warnings are for developers, and omitted."""

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
