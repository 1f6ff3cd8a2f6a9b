"""The figures of *right*: how far a run is from what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.processes import RowFailed
from benchmarks.gpu_parts.training_runs import Record
from console import pluralize


def find_skipped_steps(records: Sequence[Record]) -> tuple[int, ...]:
    """The steps, from 1, whose update fp16 has left out: those that a run counts, or that have no norm."""
    return tuple(
        record["step"]
        for record in records
        if record.get("skipped_steps") or record["grad_norm"] is None or not math.isfinite(record["grad_norm"])
    )


def compare_records(
    records: Sequence[Record], expected: Sequence[Record], skipped: Sequence[int] = ()
) -> dict[str, float]:
    """The largest relative difference of the losses, and of the norms but for skipped steps. Raises RowFailed where
    steps are missing."""
    if len(records) != len(expected) or len(skipped) == len(expected):
        raise RowFailed(f"{pluralize(len(records), 'step')} reported, not {len(expected)}, and {len(skipped)} skipped")
    pairs = list(zip(records, expected, strict=True))
    norms = [(a["grad_norm"], b["grad_norm"]) for a, b in pairs if a["step"] not in skipped]
    return {
        "loss": max(_relative(a["loss"], b["loss"]) for a, b in pairs),
        "gradient norm": max(_relative(actual, wanted) for actual, wanted in norms),
    }


def _relative(actual: float, expected: float) -> float:
    difference = abs(actual - expected) / abs(expected)
    return math.inf if math.isnan(difference) else difference


def compare_weights(export: Path, expected: Path) -> float:
    """The largest relative difference of the worst tensor. export, expected: Hugging Face or peft folders. Raises
    RowFailed where the names differ."""
    actual, wanted = _load_tensors(export), _load_tensors(expected)
    if actual.keys() != wanted.keys():
        raise RowFailed(f"other tensors than the oracle's: {sorted(actual.keys() ^ wanted.keys())[:4]}")
    return max(
        ((actual[name].float() - tensor.float()).abs().max() / tensor.float().abs().max()).nan_to_num(math.inf).item()
        for name, tensor in wanted.items()
    )


def _load_tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
