"""*fast*: tokens/s, MFU and peak memory of the usual sizes, and the effect of each feature on a stage of 8B.

Random weights, bf16 (fp32 on a CPU), rows of 4,096 tokens, one a micro-batch, 8 a step, every layer recomputed, AdamW,
clipping. tokens/s is the median of four steps after two that warm up; MFU by the convention of docs/plan.md, LoRA as if
all were trained. This trainer keeps fp32 weights and moments. The `Trainer` of transformers runs with fp32 weights
under autocast, the same work, and with nothing but bf16, which is less.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.measured_runs import GIB, MARKS, MeasuredRuns, Prediction, Speed, list_needs, measure
from benchmarks.gpu_parts.processes import Deadline, list_ranks, run, run_python
from benchmarks.gpu_parts.rows import Cells, NotRun, Row, Status, check_needs
from benchmarks.gpu_parts.trainer_peer import Job
from benchmarks.gpu_parts.training_runs import write_name

_SECONDS = {"cuda": (25, 150), "cpu": (15, 120)}  # expected of a run of 1B, and at most
# At most of what is expected, for longer ones: offloaded, 8B first fills some 130 GB of host memory
_MOST_OF_EXPECTED = 4


@dataclass(frozen=True)
class Case:
    """A run. choices: further overrides, of which the first take that fits by the plan. baseline: the row that it is a
    variation of. needs: as in `cases.Case`, or "2 GPUs". size: how many times as long as one of 1B it is expected to
    take. runner: ours, or the peer process that it is compared with."""

    name: str
    shape: str
    overrides: tuple[str, ...] = ()
    choices: tuple[tuple[str, ...], ...] = ((),)
    baseline: str = ""
    needs: tuple[str, ...] = ()
    world_size: int = 1
    size: float = 1.0
    runner: str = "ours"
    weights: str = "fp32"  # of the Trainer


_STAGE = "8b stage"
_OPTIONS = {
    "compile": ("compile=true",),
    "recompute selective": ("activation_checkpoint_mode=selective",),
    "recompute nothing": ("activation_checkpoint_interval=0",),
    "fused kernels": ("fused_kernels=auto",),
    "packing": ("data.packing=true",),
    "offload": ("offload_optimizer=cpu",),
}
# All of 8B: as it is, or with the smallest change that makes it fit; its fp32 weights alone take 30 GiB
_FITTING = ((), ("optimizer.state_dtype=bf16",), ("optimizer=adamw_8bit",), ("offload_optimizer=cpu",))
_PP2 = ("num_stages=2", "activation_checkpoint_interval=0")
CASES = (
    Case("1b", "1b"),
    Case("1b, Trainer", "1b", baseline="1b", runner="trainer"),
    Case("8b LoRA", "8b", ("adapter=lora",), size=2),
    Case(
        "8b LoRA, Trainer, bf16", "8b", ("adapter=lora",), baseline="8b LoRA", runner="trainer", weights="bf16", size=2
    ),
    Case("8b full", "8b", choices=_FITTING, size=2.5),
    Case(_STAGE, _STAGE),
    *(
        Case(f"{_STAGE}, {name}", _STAGE, keys, baseline=_STAGE, needs=list_needs(keys))
        for name, keys in _OPTIONS.items()
    ),
    Case(f"{_STAGE}, pp2", _STAGE, _PP2, baseline=_STAGE, needs=("2 GPUs",), world_size=2),
    Case(
        f"{_STAGE}, pp2, torch", _STAGE, _PP2, baseline=f"{_STAGE}, pp2", needs=("2 GPUs",), world_size=2,
        runner="torch",
    ),
)  # fmt: skip


class Fast:
    """The rows of one machine."""

    TITLE = "fast: bf16, rows of full length"
    COLUMNS = ("tokens/s", "MFU", "peak GiB", "plan tokens/s", "plan GiB", "efficiency that fits", "beside")

    def __init__(self, machine: Machine, folder: Path, logs: Path, tiny: bool) -> None:
        self.machine, self.logs = machine, logs
        self.runs = MeasuredRuns(machine, folder, logs, tiny)
        self._speeds: dict[str, Speed] = {}

    def list_rows(self) -> list[Row]:
        return [self._build_row(case) for case in CASES]

    def _build_row(self, case: Case) -> Row:
        expected, limit = _SECONDS[self.machine.device]
        expected *= case.size
        return Row(case.name, partial(self._measure, case), expected, max(limit, _MOST_OF_EXPECTED * expected))

    def _measure(self, case: Case, deadline: Deadline) -> tuple[Status, Cells]:
        self._check_needs(case.needs)
        chosen: Sequence[str] = ()
        if case.runner == "trainer":
            speed, prediction = self._measure_trainer(case, deadline), None
        elif case.runner == "torch":
            speed, prediction = self._measure_torch(case, deadline), None
        else:
            chosen = self.runs.choose_fitting(case.shape, case.overrides, case.choices, deadline, case.world_size)
            overrides = (*case.overrides, *chosen)
            speed, given = measure(self.runs, write_name(case.name), case.shape, overrides, deadline, case.world_size)
            prediction = self.runs.predict(given, case.world_size, speed.tokens_per_second)
        speed = self._speeds[case.name] = self._complete(speed, case)
        return Status.measured, render(speed, prediction, self._compare(speed, case, chosen))

    def _check_needs(self, needs: Sequence[str]) -> None:
        if "2 GPUs" in needs and not self.machine.is_cpu and len(self.machine.gpus) < 2:
            raise NotRun("needs 2 GPUs")
        check_needs([need for need in needs if need != "2 GPUs"], self.machine)

    def _complete(self, speed: Speed, case: Case) -> Speed:
        """Adds the MFU of a peer that trains the same model on as many GPUs: by the same count of FLOPs."""
        ours = self._speeds.get(case.baseline)
        if case.runner == "ours" or ours is None or ours.mfu is None:
            return speed
        return replace(speed, mfu=ours.mfu * speed.tokens_per_second / ours.tokens_per_second)

    def _compare(self, speed: Speed, case: Case, chosen: Sequence[str]) -> str:
        """Returns the row's tokens/s relative to its baseline, and what it was given to fit."""
        rate, compared = speed.tokens_per_second, [f"with {' '.join(chosen)}"] if chosen else []
        if case.baseline in self._speeds:
            compared.append(f"{rate / self._speeds[case.baseline].tokens_per_second:.2f} of {case.baseline}")
        if case.name in MARKS and not self.machine.is_cpu:
            mark, where = MARKS[case.name]
            compared.append(f"{rate / mark:.2f} of {mark:,} ({where})")
        return "; ".join(compared) or "-"

    def _measure_trainer(self, case: Case, deadline: Deadline) -> Speed:
        name = write_name(case.name)
        result = self.logs / f"{name}.json"
        job = Job(
            fields=self.runs.find_fields(case.shape), seq_length=self.runs.seq_length,
            global_batch_size=self.runs.global_batch_size, lora="adapter=lora" in case.overrides,
            weights=case.weights, device=self.machine.device, result=str(result),
        )  # fmt: skip
        self.logs.mkdir(parents=True, exist_ok=True)
        job.save(file := self.logs / f"{name}.job.json")
        words = ["-m", "benchmarks.gpu_parts.trainer_peer", str(file)]
        run_python(self.machine.first_gpu(), words, self.logs / f"{name}.log", deadline)
        return Speed(**json.loads(result.read_text()))

    def _measure_torch(self, case: Case, deadline: Deadline) -> Speed:
        """torch.distributed.pipelining, 1F1B, with this trainer's layers and split."""
        name = write_name(case.name)
        result = self.logs / f"{name}.json"
        given = self.runs.list_overrides(self.runs.prepare_model(case.shape, deadline), case.overrides)
        words = [sys.executable, "-m", "benchmarks.gpu_parts.torch_peer", str(result), *given]
        run(list_ranks(self.machine, case.world_size, words), self.logs / f"{name}.log", deadline)
        return Speed(**json.loads(result.read_text()))


def render(speed: Speed, prediction: Prediction | None, compared: str) -> Cells:
    cells = {
        "tokens/s": f"{speed.tokens_per_second:,.0f}",
        "MFU": "-" if speed.mfu is None else f"{speed.mfu:.1%}",
        "peak GiB": f"{speed.peak / GIB:.1f}",
        "beside": compared,
    }
    if prediction is not None:
        cells |= {"plan tokens/s": f"{prediction.tokens_per_second:,.0f}", "plan GiB": f"{prediction.peak / GIB:.1f}"}
        if prediction.efficiency is not None:
            cells["efficiency that fits"] = f"{prediction.efficiency:.2f}"
    return cells
