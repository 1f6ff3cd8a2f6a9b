"""Notices that the launcher of this rank has ended, which counts as SIGTERM: else the rank would train on as an orphan,
and hold the port and the GPUs.

`deepspeed` starts `deepspeed.launcher.launch`, and that the ranks. SIGTERM or SIGINT to `deepspeed` ends it alone: it
passes signals on only under pdsh (deepspeed 0.19.8, launcher/runner.py). So a rank watches its own parent and, under
`deepspeed`, its parent's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from training.distributed.ranks import Ranks

_SECONDS_BETWEEN_LOOKS = 1.0
_INNER_LAUNCHER = "deepspeed.launcher.launch"
_LAUNCHERS = ("deepspeed", "torchrun")


def end_with_launcher(ranks: Ranks) -> None:
    """From now on, send this process SIGTERM when its launcher has ended. Does nothing for one that neither `deepspeed`
    nor `torchrun` has started: the shell that started it may end."""
    parents = _find_parents()
    if parents:
        threading.Thread(target=_watch, args=(parents, ranks), daemon=True).start()


def find_command() -> list[str]:
    """Return the command of this run as it was typed: with the launcher and its options, where this host started them;
    else this process's own words."""
    try:
        commands = [process.cmdline() for process in psutil.Process().parents()[:2]]
    except psutil.Error:  # of another user
        commands = []
    for words in commands:
        for position, word in enumerate(words[:2]):  # a script's first word is its interpreter
            if Path(word).name in _LAUNCHERS:
                return [Path(word).name, *words[position + 1 :]]
    return sys.argv


def _find_parents() -> list[tuple[psutil.Process, int]]:
    """Return each process that may not lose its parent, with that parent's id."""
    rank = psutil.Process()
    try:
        launcher = psutil.Process(rank.ppid())
        links = [(rank, launcher.pid)]
        if _INNER_LAUNCHER in launcher.cmdline():
            return [*links, (launcher, launcher.ppid())]
    except psutil.Error:  # of another user
        return []
    return links if "TORCHELASTIC_RUN_ID" in os.environ else []


def _watch(parents: list[tuple[psutil.Process, int]], ranks: Ranks) -> None:
    while all(map(_has_parent, *zip(*parents))):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    ranks.say("the launcher of this run has ended, which counts as SIGTERM")


def _has_parent(process: psutil.Process, parent: int) -> bool:
    try:
        return process.ppid() == parent  # it gets another one when its own has ended
    except psutil.Error:
        return False
