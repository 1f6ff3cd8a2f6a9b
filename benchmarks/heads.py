"""Measures what a small model of random weights learns with a head, on held-out records of gsm8k.

    python benchmarks/heads.py --train_file gsm8k/train.jsonl [--tasks classification embedding] [--num_stages 2]

classification: the number of steps of an answer, 2 to 7 or more, as classes. embedding: a question has to find its
answer among those of all held-out questions. Before training stands for what the tokens alone give: an average of
random vectors is nearer to another one with the same words. Each run is the trainer itself, each stage on one core;
together they take four minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.small_models import save_tokenizer, split_records, train  # noqa: E402

HELD_OUT = 500  # records
MOST_STEPS = 7  # of an answer; those with more are one class with these
VOCAB_SIZE = 2048  # of conf/model/llama_tiny.yaml
MODEL = (
    "model.num_hidden_layers=2", "model.hidden_size=128", "model.intermediate_size=256", "model.num_attention_heads=4",
    "weight_decay=0.1", "warmup_ratio=0.1", "eval_on_start=true",
)  # fmt: skip
TASKS = {
    "classification": (
        "eval_accuracy", "data=classification", "data.packing=true", "max_seq_length=512", "micro_batch_size=2",
        "global_batch_size=8", "learning_rate=3e-3", "max_steps=250",
    ),
    "embedding": (
        "eval_recall_at_1", "data=embedding", "embedding.pooling=mean", "data.query_field=question",
        "data.positive_field=answer", "max_seq_length=128", "micro_batch_size=16", "global_batch_size=64",
        "learning_rate=1e-3", "max_steps=100",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num_stages", type=int, default=2)
    arguments = parser.parse_args()
    records = [count_steps(json.loads(line)) for line in arguments.train_file.read_text().splitlines()]
    chances = {"classification": find_commonest(records[-HELD_OUT:]), "embedding": 1 / HELD_OUT}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split_records(records, HELD_OUT, folder)
        texts = [{key: record[key] for key in ("question", "answer")} for record in records[:-HELD_OUT]]
        save_tokenizer(texts, VOCAB_SIZE, folder)
        for task in arguments.tasks:
            metric, *keys = TASKS[task]
            keys += [*MODEL, f"num_stages={arguments.num_stages}"]
            lines = train(folder, task, *keys, num_processes=arguments.num_stages)
            found = [line[metric] for line in lines if metric in line]
            rows.append((task, metric, lines[-1]["step"], chances[task], found[0], found[-1]))
    print(f"| task | on {HELD_OUT} held-out records | steps | chance | before training | after |")
    print("|---|---|---|---|---|---|")
    for task, metric, steps, *shares in rows:
        print(f"| {task} | `{metric}` | {steps} | {' | '.join(f'{share:.1%}' for share in shares)} |")


def count_steps(record: dict[str, str]) -> dict[str, str]:
    """Return a record with its answer, without the line with the result alone, as text, and the number of its lines as
    label."""
    answer = record["answer"].rpartition("\n####")[0]
    return record | {"text": answer, "label": str(min(len(answer.splitlines()), MOST_STEPS))}


def find_commonest(records: Sequence[dict[str, str]]) -> float:
    """Return the share of the most frequent label."""
    return Counter(record["label"] for record in records).most_common(1)[0][1] / len(records)


if __name__ == "__main__":
    main()
