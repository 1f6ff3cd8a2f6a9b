"""Imported by the forkserver before all else: notes what would start CUDA there, in the process that workers are forked
from, since a fork of a process that has started CUDA cannot use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

process_id = os.getpid()
calls: list[tuple[int, str]] = []  # process -> function that starts CUDA, so far
# `device_count` and `is_available` are not among them: they ask the driver's NVML, as DeepSpeed sets it for who imports
# it (PYTORCH_NVML_BASED_CUDA_CHECK), and come here only where that fails.
_STARTERS = ((torch.cuda, "_lazy_init"), (torch._C, "_cuda_init"), (torch._C, "_cuda_getDeviceCount"))


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        calls.append((os.getpid(), name))
        return function(*arguments, **named)

    return call


for _module, _name in _STARTERS:
    if hasattr(_module, _name):  # not all of them in a build for the CPU
        setattr(_module, _name, _noted(_name, getattr(_module, _name)))
