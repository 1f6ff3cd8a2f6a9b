"""The links between two ranks on GPUs: the options passed to NCCL. Their effect can only be measured on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from training.distributed import p2p
from training.distributed.p2p import LINK_CTAS, build_link_options
from training.pipeline.schedule import Interleaved

CHANNELS = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS")
ROOT = Path(__file__).resolve().parents[3]


class Config:
    min_ctas = max_ctas = -(2**31)  # NCCL's "not set"


class Options:
    def __init__(self) -> None:
        self.config = Config()


class OldOptions:
    """The options of a torch that has no ncclConfig."""


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> type[Options]:
    """NCCL's, where the build of torch has none."""
    monkeypatch.setattr(p2p.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(p2p.dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    return Options


@pytest.mark.usefixtures("options")
def test_a_link_takes_few_multiprocessors_of_a_gpu() -> None:
    one, other = build_link_options("nccl"), build_link_options("nccl")
    assert (one.config.min_ctas, one.config.max_ctas) == (1, LINK_CTAS)
    assert one is not other  # torch writes the group's name into them


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize("name", CHANNELS)
def test_a_users_number_of_channels_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "16")
    assert build_link_options("nccl") is None


def test_other_backends_and_builds_are_asked_for_nothing(
    options: type[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_link_options("gloo") is None
    monkeypatch.setattr(p2p.dist.ProcessGroupNCCL, "Options", OldOptions)
    assert build_link_options("nccl") is None
    monkeypatch.setattr(p2p.dist, "is_nccl_available", lambda: False)
    assert build_link_options("nccl") is None


# In a process of its own: nothing of the suite may start CUDA.
BUILD = """
import torch
from training.distributed.p2p import build_link_options
options = build_link_options("nccl")
print(options.config.min_ctas, options.config.max_ctas, options._timeout.total_seconds(), torch.cuda.is_initialized())
"""


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_torch_itself_takes_them() -> None:
    printed = subprocess.check_output([sys.executable, "-c", BUILD], env=dict(os.environ), cwd=ROOT, text=True)
    # the timeout of a group that is given none, or torch warns
    assert printed.split() == ["1", str(LINK_CTAS), "600.0", "False"]


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize(("backend", "ctas"), [("nccl", [LINK_CTAS] * 2), ("gloo", [None, None])])
def test_every_link_of_the_engine_asks_for_its_own(
    backend: str, ctas: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.engine import executor

    asked: list[Any] = []

    def new_groups(ranks: list[list[int]], pg_options: Any) -> tuple[str]:
        asked.append(pg_options)
        return (str(ranks),)

    monkeypatch.setattr(executor.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(executor.dist, "new_subgroups_by_enumeration", new_groups)
    engine: Any = SimpleNamespace()
    links = Interleaved(2, 2, 2).list_links()[:2]
    groups = [executor.ScheduleEngine._pair_up(engine, [[0, 2], [1, 3]], start, stop) for _, start, stop in links]
    assert groups == ["[[0, 2], [1, 3]]", "[[2, 0], [3, 1]]"]
    assert [options and options.config.max_ctas for options in asked] == ctas and (
        asked[0] is None or asked[0] is not asked[1]
    )
