"""The command of a run, as a person typed it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import sys
sys.path.insert(0, {root!r})
from training.distributed.launcher import find_command
print(find_command())
"""


@pytest.mark.parametrize(
    ("name", "starts_another", "expected"),
    [
        ("torchrun", False, ["torchrun", "--nproc_per_node", "2", "train.py", "-cn", "mine"]),
        ("deepspeed", True, ["deepspeed", "--nproc_per_node", "2", "train.py", "-cn", "mine"]),
        ("launch.py", False, ["-c", "-cn", "mine"]),
    ],
)
def test_the_command_of_a_run_has_its_launcher(
    name: str, starts_another: bool, expected: list[str], tmp_path: Path
) -> None:
    """`deepspeed` starts another process, which starts the ranks."""
    start = [sys.executable, "-c", RANK.format(root=str(ROOT)), "-cn", "mine"]
    if starts_another:
        start = [sys.executable, "-c", f"import subprocess; subprocess.run({start!r}, check=True)"]
    launcher = tmp_path / name
    launcher.write_text(f"import subprocess; subprocess.run({start!r}, check=True)")
    words = [sys.executable, str(launcher), "--nproc_per_node", "2", "train.py", "-cn", "mine"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)
