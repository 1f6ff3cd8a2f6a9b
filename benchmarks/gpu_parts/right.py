"""*right*: what a run computes, against the plain Hugging Face model in one process.

Each row is a real run of a small model by SGD, over the same documents in every step. A figure is the largest relative
difference over the steps (loss, norm of the gradient), and after the last of them that of the worst tensor of the
exported model. fp32 is held to 1e-5. In bf16 and fp16 two right programs differ by rounding, each by its own order of
sums, so the bounds there find a wrong scale, mask or mean, not a wrong last digit.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.figures import compare_records, compare_weights, find_skipped_steps
from benchmarks.gpu_parts.machine import ROOT, Machine
from benchmarks.gpu_parts.material import LENGTHS, save_adapter, save_model, save_records
from benchmarks.gpu_parts.oracle import Job
from benchmarks.gpu_parts.processes import Command, Deadline, RowFailed, run, run_python
from benchmarks.gpu_parts.rows import Cells, Row, Status, check_needs
from benchmarks.gpu_parts.training_runs import read_metrics, train, write_name

BOUNDS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STEPS, LEARNING_RATE = 3, 0.3
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}
_SECONDS = {"cuda": (20, 120), "cpu": (15, 240)}  # expected of a run, and at most
_STEPS_TO_RESUME = 20


@dataclass(frozen=True)
class Case:
    """A run and what it is compared with. needs: "gpu", or a package without which it cannot run."""

    name: str
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    precision: str = "fp32"
    adapter: bool = False
    in_4bit: bool = False
    packed: bool = False
    needs: tuple[str, ...] = ()


PP2 = ("num_stages=2",)
CASES = (
    Case("pp1, fp32"),
    Case("pp1, bf16", precision="bf16"),
    Case("pp1, fp16", precision="fp16", needs=("gpu",)),
    Case("pp2, fp32", PP2, world_size=2),
    Case("pp2, bf16", PP2, world_size=2, precision="bf16"),
    Case("pp2 interleaved, fp32", (*PP2, "schedule=interleaved"), world_size=2),
    Case("tp2, fp32", ("tensor_parallel_size=2",), world_size=2),
    Case("dp2, fp32", world_size=2),
    Case("packed, sdpa, fp32", ("attn_implementation=sdpa",), packed=True),
    Case("packed, auto, bf16", ("attn_implementation=auto",), precision="bf16", packed=True),
    Case(
        "packed, flash_attention_2, bf16", ("attn_implementation=flash_attention_2",), precision="bf16", packed=True,
        needs=("gpu", "flash_attn"),
    ),
    Case(
        "packed, flex_attention, bf16", ("attn_implementation=flex_attention",), precision="bf16", packed=True,
        needs=("gpu",),
    ),
    Case("LoRA, fp32", ("adapter=lora",), adapter=True),
    Case(
        "LoRA on 4 bits, fp32", ("adapter=lora", "adapter.load_in_4bit=true"), adapter=True, in_4bit=True,
        needs=("bitsandbytes",),
    ),
    Case("recompute grouped, fp32", ("activation_checkpoint_interval=2",)),
    Case("recompute every, fp32", ("activation_checkpoint_interval=2", "activation_checkpoint_mode=every")),
    Case("recompute selective, fp32", ("activation_checkpoint_interval=1", "activation_checkpoint_mode=selective")),
    Case("compile, fp32", ("compile=true",)),
    Case("offload, fp32", ("offload_optimizer=cpu",)),
)  # fmt: skip


class Right:
    """The rows of one machine, and what they share: model, adapter, documents, and the oracle of each kind."""

    TITLE = "right: relative differences to the plain Hugging Face model"
    COLUMNS = ("ranks", "loss", "gradient norm", "weights", "bound")

    def __init__(self, machine: Machine, folder: Path, logs: Path, tiny: bool) -> None:
        """folder: for what is thrown away. logs: for what the report keeps."""
        self.machine, self.folder, self.logs = machine, folder, logs
        self._tiny, self._scale = tiny, 1 if tiny else 4  # tokens of a row, in 128
        self._lock = threading.Lock()
        self._oracles: dict[tuple[Any, ...], Path] = {}
        self.model, self.adapter, self.records = folder / "model", folder / "adapter", folder / "records.jsonl"

    def list_rows(self) -> list[Row]:
        expected, limit = _SECONDS[self.machine.device]
        rows = [Row(case.name, partial(self._check_case, case), expected, limit) for case in CASES]
        rows.append(Row("save, kill, resume, fp32", self._check_resume, 3 * expected, 3 * limit))
        rows.append(Row("make demo", self._check_demo, 4 * expected, 3 * limit))
        return rows

    def prepare(self) -> None:
        """The material; the first to ask makes it."""
        with self._lock:
            if not self.records.exists():
                fields = TINY if self._tiny else SMALL
                save_model(self.model, max_position_embeddings=self._scale * 128, **fields)
                save_adapter(self.adapter, self.model)
                save_records(self.records, [length * self._scale for length in LENGTHS])

    def _check_case(self, case: Case, deadline: Deadline) -> tuple[Status, Cells]:
        check_needs(case.needs, self.machine)
        self.prepare()
        output = self._train(case.name, self._list_overrides(case), case.world_size, deadline)
        records = read_metrics(output)
        skipped = find_skipped_steps(records) if case.precision == "fp16" else ()
        oracle = self._find_oracle(case, skipped, deadline)
        figures = compare_records(records, json.loads((oracle / "figures.json").read_text()), skipped)
        figures["weights"] = compare_weights(output / "hf", oracle / "weights.safetensors")
        return self._judge(figures, case.precision, case.world_size)

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
        return [
            *self._shared_overrides(), f"global_batch_size={batch}", f"precision={case.precision}", "optimizer=sgd",
            f"learning_rate={LEARNING_RATE}", f"max_steps={STEPS}", f"data.packing={str(case.packed).lower()}",
            *([f"adapter.name_or_path={self.adapter}"] if case.adapter else []), *case.overrides,
        ]  # fmt: skip

    def _shared_overrides(self) -> list[str]:
        return [
            f"model_name_or_path={self.model}", f"train_file={self.records}", f"data.cache_dir={self.folder}/cache",
            "data.prompt_template='{prompt}'", f"max_seq_length={128 * self._scale}", "micro_batch_size=2",
            "lr_scheduler_type=constant", "warmup_ratio=0", "max_grad_norm=0", "activation_checkpoint_interval=0",
            "logging_steps=1",
        ]  # fmt: skip

    def _train(
        self,
        name: str,
        overrides: Sequence[str],
        world_size: int,
        deadline: Deadline,
        until: Callable[[Path], bool] | None = None,
    ) -> Path:
        """The output_dir of the run. until: of that folder; what the run is killed at."""
        output = self.folder / "runs" / write_name(name)
        killed = None if until is None else lambda: until(output)
        train(
            self.machine, [*overrides, f"output_dir={output}"], world_size=world_size,
            log=self.logs / f"{write_name(name)}.log", deadline=deadline, until=killed,
        )  # fmt: skip
        return output

    def _tokenize(self, *overrides: str) -> tuple[Any, Path]:
        """The config of a run and its tokenized documents."""
        from benchmarks.workload import compose_run
        from models.weights.vocabulary import open_tokenizer
        from training.inputs.datasets import prepare_file

        config = compose_run(*self._shared_overrides(), *overrides)
        return config, prepare_file(config, "train_file", open_tokenizer(self.model), None)

    def _count_rows(self) -> int:
        from data.storage.rows import count_rows
        from training.inputs.datasets import build_row_plan

        with self._lock:
            config, path = self._tokenize("data.packing=true")
            return count_rows(path, build_row_plan(config, "train_file"))

    def _find_oracle(self, case: Case, skipped: tuple[int, ...], deadline: Deadline) -> Path:
        """Its folder; the first to ask runs it."""
        kind = (case.precision, case.adapter, case.in_4bit, skipped)
        with self._lock:
            if kind not in self._oracles:
                self._oracles[kind] = self._run_oracle(case, skipped, deadline)
            return self._oracles[kind]

    def _run_oracle(self, case: Case, skipped: tuple[int, ...], deadline: Deadline) -> Path:
        name = f"oracle {case.name}"
        output = self.folder / write_name(name)
        output.mkdir(parents=True)
        job = Job(
            model=str(self.model), data=str(self._tokenize()[1]), output=str(output), device=self.machine.device,
            dtype=DTYPES[case.precision], steps=STEPS, learning_rate=LEARNING_RATE,
            adapter=str(self.adapter) if case.adapter else "", in_4bit=case.in_4bit, skipped=skipped,
        )  # fmt: skip
        job.save(output / "job.json")
        words = ["-m", "benchmarks.gpu_parts.oracle", str(output / "job.json")]
        run_python(self.machine, words, self.logs / f"{write_name(name)}.log", deadline)
        return output

    def _check_resume(self, deadline: Deadline) -> tuple[Status, Cells]:
        """Compares a run that is killed after a checkpoint and resumed with one that was not."""
        self.prepare()
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
        figures["weights"] = compare_weights(killed / "hf", whole / "hf" / "model.safetensors")
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
        environment = {**self.machine.environment(), "PATH": f"{scripts}:{os.environ['PATH']}"}
        return Command([*unset, *script], environment)


def has_checkpoint(output_dir: Path) -> bool:
    return (output_dir / "checkpoints" / "latest").exists()
