"""The published runs, read from `benchmarks/published_runs/`, and why some of them cannot be planned."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "published_runs"
RUNS, OUT_OF_MEMORY = FOLDER / "runs.csv", FOLDER / "out_of_memory.csv"
HARDWARE = Path(__file__).resolve().parents[2] / "conf" / "hardware"
NEEDED = ("layers", "hidden", "ffn", "heads", "vocab", "micro_batch", "tp", "pp", "dp")
# A family of the table -> the `model_type` that is planned for it. MPT and BLOOM run as the GPT of learned positions:
# their products are the same, and MPT's own layers here make all scores.
MODEL_TYPES = {"gpt": "gpt2", "llama": "llama", "nemotron": "nemotron"}
SCHEDULES = {
    "none": "1f1b",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zb_1p": "zero_bubble",
    "zb_2p": "zero_bubble",
}


@dataclass(frozen=True)
class PublishedRun:
    """A row; `benchmarks/published_runs/README.md` defines the columns. Numbers that are not stated are None."""

    id: str
    source: str
    where: str
    model: str
    family: str
    layers: int | None
    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    tied: int | None
    task: str
    seq: int
    micro_batch: int | None
    global_batch: int
    gpus: int
    gpu: str
    gpus_per_node: int
    network: float | None
    tp: int | None
    pp: int | None
    vp: int | None
    cp: int
    dp: int | None
    ep: int
    sequence_parallel: int
    zero: int
    sharding: str
    states: str
    gradients: str
    recompute: str
    precision: str
    schedule: str
    split: str
    attention: str
    kernels: str
    keeps: str
    context: float | None
    loss: str
    reduction: str
    assumed: str
    doubt: str
    tokens_per_s_per_gpu: float | None = None
    step_s: float | None = None
    memory_gib: float | None = None
    memory_is: str = ""

    @property
    def has_stages(self) -> bool:
        return (self.pp or 1) > 1


def read_runs(file: Path) -> list[PublishedRun]:
    """Return the rows of a table."""
    kinds = {field.name: str(field.type) for field in fields(PublishedRun)}
    with open(file, newline="", encoding="utf-8") as lines:
        return [
            PublishedRun(**{name: _parse(kinds[name], text) for name, text in row.items()})
            for row in csv.DictReader(lines)
        ]


def _parse(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if not text:
        return None
    return float(text) if kind.startswith("float") else int(text)


def find_obstacle(run: PublishedRun) -> str | None:
    """Return why a run cannot be planned, or None."""
    if missing := [name for name in NEEDED if getattr(run, name) is None and run.family != "mixture"]:
        return f"not stated: {', '.join(missing)}"
    if run.ep > 1 or run.family == "mixture":
        return "a mixture of experts with expert parallelism"
    if run.precision not in ("bf16", "fp16", "fp32"):
        return f"precision {run.precision}"
    if run.schedule not in SCHEDULES:
        return "schedule: vocabulary parallelism"
    if not (HARDWARE / f"{run.gpu}.yaml").exists():
        return f"no conf/hardware/{run.gpu}.yaml"
    if run.doubt and not run.doubt.startswith("memory"):
        return f"doubt: {run.doubt}"
    return None
