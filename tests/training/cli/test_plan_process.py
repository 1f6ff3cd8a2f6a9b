"""The layout that a plan in a process of its own proposes."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.cli.plan_process import ask_plan


def write_script(folder: Path, proposed: str) -> str:
    """A command whose plan prints these lines."""
    file = folder / "train.py"
    file.write_text(f"print('''a table\n{proposed}''')\n")
    return str(file)


@pytest.mark.parametrize(
    ("proposed", "keys"),
    [
        # Its own keys are no change, nor is one whose value was hidden
        (
            "use: deepspeed --num_gpus 2 train.py -cn x --config-dir a=b num_stages=2 +logger.api_key=*** "
            'num_workers=1 "data.prompt_template=Q: {prompt}"',
            ["num_stages=2", "data.prompt_template=Q: {prompt}"],
        ),
        ("use: deepspeed --num_gpus 2 train.py -cn x num_workers=1", []),  # the layout as it is
        ("use: num_stages=2 micro_batch_size=1", ["num_stages=2", "micro_batch_size=1"]),  # a user's plan
    ],
)
def test_the_keys_in_which_it_differs_from_the_command(tmp_path: Path, proposed: str, keys: list[str]) -> None:
    words = [write_script(tmp_path, proposed), "-cn", "x", "--config-dir", "a=b", "num_workers=1", "num_stages=4"]
    assert ask_plan(words, "search", 2) == (keys, "")


def test_the_reason_where_it_proposes_none(tmp_path: Path) -> None:
    assert ask_plan([write_script(tmp_path, "nothing fits")], "search", 2) == ([], "nothing fits")
