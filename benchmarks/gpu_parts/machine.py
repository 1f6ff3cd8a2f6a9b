"""The machine that is measured, as a process that may touch its GPUs sees it; this one leaves them alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_ASK = """
import json, sys, torch, transformers, deepspeed
found = {"torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__}
if torch.cuda.is_available():
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found |= {"cuda": torch.version.cuda, "names": [gpu.name for gpu in gpus],
              "memory": gpus[0].total_memory, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
              "capability": f"{gpus[0].major}.{gpus[0].minor}"}
else:
    try:
        torch.cuda.init()
    except Exception as error:  # no driver, one that is too old, a torch for CPUs
        found["obstacle"] = str(error)
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """device: cuda or cpu. gpus: as CUDA_VISIBLE_DEVICES names them; empty on a CPU. memory: bytes of one GPU.
    capability: its compute capability, such as 9.0; empty on a CPU."""

    device: str
    name: str
    gpus: tuple[str, ...]
    memory: int
    versions: dict[str, str]
    capability: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def describe(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        what = f"CPU, {os.cpu_count()} cores" if self.is_cpu else f"{len(self.gpus)} x {self.name}"
        return f"{what}; {versions}"

    def first_gpu(self) -> Machine:
        return replace(self, gpus=self.gpus[:1])

    def environment(self) -> dict[str, str]:
        """Returns the environment of a process that may use the whole machine."""
        if self.is_cpu:  # a thread a process: rows run side by side, and small models gain nothing from more
            return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}

    def rank_environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Returns the environment of a rank, without its rank variables. With fewer GPUs than ranks, all share the
        first one.

        NCCL refuses two ranks on a GPU when their hosts are the same (`ncclInvalidUsage`, "Duplicate GPU detected"),
        so each gets a host of its own, whose only local rank it is, and they talk over the loopback.
        """
        if self.is_cpu:
            return {**self.environment(), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(world_size)}
        if len(self.gpus) >= world_size:
            return {**self.environment(), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(world_size)}
        return {
            "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": self.gpus[0], "LOCAL_RANK": "0", "LOCAL_SIZE": "1",
            "NCCL_HOSTID": f"rank{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
            "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
        }  # fmt: skip


def find_machine(device: str) -> Machine:
    """Raises SystemExit with the reason where the asked device is not there."""
    environment = {**os.environ, **({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, env=environment)
    if asked.returncode:
        sys.exit(f"the packages of requirements.txt cannot be imported here:\n{asked.stderr[-2000:]}")
    found = json.loads(asked.stdout.splitlines()[-1])
    if device == "cuda" and "names" not in found:
        sys.exit(
            f"torch {found['torch']} finds no GPU here: {' '.join(found.get('obstacle', 'unknown reason').split())}; "
            "--device cpu --tiny shows that all of this runs"
        )
    return _build(device, found)


def _build(device: str, found: dict[str, Any]) -> Machine:
    names = found.get("names", []) if device == "cuda" else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[: len(names)] if visible else [str(index) for index in range(len(names))]
    kept = ("torch", "cuda", "nccl", "transformers", "deepspeed") if names else ("torch", "transformers", "deepspeed")
    versions = {"Python": sys.version.split()[0], **{key: str(found[key]) for key in kept if found.get(key)}}
    name, capability = (names[0], found.get("capability", "")) if names else ("CPU", "")
    return Machine(device, name, tuple(gpus), found.get("memory", 0), versions, capability)


def is_installed(package: str) -> bool:
    return find_spec(package) is not None
