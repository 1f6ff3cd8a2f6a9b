"""A training command at another layout."""

from __future__ import annotations

from training.plan_command.layout_keys import change_keys


def test_keys_take_the_place_of_the_commands_own() -> None:
    command = ["run.py", "num_stages=2", "partition_method=[1,7]", "seed=1"]
    assert change_keys(command, ["num_stages=1", "schedule=1f1b"]) == [
        "run.py",
        "seed=1",
        "num_stages=1",
        "schedule=1f1b",
    ]


def test_keys_of_another_schedule_do_not_stay() -> None:
    """A run refuses a key on its command line that it does not read."""
    command = ["run.py", "schedule=interleaved", "virtual_stages_per_rank=2"]
    assert change_keys(command, ["schedule=1f1b"]) == ["run.py", "schedule=1f1b"]
    assert change_keys(command, ["schedule=interleaved"]) == ["run.py", *command[2:], "schedule=interleaved"]
    assert change_keys(command, ["micro_batch_size=1"]) == [*command, "micro_batch_size=1"]
