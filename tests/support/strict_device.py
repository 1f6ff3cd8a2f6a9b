"""A device that is not the CPU, though its tensors are in the host's memory: what would fail on a GPU fails on it, and
what would make the host wait for a GPU is recorded.

An operation on one of its tensors and one of the host's raises. Its operations are the CPU's, called one by one through
`__torch_dispatch__`, so modules, autograd, checkpointing, optimizers and DeepSpeed's engine run on it as they are, and
collectives go through gloo. It is torch's device for other vendors' backends, `PrivateUse1`, which a process can set
up once: a process that has called `start_recording` is of no use to other tests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import library
from torch._library.custom_ops import OPDEFS
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "strict"
# What has a size or a value that the host must know: it waits until the device has come that far.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "equal")
# Operators of this project whose results are in part the host's: they wait for them themselves.
_TAKEN_APART = ("experts::exchange_counts", "experts::exchange_rows")


@dataclass(frozen=True)
class Wait:
    """An operation that the host would wait for. unit: the engine's current instruction, or empty."""

    operation: str
    unit: str
    place: str


@dataclass(frozen=True)
class Collective:
    operation: str
    carries_host_tensor: bool
    on_host_group: bool
    place: str


@dataclass
class Record:
    waits: list[Wait] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    unit: str = ""


RECORD = Record()


