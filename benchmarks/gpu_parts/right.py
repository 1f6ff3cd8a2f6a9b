"""*right*: what a run computes, against the plain Hugging Face model in one process.

Each row is a real run of a small model (`cases.py`), over the same samples in every step. A figure is the largest
relative difference over the steps (loss, norm of the gradient), and after the last of them that of the worst tensor of
the exported model. fp32 is held to 1e-5. In bf16 and fp16 two right programs differ by rounding, each by its own order
of sums, so the bounds there find a wrong scale, mask or mean, not a wrong last digit.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers  # noqa: F401 (rows are threads: one would see what another has imported by half)

from benchmarks.gpu_parts.cases import CASES, EPSILON, SHARED, STEPS, TASKS, Case
from benchmarks.gpu_parts.figures import compare_records, compare_weights, find_skipped_steps
from benchmarks.gpu_parts.machine import ROOT, Machine
from benchmarks.gpu_parts.material import LENGTHS, save_adapter, save_model, save_records
from benchmarks.gpu_parts.oracle import Job
from benchmarks.gpu_parts.processes import TRAINER, Command, Deadline, RowFailed, run, run_python
from benchmarks.gpu_parts.routers import compare_choices, load_choices
from benchmarks.gpu_parts.rows import Cells, Row, Status, check_needs
from benchmarks.gpu_parts.training_runs import read_metrics, train, write_name
from training.distributed.ranks import find_free_port

BOUNDS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
# Expected of a run, and at most: the first ones import from a cold disk, and some compile
_SECONDS = {"cuda": (20, 180), "cpu": (15, 240)}
_STEPS_TO_RESUME = 20
_WATCHED_TRAINER = Path(__file__).with_name("watched_trainer.py")


class Right:
    """The rows of one machine, and what they share: models, adapter, samples, and the oracle of each kind."""

    TITLE = "right: relative differences to the plain Hugging Face model"
    COLUMNS = ("ranks", "loss", "gradient norm", "weights", "bound", "routers")

    def __init__(self, machine: Machine, folder: Path, logs: Path, tiny: bool) -> None:
        """folder: for what is thrown away. logs: for what the report keeps."""
        self.machine, self.folder, self.logs = machine, folder, logs
        self._tiny, self._scale = tiny, 1 if tiny else 4  # tokens of a row, in 128
        self._lock = threading.Lock()
        self._oracle_locks: dict[Job, threading.Lock] = {}
        self._oracles: dict[Job, Path] = {}

    def list_rows(self) -> list[Row]:
        expected, limit = _SECONDS[self.machine.device]
        rows = [Row(case.name, partial(self.check_case, case), expected, limit) for case in CASES]
        rows.append(Row("save, kill, resume, fp32", self._check_resume, 3 * expected, 3 * limit))
        rows.append(Row("make demo", self._check_demo, 4 * expected, 3 * limit))
        return rows

    def find_model(self, kind: str = "llama") -> Path:
        """The folder of a model of `material.MODELS`; the first to ask makes it."""
        folder = self.folder / "models" / kind
        with self._lock:
            if not folder.exists():
                fields = TINY if self._tiny else SMALL
                save_model(folder, kind=kind, max_position_embeddings=self._scale * 128, **fields)
        return folder

    def find_adapter(self, name: str) -> Path:
        """Returns an adapter of the model of this name; the first to ask makes it."""
        model, folder = self.find_model(name), self.folder / f"adapter-{name}"
        with self._lock:
            if not folder.exists():
                save_adapter(folder, model)
        return folder

    def find_records(self, task: str = "sft") -> Path:
        """The file of a task; the first to ask makes it."""
        file = self.folder / f"{task}.jsonl"
        with self._lock:
            if not file.exists():
                save_records(file, [length * self._scale for length in LENGTHS], TASKS[task].make_record)
        return file

    def check_case(self, case: Case, deadline: Deadline) -> tuple[Status, Cells]:
        check_needs(case.needs, self.machine)
        script = _WATCHED_TRAINER if case.has_routers_to_compare else TRAINER
        output = self._train(case.name, self._list_overrides(case), case.world_size, deadline, script=script)
        records = read_metrics(output)
        skipped = find_skipped_steps(records) if case.precision == "fp16" else ()
        oracle = self._find_oracle(case, skipped, deadline)
        expected = json.loads((oracle / "figures.json").read_text())
        figures = compare_records(records, expected, skipped)
        figures["weights"] = compare_weights(output / "hf", oracle)
        status, cells = self._judge(figures, case.precision, case.world_size)
        if case.has_routers_to_compare:
            chosen = load_choices(output.glob("routers_*.pt"))
            cells["routers"] = str(compare_choices(chosen, load_choices([oracle / "routers.pt"])))
        return status, cells

    def _judge(self, figures: dict[str, float], precision: str, world_size: int) -> tuple[Status, Cells]:
        bound = BOUNDS[precision]
        right = all(figure <= bound for figure in figures.values())  # not so of a NaN
        cells = {name: f"{figure:.1e}" for name, figure in figures.items()}
        ranks = {"ranks": self._describe_ranks(world_size), "bound": f"{bound:.0e}"}
        return Status.ok if right else Status.wrong, {**ranks, **cells}

    def _describe_ranks(self, world_size: int) -> str:
        gpus = min(world_size, len(self.machine.gpus))
        return f"{world_size}" if self.machine.is_cpu else f"{world_size} on {gpus} GPU{'s' if gpus > 1 else ''}"

    def _list_overrides(self, case: Case) -> list[str]:
        batch = self._count_rows() if case.packed else len(LENGTHS)
        adapter = [f"adapter.name_or_path={self.find_adapter(case.model)}"] if case.adapter else []
        return [
            *self._shared_overrides(case.model, case.task), f"global_batch_size={batch}", *case.list_keys(), *adapter,
        ]  # fmt: skip

    def _shared_overrides(self, model: str = "llama", task: str = "sft") -> list[str]:
        return [
            f"model_name_or_path={self.find_model(model)}", f"train_file={self.find_records(task)}",
            f"data.cache_dir={self.folder}/cache", f"max_seq_length={128 * self._scale}", *SHARED,
        ]  # fmt: skip

    def _train(
        self,
        name: str,
        overrides: Sequence[str],
        world_size: int,
        deadline: Deadline,
        until: Callable[[Path], bool] | None = None,
        script: Path = TRAINER,
    ) -> Path:
        """The output_dir of the run. until: of that folder; what the run is killed at. script: as in `train`."""
        output = self.folder / "runs" / write_name(name)
        killed = None if until is None else lambda: until(output)
        train(
            self.machine, [*overrides, f"output_dir={output}"], world_size=world_size,
            log=self.logs / f"{write_name(name)}.log", deadline=deadline, until=killed, script=script,
        )  # fmt: skip
        return output

    def _tokenize(self, case: Case) -> tuple[Any, Path]:
        """The config of a case and its tokenized samples."""
        from benchmarks.workload import compose_run
        from models.weights.vocabulary import open_tokenizer
        from training.inputs.datasets import prepare_file

        overrides = [*self._shared_overrides(case.model, case.task), *case.list_keys()]
        with self._lock:
            config = compose_run(*overrides)
            return config, prepare_file(config, "train_file", open_tokenizer(config.model_name_or_path), None)

    def _count_rows(self) -> int:
        from data.storage.rows import count_rows
        from training.inputs.datasets import build_row_plan

        config, path = self._tokenize(Case("packed", packed=True))
        with self._lock:
            return count_rows(path, build_row_plan(config, "train_file"))

    def _find_oracle(self, case: Case, skipped: tuple[int, ...], deadline: Deadline) -> Path:
        """Its folder; the first to ask runs it."""
        update = "sgd" if case.optimizer == "sgd" else "adamw"
        _, samples = self._tokenize(Case("of the task", model=case.model, task=case.task))
        job = Job(
            model=str(self.find_model(case.model)), data=str(samples), output="",
            device=self.machine.device, dtype=DTYPES[case.precision], steps=STEPS, learning_rate=case.learning_rate,
            task=case.task, optimizer=update, epsilon=EPSILON,
            adapter=str(self.find_adapter(case.model)) if case.adapter else "", in_4bit=case.in_4bit, skipped=skipped,
        )  # fmt: skip
        with self._lock:
            lock = self._oracle_locks.setdefault(job, threading.Lock())
        with lock:
            if job not in self._oracles:
                self._oracles[job] = self._run_oracle(case.name, job, deadline)
            return self._oracles[job]

    def _run_oracle(self, name: str, job: Job, deadline: Deadline) -> Path:
        output = self.folder / write_name(f"oracle {name}")
        output.mkdir(parents=True)
        replace(job, output=str(output)).save(output / "job.json")
        words = ["-m", "benchmarks.gpu_parts.oracle", str(output / "job.json")]
        run_python(self.machine, words, self.logs / f"{output.name}.log", deadline)
        return output

    def _check_resume(self, deadline: Deadline) -> tuple[Status, Cells]:
        """Compares a run that is killed after a checkpoint and resumed with one that was not."""
        overrides = [
            *self._shared_overrides(), f"global_batch_size={len(LENGTHS)}", "precision=fp32", "optimizer=adamw",
            "optimizer.eps=1e-4", "learning_rate=1e-3", f"max_steps={_STEPS_TO_RESUME}", "save_steps=2",
        ]  # fmt: skip
        whole = self._train("resume whole", overrides, 1, deadline)
        killed = self._train("resume killed", overrides, 1, deadline, until=has_checkpoint)
        if (killed / "completed.json").exists():
            raise RowFailed("it ended before it was killed")
        self._train("resume killed", [*overrides, "resume=latest"], 1, deadline)
        figures = compare_records(read_metrics(killed), read_metrics(whole))
        figures["weights"] = compare_weights(killed / "hf", whole / "hf")
        return self._judge(figures, "fp32", 1)

    def _check_demo(self, deadline: Deadline) -> tuple[Status, Cells]:
        """The commands of the README, through the deepspeed launcher; at --tiny with a few steps."""
        run([self.build_demo_command()], self.logs / "demo.log", deadline)
        completed = json.loads((ROOT / "outputs" / "demo" / "completed.json").read_text())
        right = math.isfinite(completed["eval_loss"])
        return Status.ok if right else Status.wrong, {"loss": f"eval_loss {completed['eval_loss']:.3f}"}

    def build_demo_command(self) -> Command:
        """Runs it as a user would: the script chooses whether two stages run on GPUs or on the CPU. Where the
        packages lie in a folder of their own (`pip install --target`), so do their commands."""
        import importlib.util

        unset = [] if self.machine.is_cpu else ["env", "-u", "DS_ACCELERATOR"]
        script = ["bash", str(ROOT / "scripts" / "quickstart.sh"), *(["max_steps=6"] if self._tiny else [])]
        spec = importlib.util.find_spec("deepspeed")
        scripts = Path(spec.origin or "").parents[1] / "bin" if spec is not None else Path()
        path = f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` is the one that runs this
        # Another run on this machine may have the launcher's default port
        environment = {**self.machine.environment(), "PATH": path, "MASTER_PORT": str(find_free_port())}
        return Command([*unset, *script], environment)


def has_checkpoint(output_dir: Path) -> bool:
    return (output_dir / "checkpoints" / "latest").exists()
