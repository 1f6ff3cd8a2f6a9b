"""Measures what a teacher adds: a student of half its layers, with and without it, against the teacher's held-out loss.

    python benchmarks/distill.py --train_file gsm8k/train.jsonl [--teacher_steps 400] [--steps 150] [--samples 1000]

A model of 3.3 M random parameters learns questions and answers and becomes the teacher of one with half its layers,
which has seen no text before. Its students have the same seed, data and learning rate; the last 200 records are held
out. Each run is one process of the trainer itself. Half an hour on one core. The second table compares the divergence
over k tokens and the event of all others with that over the whole vocabulary, of the same two models.
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

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from models.losses.divergence import DistillOptions, Teaching, choose_top  # noqa: E402
from models.losses.options import Divergence  # noqa: E402
from scripts.make_demo import train_tokenizer  # noqa: E402

HELD_OUT = 200  # records
LAYERS, VOCAB_SIZE = 6, 2048  # of conf/model/llama_tiny.yaml
TOP_K = (4, 16, 64, 256, VOCAB_SIZE)
STUDENTS = {
    "without a teacher": None,
    "forward": ("distill.coef=0.5", "distill.divergence=forward"),
    "reverse": ("distill.coef=0.5", "distill.divergence=reverse"),
    "jensen_shannon": ("distill.coef=0.5", "distill.divergence=jensen_shannon"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--prompt_field", default="question")
    parser.add_argument("--completion_field", default="answer")
    parser.add_argument("--teacher_steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--samples", type=int, default=1000, help="records of the students; of the teacher all")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=["without a teacher", "forward"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        prepare(arguments, work)
        teacher = train(arguments, work, "teacher", f"max_steps={arguments.teacher_steps}")
        keys = (f"model.num_hidden_layers={LAYERS // 2}", f"max_steps={arguments.steps}")
        keys += (f"data.max_samples={arguments.samples}",)
        found = {}
        for student in arguments.students:
            taught = STUDENTS[student]
            given = () if taught is None else (f"distill.teacher={work}/teacher/hf", *taught)
            found[student] = train(arguments, work, student.replace(" ", "_"), *keys, *given)
        print("| student | eval loss | above the teacher's |\n|---|---|---|")
        print(f"| the teacher | {teacher:.4f} | |")
        for student, loss in found.items():
            print(f"| {student} | {loss:.4f} | {loss - teacher:.4f} |")
        print_top_k(arguments, work, arguments.students[-1].replace(" ", "_"))


@torch.no_grad()
def print_top_k(arguments: argparse.Namespace, work: Path, student: str) -> None:
    """Print, for several k, how much of the teacher's probability k tokens cover, and the share of each divergence that
    they see. Over the targets of held-out records."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer", trust_remote_code=False)
    models = [
        AutoModelForCausalLM.from_pretrained(work / name / "hf", dtype=torch.float32, trust_remote_code=False).eval()
        for name in (student, "teacher")
    ]
    log_probabilities: list[list[torch.Tensor]] = [[], []]
    for line in (work / "eval.jsonl").read_text().splitlines()[:50]:
        record = json.loads(line)
        ids = tokenizer(record[arguments.prompt_field] + "\n" + record[arguments.completion_field])["input_ids"][:256]
        for model, kept in zip(models, log_probabilities, strict=True):
            kept.append(model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1))
    log_p, log_q = (torch.cat(kept) for kept in log_probabilities)
    totals: dict[int, list[float]] = {}
    for top_k in TOP_K:
        token_ids, logs = choose_top(log_q, top_k, None, VOCAB_SIZE)
        totals[top_k] = [1 - logs[:, -1].exp().mean().item()]
        for divergence in Divergence:
            teaching = Teaching(DistillOptions(1.0, 1.0, divergence), token_ids, logs)
            teaching.compare(slice(0, len(log_p)), log_p, None, needs_gradient=False)
            totals[top_k].append(teaching.total.item() / len(log_p))
    print("| k | covered | " + " | ".join(each.value for each in Divergence) + " |\n|---|---|---|---|---|")
    for top_k, (covered, *values) in totals.items():
        shares = [f"{value / whole:.1%}" for value, whole in zip(values, totals[VOCAB_SIZE][1:], strict=True)]
        print(f"| {top_k} | {covered:.1%} | " + " | ".join(shares) + " |")


def prepare(arguments: argparse.Namespace, work: Path) -> None:
    records = [json.loads(line) for line in arguments.train_file.read_text().splitlines()]
    fields = (arguments.prompt_field, arguments.completion_field)
    texts = [{field: record[field] for field in fields} for record in records]
    train_tokenizer(texts[:-HELD_OUT], VOCAB_SIZE).save_pretrained(work / "tokenizer")
    for name, part in (("train", texts[:-HELD_OUT]), ("eval", texts[-HELD_OUT:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))


def train(arguments: argparse.Namespace, work: Path, name: str, *keys: str) -> float:
    """Return the evaluation loss at the end, of the next token."""
    out = work / name
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1",
        str(ROOT / "trainer_base_ds_mp.py"), "-cn", "base", "model=llama_tiny", "init=random",
        "model_name_or_path=none",
        f"tokenizer_name_or_path={work}/tokenizer", f"train_file={work}/train.jsonl", f"eval_file={work}/eval.jsonl",
        f"data.prompt_field={arguments.prompt_field}", f"data.completion_field={arguments.completion_field}",
        f"data.cache_dir={work}/cache", f"output_dir={out}", "data.packing=true", "max_seq_length=512",
        "micro_batch_size=2", "global_batch_size=2", "learning_rate=1e-3", "weight_decay=0.1", "precision=fp32",
        "activation_checkpoint_interval=0", "logging_steps=10", *keys,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)


if __name__ == "__main__":
    main()
