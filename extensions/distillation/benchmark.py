"""Measures what a teacher adds: a student of half its layers, with and without it, against the teacher's held-out loss.

    python -m extensions.distillation.benchmark --train_file gsm8k/train.jsonl [--teacher_steps 300] [--steps 150]

A model of 1.6 M random parameters learns questions and answers and becomes the teacher of one with half its layers,
which has seen no text before. Its students have the same seed, data and learning rate; the last 100 records are held
out. Each run is one process of the trainer itself. The second table compares the divergence over k tokens and the event
of all others with that over the whole vocabulary, of the same two models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import small_models
from benchmarks.small_models import save_tokenizer, split_records
from extensions.distillation.divergence import DistillOptions, TeacherComparison, choose_top
from extensions.distillation.keys import Divergence
from models.losses.cross_entropy import TargetChunk
from models.losses.metric_sums import MetricSums

HELD_OUT = 100  # records
LAYERS, VOCAB_SIZE = 6, 2048  # of conf/model/llama_tiny.yaml
SIZES = ("model.hidden_size=128", "model.intermediate_size=384", "model.num_attention_heads=4")
TOP_K = (4, 16, 64, 256, VOCAB_SIZE)
STUDENTS: dict[str, tuple[str, ...] | None] = {
    "without a teacher": None,
    "forward": ("distill.divergence=forward",),
    "forward, whole vocabulary": ("distill.divergence=forward", "distill.online=true", "distill.top_k=null"),
    "reverse": ("distill.divergence=reverse",),
    "jensen_shannon": ("distill.divergence=jensen_shannon",),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m extensions.distillation.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--prompt_field", default="question")
    parser.add_argument("--completion_field", default="answer")
    parser.add_argument("--teacher_steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--samples", type=int, default=500, help="records of the students; of the teacher all")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS)[:3])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        prepare(arguments, work)
        teacher = train(arguments, work, "teacher", f"max_steps={arguments.teacher_steps}")
        keys: tuple[str, ...] = (f"model.num_hidden_layers={LAYERS // 2}", f"max_steps={arguments.steps}")
        keys += (f"data.max_samples={arguments.samples}",)
        found = {}
        for student in arguments.students:
            taught = STUDENTS[student]
            given = () if taught is None else (f"distill.teacher={work}/teacher/hf", "distill.coef=0.5", *taught)
            found[student] = train(arguments, work, name_folder(student), *keys, *given)
        print("| student | eval loss | above the teacher's |\n|---|---|---|")
        print(f"| the teacher | {teacher:.4f} | |")
        for student, loss in found.items():
            print(f"| {student} | {loss:.4f} | {loss - teacher:.4f} |")
        print_top_k(arguments, work, name_folder(arguments.students[-1]))


def name_folder(student: str) -> str:
    return student.replace(",", "").replace(" ", "_")


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
            sums = MetricSums("divergence")
            compare = TeacherComparison(DistillOptions(1.0, 1.0, divergence), lambda _: (token_ids, logs), sums)
            compare(TargetChunk(slice(0, len(log_p)), log_p.argmax(-1), log_p, None, needs_gradient=False))
            taken = sums.take()
            assert taken is not None
            total, count = taken.flatten().tolist()
            totals[top_k].append(total / count)
    print("| k | covered | " + " | ".join(each.value for each in Divergence) + " |\n|---|---|---|---|---|")
    for top_k, (covered, *values) in totals.items():
        shares = [f"{value / whole:.1%}" for value, whole in zip(values, totals[VOCAB_SIZE][1:], strict=True)]
        print(f"| {top_k} | {covered:.1%} | " + " | ".join(shares) + " |")


def prepare(arguments: argparse.Namespace, work: Path) -> None:
    records = [json.loads(line) for line in arguments.train_file.read_text().splitlines()]
    fields = (arguments.prompt_field, arguments.completion_field)
    texts = [{field: record[field] for field in fields} for record in records]
    save_tokenizer(texts[:-HELD_OUT], VOCAB_SIZE, work)
    split_records(texts, HELD_OUT, work)


def train(arguments: argparse.Namespace, work: Path, name: str, *keys: str) -> float:
    """Return the evaluation loss at the end, of the next token."""
    given = (
        *SIZES,
        f"data.prompt_field={arguments.prompt_field}", f"data.completion_field={arguments.completion_field}",
        "data.packing=true", "max_seq_length=512", "micro_batch_size=2", "global_batch_size=2", "learning_rate=1e-3",
        "weight_decay=0.1",
    )  # fmt: skip
    lines = small_models.train(work, name, *given, *keys)
    return next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)


if __name__ == "__main__":
    main()
