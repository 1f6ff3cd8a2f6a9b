"""The benchmarks of docs: each starts, and that of divided experts measures what its page says, at toy size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
HELP = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, path
"""
NUMBER = r"([\d.]+)"

pytestmark = pytest.mark.full


def run(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_each_says_what_it_measures() -> None:
    paths = [path for path in sorted(FOLDER.glob("*.py")) if "ArgumentParser(" in path.read_text()]
    text = run("-c", HELP, *map(str, paths))
    assert [path.name for path in paths if f"usage: {path.name}" not in text] == [] != paths


def test_a_rank_has_half_of_divided_experts() -> None:
    """It has half of their weights and sums, and at its peak what the plan says."""
    text = run(str(FOLDER / "expert_parallel.py"), "--tiny", "--rounds", "1", "--precisions", "fp32")
    (shares,) = re.findall(rf"of weights and sums of experts {NUMBER}%", text)
    assert float(shares) == 50
    errors = [float(error) for error in re.findall(r"by the plan [\d.]+ \(([+-][\d.]+)%\)", text)]
    assert len(errors) == 2 and max(map(abs, errors)) < 5
    assert re.search(rf"a step takes {NUMBER} of that with all experts .*; {NUMBER}% of it in exchanges", text)
