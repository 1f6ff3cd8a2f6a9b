"""On what a run has run: versions, source, hosts and devices, for whoever looks at its figures a year later."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from training.distributed.process import describe_device, has_accelerator

PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "safetensors")
_ROOT = Path(__file__).resolve().parents[2]


def describe_environment(hosts: Sequence[str]) -> dict[str, Any]:
    """hosts: that of each rank."""
    return {
        "command": " ".join(sys.argv),
        "hosts": {host: list(hosts).count(host) for host in dict.fromkeys(hosts)},  # name -> ranks
        "device": _describe_device(),
        "python": platform.python_version(),
        "packages": {name: installed for name in PACKAGES if (installed := _version(name))},
        "cuda": torch.version.cuda,
        "git": _describe_source(),
    }


def _describe_device() -> str:
    """The accelerator's name, else the processor's. DeepSpeed's accelerator, not torch's: a run on the CPU of a machine
    with a card (DS_ACCELERATOR=cpu) has none."""
    return describe_device() if has_accelerator() else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_source() -> str | None:
    """The commit of this project, marked when files have changed since; None outside git."""
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
