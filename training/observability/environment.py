"""The environment of a run: versions, source, hosts and devices, so that its figures can be read a year later."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from extension import load_extensions
from training.distributed.launcher import find_command
from training.distributed.process import describe_device, has_accelerator

PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "safetensors")
_ROOT = Path(__file__).resolve().parents[2]


def describe_environment(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the environment of this run, ready for JSON. hosts: the host of each rank."""
    return {
        "command": shlex.join(find_command()),
        "hosts": {host: list(hosts).count(host) for host in dict.fromkeys(hosts)},  # name -> ranks
        "device": _describe_device(),
        "python": platform.python_version(),
        "packages": {name: installed for name in PACKAGES if (installed := _version(name))},
        "extensions": {each.name: str(each.folder) for each in load_extensions() if not each.is_shipped},
        "cuda": torch.version.cuda,
        "git": _describe_source(),
    }


def _describe_device() -> str:
    """Return the name of the accelerator, else of the processor. The accelerator is DeepSpeed's, not torch's: a run on
    the CPU of a machine with a GPU (DS_ACCELERATOR=cpu) has none."""
    return describe_device() if has_accelerator() else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_source() -> str | None:
    """Return the commit of this project, marked when files have changed since; None outside git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
