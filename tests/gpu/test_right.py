"""On a GPU: the rows of `python benchmarks/gpu.py --parts right`, each as a test.

Run by `DS_ACCELERATOR=cuda make test`; without that the suite keeps to the CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.gpu_parts.cases import CASES
from benchmarks.gpu_parts.machine import find_machine
from benchmarks.gpu_parts.right import Right
from benchmarks.gpu_parts.rows import Status, run_row

pytestmark = pytest.mark.skipif(
    os.environ.get("DS_ACCELERATOR", "cpu") == "cpu" or not torch.cuda.is_available(),
    reason="needs a GPU, and DS_ACCELERATOR=cuda",
)
NAMES = [*(case.name for case in CASES), "save, kill, resume, fp32"]
SECONDS = 600  # of a row, on a machine that may be busy


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Right:
    folder = tmp_path_factory.mktemp("right")
    return Right(find_machine("cuda"), folder, folder / "logs", tiny=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_the_gpu_is_right(right: Right, name: str) -> None:
    row = next(row for row in right.list_rows() if row.name == name)
    result = run_row(row, SECONDS)
    if result.status is Status.not_run:
        pytest.skip(result.note)
    assert result.status is Status.ok, f"{result.cells} {result.note}\n{result.tail}"
