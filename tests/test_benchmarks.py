"""The benchmarks of docs: each starts, and that of divided experts measures what its page says, at toy size."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.loss import PLAIN, list_losses, make_inputs

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


def test_the_losses_are_one_function() -> None:
    """Torch's own too, where torch has it: what the benchmark compares has the same value and gradients."""
    arguments = argparse.Namespace(vocab_size=300, tokens=40, hidden_size=16, precision="fp32")
    hidden_states, weight, targets = make_inputs(arguments)
    values, gradients = {}, {}
    for name, loss in list_losses().items():
        values[name] = loss((hidden_states, weight), targets)
        gradients[name] = torch.autograd.grad(values[name], (hidden_states, weight))
    assert len(values) == 2 + hasattr(torch.nn.functional, "linear_cross_entropy")
    for name, value in values.items():
        torch.testing.assert_close(value, values[PLAIN])
        torch.testing.assert_close(gradients[name], gradients[PLAIN])


def test_a_rank_has_half_of_divided_experts() -> None:
    """It has half of their weights and sums, and at its peak what the plan says."""
    text = run(str(FOLDER / "expert_parallel.py"), "--tiny", "--rounds", "1", "--precisions", "fp32")
    (shares,) = re.findall(rf"of weights and sums of experts {NUMBER}%", text)
    assert float(shares) == 50
    errors = [float(error) for error in re.findall(r"by the plan [\d.]+ \(([+-][\d.]+)%\)", text)]
    assert len(errors) == 2 and max(map(abs, errors)) < 5
    assert re.search(rf"a step takes {NUMBER} of that with all experts .*; {NUMBER}% of it in exchanges", text)
