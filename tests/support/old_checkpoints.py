"""Training checkpoints of earlier versions of the project, in tests/training/checkpoint/fixtures, and their writer:

    PYTHONPATH=tests python -m support.old_checkpoints zero_bubble path/to/a/checkout

It trains by the code of that checkout, which is the version to be kept, and writes next to the checkpoint of step 3 the
metrics of steps 4 to 6 of the same run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from support.launching import BIN
from support.tiny import save_llama, save_tokenizer
from support.workers import free_port

FIXTURES = Path(__file__).resolve().parents[1] / "training" / "checkpoint" / "fixtures"
TRAIN_FILE = FIXTURES / "train.jsonl"
SAVED_STEP, STEPS = 3, 6
KEYS = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")
# All other keys have the defaults of conf/base.yaml, then as now
SETTINGS = (
    "global_batch_size=4",
    "max_seq_length=160",
    "precision=fp32",
    "learning_rate=0.01",
    "lr_scheduler_type=cosine",
    "warmup_ratio=0.03",
    "max_grad_norm=1.0",
    "activation_checkpoint_interval=1",
    f"max_steps={STEPS}",
    "logging_steps=1",
    "seed=7",
)


@dataclass(frozen=True)
class OldRun:
    """The layout that a checkpoint was saved at, and the keys in which its run differs from the others."""

    world_size: int
    overrides: tuple[str, ...]
    num_stages: int = 2
    bounds: str = "[2,3]"  # partition_method

    def list_overrides(self) -> tuple[str, ...]:
        layout = (f"num_stages={self.num_stages}", f"partition_method={self.bounds}")
        return (*SETTINGS, *layout, *self.overrides)


OLD_RUNS = {
    "adamw": OldRun(2, ("micro_batch_size=2", "optimizer=adamw")),
    "zero_bubble": OldRun(2, ("micro_batch_size=1", "optimizer=adamw", "schedule=zero_bubble"), bounds="[1,1,1,2]"),
    "zero_2": OldRun(4, ("micro_batch_size=1", "optimizer=adamw", "zero_stage=2")),
    "adamw_8bit": OldRun(2, ("micro_batch_size=1", "optimizer=adamw_8bit")),
}


def write_fixture(name: str, checkout: Path) -> None:
    """Train `OLD_RUNS[name]` by the code of `checkout`, and keep its checkpoint and the metrics of the steps after
    it."""
    with TemporaryDirectory() as folder:
        output_dir = train(OLD_RUNS[name], checkout, Path(folder))
        target = FIXTURES / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(output_dir / "checkpoints", target / "checkpoints")
        shutil.rmtree(target / "checkpoints" / f"global_step{STEPS}")
        (target / "checkpoints" / "latest").write_text(f"global_step{SAVED_STEP}")
        records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
        kept = [json.dumps({key: record[key] for key in KEYS}) for record in records[SAVED_STEP:]]
        (target / "metrics.jsonl").write_text("\n".join([*kept, ""]))


def train(run: OldRun, checkout: Path, workdir: Path) -> Path:
    """Train a tied Llama of two layers to the end, saving on the way. Returns output_dir."""
    model, output_dir = workdir / "model", workdir / "out"
    save_llama(
        model, tied=True, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    save_tokenizer(model)
    paths = (f"model_name_or_path={model}", f"train_file={TRAIN_FILE}", f"output_dir={output_dir}")
    saves = (f"data.cache_dir={workdir}/cache", f"save_steps={SAVED_STEP}")
    launcher = (BIN / "torchrun", f"--nproc_per_node={run.world_size}", f"--master_port={free_port()}")
    command = (*launcher, "trainer_base_ds_mp.py", *paths, *saves, *run.list_overrides())
    subprocess.run([str(part) for part in command], cwd=checkout.resolve(), check=True)
    return output_dir


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a checkpoint of an earlier version of the project.")
    parser.add_argument("name", choices=OLD_RUNS)
    parser.add_argument("checkout", type=Path)
    arguments = parser.parse_args()
    write_fixture(arguments.name, arguments.checkout)
