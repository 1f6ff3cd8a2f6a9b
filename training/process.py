"""This process: its device and cores, and where what libraries print goes."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from training.ranks import Ranks


def has_accelerator() -> bool:
    return get_accelerator().device_name() != "cpu"


def current_device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def describe_device() -> str:
    """What the driver calls the accelerator; "cpu" without one."""
    if not has_accelerator():
        return "cpu"
    return torch.get_device_module(get_accelerator().device_name()).get_device_name()


def take_device(ranks: Ranks) -> None:
    """This rank's GPU; without one, its share of the host's cores, or the ranks fight over them."""
    if has_accelerator():
        get_accelerator().set_device(ranks.local_rank)
        return
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks.local_size)
    torch.set_num_threads(share)
    if share * ranks.local_size <= len(cores):
        os.sched_setaffinity(0, cores[ranks.local_rank * share : (ranks.local_rank + 1) * share])


def choose_interface() -> None:
    """Tells gloo the network interface that leads to the main host. Left alone it takes the one that the own host's name resolves to,
    which is often the loopback, and then no other host can reach it. A name that someone has set is kept.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing: it asks for the route
        except OSError:
            return
        address = probe.getsockname()[0]
    if not address.startswith("127."):
        for name, addresses in psutil.net_if_addrs().items():
            if address in (entry.address for entry in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def send_noise_to_log(file: Path) -> None:
    """What libraries print goes to this rank's log file; stderr stays for us and for errors."""
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout = open(file, "a", buffering=1)
    handler = logging.StreamHandler(sys.stdout)
    for name in (None, "DeepSpeed", "transformers", "datasets"):
        logging.getLogger(name).handlers = [handler]
    for name in ("DeepSpeed", "transformers", "datasets"):
        logging.getLogger(name).propagate = False
    logging.captureWarnings(True)
