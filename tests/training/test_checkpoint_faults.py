"""SIGKILL at random moments of the real saving code: what `latest` leads to is whole, and no save that was told is lost."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_checkpoint import STATE

from training.checkpoint import list_checkpoints, read_state, remove_leftovers
from training.checkpoint_writer import CheckpointWriter, ShareFile
from training.resume import find_damage, find_resume

KILLS = 25
LONGEST = 0.3  # s from the first save of a process to its end; several saves
FILES = ("layer_00-model_states.pt", "layer_01-model_states.pt", "optimizer-stage_00-dp_00.safetensors")


def save_until_killed(checkpoints: Path, first: int, told: int) -> None:
    """In a process of its own: saves one step after the other, and writes each step that has been saved to the pipe `told`."""
    from unittest.mock import patch

    import torch.distributed as dist

    from training import checkpoint_writer

    torch.set_num_threads(1)  # a forked process has lost the threads that the test's own has started
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    state = torch.zeros(20_000)
    with patch.object(checkpoint_writer, "plan_share", lambda _: [ShareFile(name, {"x@0": state}) for name in FILES]):
        writer = CheckpointWriter(object(), checkpoints, keep_last=2, asynchronous=True)
        remove_leftovers(checkpoints)
        for step in range(first, first + 1000):
            state.fill_(step)  # while the one before is still being written
            writer.save(replace(STATE, step=step))
            if step > first:  # this save has waited for the one before
                os.write(told, (step - 1).to_bytes(4, "little"))


@pytest.mark.full
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    rng, first, interrupted = random.Random(0), 1, 0
    for _ in range(KILLS):
        reader, told = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                save_until_killed(tmp_path, first, told)
            finally:
                os._exit(1)
        os.close(told)
        assert select.select([reader], [], [], 60)[0], "nothing was saved in a minute"
        time.sleep(rng.random() * LONGEST)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with open(reader, "rb") as pipe:
            last_told = int.from_bytes(pipe.read()[-4:], "little")
        interrupted += any(tmp_path.glob("tmp-*"))
        resumable = find_resume("latest", tmp_path, trust=False)
        newest = resumable.candidates[0]
        assert resumable.damages == [] and find_damage(newest, 0, 1) is None
        assert (step := read_state(newest).step) >= last_told >= first
        assert all(find_damage(step_dir, 0, 1) is None for step_dir in list_checkpoints(tmp_path))
        assert torch.load(newest / FILES[1], weights_only=True)["x@0"].unique().tolist() == [step]
        first = step + 1
    assert interrupted > KILLS // 4  # kills did hit saves
