"""Runs of small models of random weights, for what is measured in quality: text with a tokenizer of its own, and the
trainer on this machine's cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.make_demo import train_tokenizer, write_jsonl  # noqa: E402


def split_records(records: Sequence[dict[str, Any]], held_out: int, folder: Path) -> None:
    """Save records as train.jsonl, and the last of them as eval.jsonl."""
    write_jsonl(folder / "train.jsonl", list(records[:-held_out]))
    write_jsonl(folder / "eval.jsonl", list(records[-held_out:]))


def save_tokenizer(texts: Sequence[dict[str, str]], vocab_size: int, folder: Path) -> None:
    """Train a tokenizer on texts and save it."""
    train_tokenizer(list(texts), vocab_size).save_pretrained(folder / "tokenizer")


def train(folder: Path, name: str, *keys: str, num_processes: int = 1) -> list[dict[str, Any]]:
    """Train on what `split_records` and `save_tokenizer` have left in `folder`; return the lines of metrics.jsonl."""
    out = folder / name
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes),
        str(ROOT / "trainer_base_ds_mp.py"), "-cn", "base", "model=llama_tiny", "init=random",
        "model_name_or_path=none", f"tokenizer_name_or_path={folder}/tokenizer", f"train_file={folder}/train.jsonl",
        f"eval_file={folder}/eval.jsonl", f"data.cache_dir={folder}/cache", f"output_dir={out}", "precision=fp32",
        "activation_checkpoint_interval=0", "logging_steps=10", *keys,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
