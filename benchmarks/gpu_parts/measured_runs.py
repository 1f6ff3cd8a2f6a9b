"""Runs for speed: a model of a shape, full rows of data, the run's own figures, and the plan of the same run."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.machine import Machine, is_installed
from benchmarks.gpu_parts.material import save_records
from benchmarks.gpu_parts.processes import Deadline, RowFailed, run_python
from benchmarks.gpu_parts.rows import NotRun
from benchmarks.gpu_parts.shapes import find_shape
from benchmarks.gpu_parts.training_runs import Record, read_metrics, train
from console import pluralize

WARM_UP, STEPS = 2, 4
TRACED_STEP = WARM_UP + 2  # from 1
GIB = 2**30
# What others report for 8B, and for 70B by its tenth layers, at a sequence of 4,096: tokens/s, and on what; the rest of
# it: docs/performance.md
_MARK_OF_8B = (10_471, "one H200, all recomputed, bf16 without fp32 weights, 57.8% MFU")
MARKS = {
    "8b full": _MARK_OF_8B,
    "8b full, all recomputed": _MARK_OF_8B,
    "8b LoRA": (12_473, "an H100, nothing recomputed"),
    "10 layers of 70B, LoRA, qkv": (8 * 1_797, "1,797 per H100 of 8, times the 8 parts of ten layers"),
}
_NEEDS = {
    "compile=true": ("compiler",),
    "fused_kernels=auto": ("gpu", "compiler", "liger_kernel"),
    "optimizer=adamw_8bit": ("bitsandbytes",),
    "adapter.load_in_4bit=true": ("bitsandbytes",),
    "flash_kernels=fa3": ("hopper", "flash_attn_interface"),
}
_DOCUMENTS_A_ROW = 4  # of packed data


def list_needs(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns what a run needs, as in `cases.Case`."""
    return tuple(dict.fromkeys(need for key in overrides for need in _NEEDS.get(key, ())))


@dataclass(frozen=True)
class Speed:
    """Measurements of the steps after the first two, which warm up. tokens_per_second: median. peak: bytes of the
    fullest GPU."""

    tokens_per_second: float
    mfu: float | None
    peak: float


@dataclass(frozen=True)
class Prediction:
    """The plan of the same run. mfu: of the planned step. efficiency: with which the plan's tokens/s would be the
    measured ones."""

    tokens_per_second: float
    mfu: float
    peak: float
    efficiency: float | None


class MeasuredRuns:
    """Runs that are measured. Only one shape's weights are on disk at a time."""

    def __init__(self, machine: Machine, folder: Path, logs: Path, tiny: bool) -> None:
        self.machine, self.folder, self.logs, self._tiny = machine, folder, logs, tiny
        self.seq_length, self.global_batch_size = (128, 4) if tiny else (4096, 8)
        self._precision = "fp32" if machine.is_cpu else "bf16"  # most CPUs are slow in bf16

    def find_fields(self, shape: str) -> dict[str, Any]:
        return find_shape(shape, self._tiny, self.seq_length)

    def prepare_model(self, shape: str, deadline: Deadline) -> Path:
        """The folder of a shape's weights; those of another shape are deleted."""
        wanted = self.folder / "models" / shape.replace(" ", "_")
        if not (wanted / "config.json").exists():
            shutil.rmtree(wanted.parent, ignore_errors=True)
            self._check_room(shape)
            words = ["-m", "benchmarks.gpu_parts.material", str(wanted), self.machine.device, "bfloat16"]
            log = self.logs / f"{wanted.name}_weights.log"
            run_python(self.machine, [*words, json.dumps(self.find_fields(shape))], log, deadline)
        return wanted

    def _check_room(self, shape: str) -> None:
        """Raises NotRun where a shape's weights do not fit into the temporary folder."""
        from benchmarks.workload import build_llama
        from models.architecture.lookup import build_layers

        layers = build_layers(build_llama(**self.find_fields(shape)))
        size = 2 * sum(math.prod(dims) for layer in layers for dims in layer.shapes().values())  # bf16
        if shutil.disk_usage(self.folder).free < size:
            raise NotRun(f"{size / 1e9:.0f} GB of weights do not fit into {self.folder}; TMPDIR names another folder")

    def prepare_records(self, packed: bool) -> Path:
        """Samples of exactly a row, or of a quarter of one."""
        file = self.folder / f"records_{'packed' if packed else 'full'}.jsonl"
        if not file.exists():
            parts = _DOCUMENTS_A_ROW if packed else 1
            lengths = [self.seq_length // parts] * (parts * 2 * self.global_batch_size)
            save_records(file, lengths, prompt=1)  # all other tokens are targets, as in what others measure
        return file

    def list_overrides(self, model: Path, overrides: Sequence[str]) -> list[str]:
        """All layers recomputed, unless `overrides` say otherwise."""
        return [
            f"model_name_or_path={model}", f"train_file={self.prepare_records('data.packing=true' in overrides)}",
            f"data.cache_dir={self.folder}/cache", "data.prompt_template='{prompt}'", f"precision={self._precision}",
            f"max_seq_length={self.seq_length}", "micro_batch_size=1", f"global_batch_size={self.global_batch_size}",
            "activation_checkpoint_interval=1", "logging_steps=1", f"max_steps={WARM_UP + STEPS}",
            "save_final=false",  # 130 GB of 8B for a few seconds of training, more than many a machine's disk has
            *overrides,
        ]  # fmt: skip

    def run(
        self, name: str, shape: str, overrides: Sequence[str], deadline: Deadline, world_size: int = 1
    ) -> tuple[list[str], Path]:
        """Runs the trainer; returns its arguments and output_dir."""
        given = self.list_overrides(self.prepare_model(shape, deadline), overrides)
        output = self.folder / "runs" / name
        train(
            self.machine, [*given, f"output_dir={output}"], world_size=world_size, log=self.logs / f"{name}.log",
            deadline=deadline,
        )  # fmt: skip
        return given, output

    def choose_fitting(
        self,
        shape: str,
        overrides: Sequence[str],
        choices: Sequence[Sequence[str]],
        deadline: Deadline,
        world_size: int,
    ) -> Sequence[str]:
        """Returns the first of `choices` that fits the GPU and this host by the plan; the only one, or on a machine
        that no file of conf/hardware describes the first, unplanned. Raises NotRun where none fits."""
        hardware = find_hardware(self.machine)
        if len(choices) == 1 or self.machine.is_cpu or hardware is None:
            return choices[0]
        model = self.prepare_model(shape, deadline)
        usable = [choice for choice in choices if "optimizer=adamw_8bit" not in choice or is_installed("bitsandbytes")]
        for choice in usable:
            given = self.list_overrides(model, [*overrides, *choice])
            if _fits(hardware, [*given, f"world_size={world_size}"]):
                return choice
        raise NotRun("too large for this machine by the plan")

    def predict(self, overrides: Sequence[str], world_size: int, measured: float | None) -> Prediction | None:
        """Returns the plan of a run; None if no file of conf/hardware describes the GPU or the plan refuses the run."""
        from errors import UserError

        hardware = find_hardware(self.machine)
        try:
            return None if hardware is None else _predict(hardware, [*overrides, f"world_size={world_size}"], measured)
        except UserError:
            return None


def read_speed(records: Sequence[Record]) -> Speed:
    """Raises RowFailed where no step is left to measure."""
    steps = records[WARM_UP:]
    if not steps:
        raise RowFailed(f"{pluralize(len(records), 'step')} reported, and {WARM_UP} of them warm up")
    mfus = [record["mfu"] for record in steps if "mfu" in record]
    return Speed(
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in steps),
        mfu=statistics.median(mfus) if mfus else None,
        peak=max(max(record["peak_memory"]) for record in steps),
    )


