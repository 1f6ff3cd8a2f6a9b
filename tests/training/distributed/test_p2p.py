"""The options that are passed to NCCL for a pipeline's transfers. Their effect can only be measured on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from training.distributed import p2p
from training.distributed.p2p import MOST_CTAS, build_options, count_spared
from training.distributed.topology import CONTEXT, PIPE, TENSOR, Layout, Topology

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
def test_an_exchange_takes_few_multiprocessors_of_a_gpu() -> None:
    one, other = build_options("nccl"), build_options("nccl")
    assert (one.config.min_ctas, one.config.max_ctas) == (1, MOST_CTAS)
    assert one is not other  # torch writes the group's name into them


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize("name", CHANNELS)
def test_a_users_number_of_channels_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "16")
    assert build_options("nccl") is None


def test_other_backends_and_builds_are_asked_for_nothing(
    options: type[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_options("gloo") is None
    monkeypatch.setattr(p2p.dist.ProcessGroupNCCL, "Options", OldOptions)
    assert build_options("nccl") is None
    monkeypatch.setattr(p2p.dist, "is_nccl_available", lambda: False)
    assert build_options("nccl") is None


@pytest.mark.parametrize(
    ("world_size", "axes", "kinds"),
    [
        (1, {}, 0),
        (2, {PIPE: 2}, 1),
        (2, {TENSOR: 2}, 0),  # layers wait for it
        (2, {}, 1),  # gradients of two replicas
        (4, {PIPE: 2}, 2),
        (2, {CONTEXT: 2}, 2),  # the ring, and the gradients of its ranks
        (8, {PIPE: 2, CONTEXT: 2}, 3),
        (8, {PIPE: 2, TENSOR: 4}, 1),
    ],
)
def test_what_is_sent_while_layers_run_is_left_multiprocessors(
    world_size: int, axes: dict[str, int], kinds: int
) -> None:
    layout = Layout(Topology.of(world_size, **axes), micro_batch_size=1, gradient_accumulation_steps=1)
    assert count_spared(layout, is_ring=CONTEXT in axes) == kinds * MOST_CTAS


def test_heads_that_are_exchanged_are_waited_for() -> None:
    layout = Layout(Topology.of(2, **{CONTEXT: 2}), micro_batch_size=1, gradient_accumulation_steps=1)
    assert count_spared(layout, is_ring=False) == MOST_CTAS  # for gradients alone


# In a process of its own: nothing of the suite may start CUDA.
BUILD = """
import torch
from training.distributed.p2p import build_options
options = build_options("nccl")
print(options.config.min_ctas, options.config.max_ctas, options._timeout.total_seconds(), torch.cuda.is_initialized())
"""


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_torch_itself_takes_them() -> None:
    printed = subprocess.check_output([sys.executable, "-c", BUILD], env=dict(os.environ), cwd=ROOT, text=True)
    # the timeout of a group that is given none, or torch warns
    assert printed.split() == ["1", str(MOST_CTAS), "600.0", "False"]