class StrictTensor(torch.Tensor):
    """held: the CPU tensor whose memory it is."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> StrictTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"StrictTensor({self.held})"

    @property
    def data(self) -> StrictTensor:
        return self.detach()

    @data.setter
    def data(self, value: StrictTensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.held = value.held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(function, args, kwargs or {})


def _execute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function.name() in _TAKEN_APART:
        with enable_reentrant_dispatch(), torch.no_grad():
            return OPDEFS[function.name()]._init_fn(*args, **kwargs)
    name = function.overloadpacket.__name__
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    goes = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    copies = name in ("_to_copy", "copy_")
    if not copies and function.namespace != "c10d":
        _check_together(function, tensors)
    if name in _WAITING or (copies and _crosses(tensors, goes) and not _is_asynchronous(name, args, kwargs)):
        RECORD.waits.append(Wait(name, RECORD.unit, _find_place()))
    result = function(*tree_map(_take_host, args), **tree_map(_take_host, kwargs))
    if name == "_to_copy" and goes not in (None, NAME):
        return result
    if name == "copy_" and not isinstance(args[0], StrictTensor):
        return args[0]
    if function.namespace == "c10d":
        return result
    return return_and_correct_aliasing(function, args, kwargs, tree_map(_take_device, result))


def _check_together(function: Any, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, StrictTensor) and tensor.dim() > 0:  # scalars may be the host's, as on any device
            raise RuntimeError(f"{function}: a host tensor {list(tensor.shape)} meets one of the device")


def _crosses(tensors: list[torch.Tensor], goes: str | None) -> bool:
    """Returns whether a copy is between host and device."""
    sides = {isinstance(tensor, StrictTensor) for tensor in tensors} | ({goes == NAME} if goes else set())
    return len(sides) == 2


def _is_asynchronous(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2]))


def _take_host(value: Any) -> Any:
    if isinstance(value, StrictTensor):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _take_device(value: Any) -> Any:
    return StrictTensor(value) if isinstance(value, torch.Tensor) else value


def _find_place() -> str:
    """The last three callers outside of torch and of this file."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None and len(found) < 3:
        file = frame.f_code.co_filename
        if "/site-packages/torch/" not in file and file != __file__ and not file.endswith("nvtx.py"):
            found.append(f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or threading.current_thread().name


class _Event:
    """An event on the device's stream. Once the host has waited for a later one, it need not wait for this one."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._time, self._waits = 0.0, 0

    def record(self, stream: Any = None) -> None:
        self._time, self._waits = time.perf_counter(), len(RECORD.waits)

    def synchronize(self) -> None:
        if len(RECORD.waits) == self._waits:
            RECORD.waits.append(Wait("synchronize", RECORD.unit, _find_place()))

    def elapsed_time(self, later: _Event) -> float:
        return 1000 * (later._time - self._time)


def _is_of_objects() -> bool:
    frame, names = sys._getframe(2), set[str]()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return any("_object" in name for name in names)


class _Module:
    """The device interface of torch, as `torch.cuda`."""

    Event = _Event

    def max_memory_allocated(self, device: Any = None) -> int:
        return 2**30

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """It does not count."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self) -> str:
        return "a strict device"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its random numbers are the CPU's, which torch seeds itself."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def device(self, index: Any) -> Any:
        return nullcontext()


def start_recording() -> Record:
    """Clears the record and returns it. The first call in a process creates the device."""
    if NAME not in _INSTALLED:
        _INSTALLED.add(NAME)
        _install()
    RECORD.waits.clear()
    RECORD.collectives.clear()
    return RECORD


def _install() -> None:
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            _implement_factory(name.removeprefix("aten::"))
    # An error in a backward pass ends the process: torch cannot unwind a guard of a device in Python (2.13.0). So that
    # it has at least a stack, the pass does not run in a thread of its own, as it does for other devices.
    torch.autograd.set_multithreading_enabled(False)
    _set_accelerator()
    _follow_units()
    _separate_host_groups()
    _Collectives().__enter__()


_INSTALLED = set[str]()
_LIBRARY = library.Library("aten", "IMPL")


def _implement_factory(name: str) -> None:
    """Implements an operation that creates a tensor from none (`zeros`, `arange`, ...), which does not dispatch to
    `StrictTensor`."""
    base, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if function is None:
        return
    arguments = function._schema.arguments
    takes_tensor = any("Tensor" in str(each.type) or "Dimname" in str(each.type) for each in arguments)
    if not takes_tensor and any(each.name == "device" for each in arguments):
        _LIBRARY.impl(
            name, lambda *args, **kwargs: StrictTensor(function(*args, **kwargs | {"device": "cpu"})), "PrivateUse1"
        )


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`torch.tensor(x, device=...)` copies below `__torch_dispatch__`."""
    if isinstance(source, StrictTensor) != isinstance(target, StrictTensor) and not non_blocking:
        RECORD.waits.append(Wait("_copy_from", RECORD.unit, _find_place()))
    _take_host(target).copy_(_take_host(source))
    return target


def _set_accelerator() -> None:
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return NAME

        def current_device_name(self) -> str:
            return f"{NAME}:0"

        def current_device(self) -> int:
            return 0

        def device_count(self) -> int:
            return 8

        def set_device(self, device_index: int) -> None:
            """Each process has one, whatever its number."""

        def device(self, device_index: int | None = None) -> Any:
            return nullcontext()

        def is_pinned(self, tensor: torch.Tensor) -> bool:
            return False

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == NAME

    set_accelerator(Accelerator())


def _follow_units() -> None:
    """Every unit of a runner names itself in the record while it runs."""
    from training.engine.runner import Runner

    observe = Runner.observed

    @contextmanager
    def follow(runner: Any, unit: str) -> Iterator[None]:
        RECORD.unit = unit
        try:
            with observe(runner, unit):
                yield
        finally:
            RECORD.unit = ""

    Runner.observed = follow


_HOST_GROUPS = set[str]()


def _separate_host_groups() -> None:
    """All groups are gloo's. Those that were asked for by that name are the host's, the others the device's."""
    make = dist.new_group

    def new_group(ranks: Any = None, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = make(ranks, *args, backend=backend, **kwargs)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            _HOST_GROUPS.add(group.group_name)
        return group

    dist.new_group = new_group
    dist.get_backend = lambda group=None: NAME
    # torch asks the group for a backend of this device
    dist.batch_isend_irecv = lambda operations: [each.op(each.tensor, each.peer, each.group) for each in operations]


class _Collectives(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of objects, torch makes tensors on the group's device itself; a barrier's tensor is never sent.
        if function.namespace == "c10d" and function.overloadpacket.__name__ != "barrier" and not _is_of_objects():
            self._record(function, args)
        return function(*args, **kwargs or {})

    def _record(self, function: Any, args: tuple[Any, ...]) -> None:
        leaves = tree_leaves(args)
        group = next(dist.ProcessGroup.unbox(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        carries = any(not isinstance(tensor, StrictTensor) for tensor in tensors)
        on_host = group.group_name in _HOST_GROUPS
        RECORD.collectives.append(Collective(function.overloadpacket.__name__, carries, on_host, _find_place()))