def measure(
    runs: MeasuredRuns, name: str, shape: str, overrides: Sequence[str], deadline: Deadline, world_size: int
) -> Any:
    """(Speed, overrides) of a run."""
    given, output = runs.run(name, shape, overrides, deadline, world_size)
    return read_speed(read_metrics(output)), given


def find_hardware(machine: Machine) -> str | None:
    """Returns the file of conf/hardware that describes the GPU."""
    from training.config.schema import load_hardware

    name = "cpu" if machine.is_cpu else machine.name
    return next((known.name for known in load_hardware() if re.search(known.device_name, name)), None)


def _resolve(hardware: str, overrides: Sequence[str]) -> tuple[Any, Any, Any]:
    """The config, model and machine of a plan."""
    from benchmarks.workload import compose_run
    from training.costs.hardware import complete_hardware
    from training.plan_command.run import resolve_planned

    config = compose_run(*overrides, f"hardware={hardware}")
    return config, resolve_planned(config), complete_hardware(config.hardware, config.precision, config.world_size)


def _fits(hardware: str, overrides: Sequence[str]) -> bool:
    from training.distributed.host_memory import measure_host_memory
    from training.plan_command.run import build_plan

    host_memory = measure_host_memory() / GIB  # of this host; the file assumes one
    config, model, machine = _resolve(hardware, [*overrides, f"hardware.host_memory={host_memory}"])
    return build_plan(config, model, machine).fits


def _predict(hardware: str, overrides: Sequence[str], measured: float | None) -> Prediction:
    from training.plan_command.run import build_plan

    config, model, machine = _resolve(hardware, overrides)

    def predict_rate(efficiency: float) -> float:
        plan = build_plan(config, model, replace(machine, efficiency=efficiency))
        return plan.tokens_per_second

    plan = build_plan(config, model, machine)
    peak = max(stage.memory.peak for stage in plan.stages)
    times_layers = config.hardware.peak_flops is None  # then no efficiency is assumed
    fitting = None if measured is None or times_layers else fit_efficiency(predict_rate, measured)
    return Prediction(plan.tokens_per_second, plan.mfu, peak, fitting)


def fit_efficiency(predict_rate: Any, measured: float) -> float | None:
    """The efficiency at which a growing `predict_rate` gives the measured rate; None when none from 1% to 150% does, or
    all above one do, as the host that launches is slower than the GPU."""
    low, high = 0.01, 1.5
    if not predict_rate(low) <= measured < predict_rate(high):
        return None
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if predict_rate(middle) < measured else (low, middle)
    return (low + high) / 2
