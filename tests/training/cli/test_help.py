"""`--help`, and what a shell completes."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.cli.help import FIRST, render_help

ROOT = Path(__file__).resolve().parents[3]
TRAINER = "trainer_base_ds_mp.py"


def test_the_help_is_a_screen_of_keys_with_their_defaults() -> None:
    lines = render_help().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 100
    assert len([line for line in lines if line.startswith("  ") and "=" in line]) >= sum(map(len, FIRST.values()))
    assert any(line.startswith("  learning_rate=2.0e-5 ") for line in lines)


def complete(line: str, *program: str | Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *program, "-sc", "query=bash"], capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "COMP_LINE": line, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout.split()


def test_hydra_completes_keys_and_configs() -> None:
    assert complete(f"python {TRAINER} optimizer=adam", ROOT / TRAINER) == ["optimizer=adamw", "optimizer=adamw_8bit"]
    assert complete(f"python {TRAINER} learning_", ROOT / TRAINER) == ["learning_rate="]


@pytest.mark.full
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_a_key_after_the_lines_on_the_page(shell: str, tmp_path: Path) -> None:
    """On a terminal, with a tab; the page's lines for the clone."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    page = (ROOT / "docs" / "configure.md").read_text()
    (install,) = re.findall(r'^eval "\$\(python .*', page, re.MULTILINE)
    first = re.findall(r"^autoload .*$", page, re.MULTILINE) if shell == "zsh" else []
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": bin_first, "HOME": str(tmp_path), "TERM": "dumb"}
    start = [shell, *(["-f", "-i"] if shell == "zsh" else ["--norc", "-i"])]
    terminal, its_end = pty.openpty()
    with subprocess.Popen(
        start, cwd=ROOT, env=environment, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True
    ) as process:
        os.close(its_end)
        try:
            os.write(terminal, ("; ".join([*first, install, "echo re''ady"]) + "\n").encode())
            assert read_until(terminal, "ready\r")
            os.write(terminal, f"python {TRAINER} learning_r\t".encode())
            assert read_until(terminal, "learning_rate=")
        finally:
            process.kill()
            os.close(terminal)


def read_until(terminal: int, wanted: str, seconds: float = 120.0) -> bool:
    """Returns whether a terminal shows a text before `seconds` are over."""
    shown, end = "", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return wanted in shown
