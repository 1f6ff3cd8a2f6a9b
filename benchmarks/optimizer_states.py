"""Measures what small optimizer states cost in quality: the same run with each, and its evaluation loss against fp32.

    python benchmarks/optimizer_states.py --train_file gsm8k/train.jsonl [--steps 200] [--kinds fp32 bf16 8bit]

A model of 3.3 M random parameters learns questions and answers from the start, with the same seed, data and learning
rate; the last 200 records are held out. Each run is one process of the trainer itself. A few minutes on one core each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.make_demo import train_tokenizer  # noqa: E402

KINDS = {
    "fp32": ("optimizer=adamw",),
    "bf16": ("optimizer=adamw", "optimizer.state_dtype=bf16"),
    "8bit": ("optimizer=adamw_8bit",),
    "lion": ("optimizer=lion", "learning_rate=1e-4"),
}
HELD_OUT = 200  # records
VOCAB_SIZE = 2048  # of conf/model/llama_tiny.yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--prompt_field", default="question")
    parser.add_argument("--completion_field", default="answer")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["fp32", "bf16", "8bit"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        prepare(arguments, Path(work))
        found = {kind: train(arguments, Path(work), kind) for kind in arguments.kinds}
    print("| state | eval loss | against fp32 | seconds per step |\n|---|---|---|---|")
    for kind, (loss, seconds) in found.items():
        difference = f"{loss / found['fp32'][0] - 1:+.2%}" if "fp32" in found else ""
        print(f"| {kind} | {loss:.4f} | {difference} | {seconds:.2f} |")


def prepare(arguments: argparse.Namespace, work: Path) -> None:
    records = [json.loads(line) for line in arguments.train_file.read_text().splitlines()]
    fields = (arguments.prompt_field, arguments.completion_field)
    texts = [{field: record[field] for field in fields} for record in records]
    train_tokenizer(texts[:-HELD_OUT], VOCAB_SIZE).save_pretrained(work / "tokenizer")
    for name, part in (("train", texts[:-HELD_OUT]), ("eval", texts[-HELD_OUT:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))


def train(arguments: argparse.Namespace, work: Path, kind: str) -> tuple[float, float]:
    """The evaluation loss at the end, and the median of the steps' times."""
    out = work / kind
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1",
        str(ROOT / "trainer_base_ds_mp.py"), "-cn", "base", "model=llama_tiny", "init=random",
        "model_name_or_path=none",
        f"tokenizer_name_or_path={work}/tokenizer", f"train_file={work}/train.jsonl", f"eval_file={work}/eval.jsonl",
        f"data.prompt_field={arguments.prompt_field}", f"data.completion_field={arguments.completion_field}",
        f"data.cache_dir={work}/cache", f"output_dir={out}", "data.packing=true", "max_seq_length=512",
        "micro_batch_size=2", "global_batch_size=2", "learning_rate=1e-3", "weight_decay=0.1", "precision=bf16",
        "activation_checkpoint_interval=0", f"max_steps={arguments.steps}", "logging_steps=1",
        *KINDS[kind],
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = sorted(line["step_time"] for line in lines if "step_time" in line)
    return next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line), times[len(times) // 2]


if __name__ == "__main__":
    main()
