"""Turns the items of `items.py` into rows: each by the process that can answer its question."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.cases import Case
from benchmarks.gpu_parts.items import DeviceCheck, Item, TransferCheck, Variant
from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.material import save_tokenizer
from benchmarks.gpu_parts.measured_runs import GIB, MARKS, MeasuredRuns, list_needs
from benchmarks.gpu_parts.processes import Command, Deadline, RowFailed, Worker, list_ranks, read_tail, run
from benchmarks.gpu_parts.right import Right
from benchmarks.gpu_parts.rows import Cells, Row, Status, check_needs
from benchmarks.gpu_parts.training_runs import write_name
from benchmarks.gpu_parts.why import read_profiles, render

_MOST_OF_EXPECTED, _LEAST_LIMIT = 3, 90  # of an item's time: as a multiple of what is expected, and in seconds
_CPU_SECONDS, _CPU_LIMIT = 15, 1200  # expected of an item on a CPU, where all are small, and at most
_PRODUCT = {"cuda": 8192, "cpu": 256}  # rows of the matrices of the check of the device
_BOUND = 1e-2  # of a product in bf16
_HANG = "Timeout ("  # what faulthandler prints in a rank that has not ended (`transfers.py`)


class PlannedRuns(MeasuredRuns):
    """Runs of models without weights on disk: their plans, and what a worker is given."""

    def prepare_model(self, shape: str, deadline: Deadline) -> Path:
        from benchmarks.workload import build_llama

        folder = self.folder / "models" / shape.replace(" ", "_")
        if not (folder / "config.json").exists():
            build_llama(**self.find_fields(shape)).save_pretrained(folder)
            save_tokenizer(folder)
        return folder


class Window:
    """The rows of one machine."""

    def __init__(self, machine: Machine, scratch: Path, folder: Path, tiny: bool) -> None:
        """scratch: for what is thrown away. folder: for what the report keeps."""
        self._machine, self._scratch, self._folder = machine, scratch, folder
        self._logs = scratch / "logs"
        self._right = Right(machine, scratch / "right", self._logs, tiny)
        self._runs = PlannedRuns(machine, scratch / "speed", self._logs, tiny)
        for part in (self._right.folder, self._runs.folder):
            part.mkdir()
        self._worker = Worker(self._build_worker, self._logs)

    def _build_worker(self) -> Command:
        words = [sys.executable, "-m", "benchmarks.gpu_parts.speed_worker"]
        (command,) = list_ranks(self._machine.first_gpu(), 1, words)
        return command

    def build_row(self, item: Item) -> Row:
        limit = max(_LEAST_LIMIT, _MOST_OF_EXPECTED * item.seconds)
        expected, limit = (_CPU_SECONDS, _CPU_LIMIT) if self._machine.is_cpu else (item.seconds, limit)
        return Row(item.name, partial(self._answer, item), expected, limit)

    def end(self) -> None:
        self._worker.end()

    def _answer(self, item: Item, deadline: Deadline) -> tuple[Status, Cells]:
        match item.task:
            case Case():
                return self._right.check_case(item.task, deadline)
            case TransferCheck():
                return self._check_transfers(item.name, item.task, deadline)
            case DeviceCheck():
                return self._check_device(deadline)
            case Variant():
                return self._measure(item.name, item.task, deadline)

    def _check_device(self, deadline: Deadline) -> tuple[Status, Cells]:
        self._worker.send({"kind": "device", "size": _PRODUCT[self._machine.device]})
        found = self._worker.receive(deadline)
        cells = {
            "error": f"{found['error']:.1e}", "bound": f"{_BOUND:.0e}", "TFLOP/s": f"{found['flops'] / 1e12:,.1f}",
            "GB/s": f"{found['bytes'] / 1e9:,.0f}",
        }  # fmt: skip
        return Status.ok if found["error"] <= _BOUND else Status.wrong, cells

    def _check_transfers(self, name: str, check: TransferCheck, deadline: Deadline) -> tuple[Status, Cells]:
        check_needs(check.needs, self._machine)
        words = [sys.executable, "-m", "benchmarks.gpu_parts.transfers", *check.arguments]
        ranks = list_ranks(self._machine, check.ranks, words)
        log = self._logs / f"{write_name(name)}.log"
        hangs = False
        try:
            run([replace(rank, environment={**rank.environment, **check.environment}) for rank in ranks], log, deadline)
        except RowFailed:
            hangs = _HANG in log.read_text(errors="replace")
            if not hangs:
                raise
        if hangs != check.hangs:
            text = "hangs, and was predicted to end" if hangs else "ends, and was predicted to hang"
            raise RowFailed(text, read_tail(log))
        return Status.ok, {"ranks": str(check.ranks), "as predicted:": "hangs" if hangs else "ends"}

    def _measure(self, name: str, variant: Variant, deadline: Deadline) -> tuple[Status, Cells]:
        check_needs(list_needs(variant.overrides), self._machine)
        times = variant.times_longer
        length, batch = self._runs.seq_length * times, self._runs.global_batch_size // times
        own = (*variant.overrides, f"max_seq_length={length}", f"global_batch_size={batch}")
        chosen = self._runs.choose_fitting(variant.shape, own, variant.choices, deadline, 1)
        model = self._runs.prepare_model(variant.shape, deadline)
        overrides = self._runs.list_overrides(model, (*own, *chosen))
        traced = self._scratch / "traced" / write_name(name)
        job = {"kind": "speed", "fields": self._runs.find_fields(variant.shape), "overrides": overrides}
        self._worker.send({**job, "trace": str(traced) if variant.traced else None})
        # While the worker measures; a CPU's plan would time layers next to it
        prediction = None if self._machine.is_cpu else self._runs.predict(overrides, 1, None)
        found = self._worker.receive(deadline)
        cells = self._describe_speed(name, found, prediction)
        if chosen:
            cells["with"] = " ".join(chosen)
        if variant.traced:
            (file,) = traced.glob("profile_step_*.txt")
            shutil.copyfile(file, self._folder / f"{write_name(name)}.txt")
            cells |= render(list(read_profiles(traced)))
        return Status.measured, cells

    def _describe_speed(self, name: str, found: dict[str, Any], prediction: Any) -> Cells:
        rate = found["tokens_per_second"]
        cells = {"tokens/s": f"{rate:,.0f}", "peak GiB": f"{found['peak'] / GIB:.1f}"}
        cells["ms a micro-batch"] = f"{1000 * found['tokens'] / rate:,.1f}"
        if prediction is not None:
            planned = prediction.tokens_per_second
            cells["tokens/s"] += f" (plan {planned:,.0f}, {rate / planned:.2f} of it)"
            cells["MFU"] = f"{prediction.mfu * rate / planned:.1%}"
            cells["peak GiB"] += f" (plan {prediction.peak / GIB:.1f})"
        if name in MARKS and not self._machine.is_cpu:
            mark, what = MARKS[name]
            cells["mark"] = f"{rate / mark:.2f} of {mark:,} ({what})"
        if found["obstacle"]:
            cells["nothing fused:"] = found["obstacle"]
        return cells
