"""A micro-batch has names, and nothing else to be read by."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from test_structure import IMPORTS, ROOT

from batch import Batch, Inputs, Targets
from data.loading.columns import WHOLE_IDS

IDS = torch.tensor([[5, 6, 7, 0]])
INPUTS = Inputs(
    IDS, torch.arange(4)[None], torch.tensor([[1, 1, 1, 0]], dtype=torch.int32), {WHOLE_IDS.column.name: IDS}
)
FURTHER = Targets.find(torch.tensor([[7, -100, -100, -100]]), torch.tensor(0.5))
TARGETS = Targets.find(
    torch.tensor([[6, 7, -100, -100]]), torch.tensor(1.0), columns={"reference": torch.ones(1)}, further=(FURTHER,)
)
READS: dict[str, Callable[[Any], object]] = {
    "index": lambda part: part[0],
    "iterate": iter,
    "unpack": lambda part: [*part],
    "length": len,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("part", [INPUTS, TARGETS, Batch(INPUTS, TARGETS)], ids=lambda part: type(part).__name__)
def test_no_part_is_read_by_position(part: Any, read: str) -> None:
    with pytest.raises(TypeError):
        READS[read](part)


def test_all_tensors_move_together() -> None:
    moved = Batch(INPUTS, TARGETS).to(torch.device("meta"))
    assert moved.inputs is not None and moved.targets is not None
    targets = (moved.targets, *moved.targets.further)
    tensors = [*moved.inputs.activations, *(tensor for each in targets for tensor in (each.ids, each.indices))]
    tensors += [each.denominator for each in targets] + [*moved.targets.columns.values()]
    assert len(tensors) == 4 + 4 + 2 + 1 and all(tensor.is_meta for tensor in tensors)
    middle = Batch(None, TARGETS).to(torch.device("cpu"))
    assert middle.inputs is None and middle.targets is not None and middle.targets.indices.tolist() == [0, 1]


def test_all_that_reads_a_batch_is_checked_strictly() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    strict = [name for each in mypy["overrides"] if "disallow_any_generics" in each for name in each["module"]]
    modules = {
        source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for source, imported in IMPORTS.items()
        if source.startswith(tuple(mypy["files"])) and any(name.startswith("batch.") for name in imported)
    }
    assert len(modules) > 20 and {each for each in modules if not any(fnmatch(each, name) for name in strict)} == set()
