"""Shows what holds the resident memory of a long run on CPUs: tensors and objects that are alive, or the allocator.

    python benchmarks/resident.py [--steps 300] [--layers 30] [--settings plain few_shapes trimmed small]

A Llama of random weights with the width and vocabulary of SmolLM-135M learns from rows of many lengths, without
packing, so that every micro-batch has tensors of other sizes. After every tenth step each stage notes three figures, in
GiB above those after the first step: `resident`, what the system counts for the process; `in use`, what glibc has
handed out and not got back, which grows if anything leaks; `kept free`, what glibc got back and has not returned to the
system. The settings: `plain`, as a user starts a run; `few_shapes`, oneDNN and torch keep what they prepare for a
product of one shape for 8 shapes, not for 1,024 each; `trimmed`, malloc_trim after each tenth step, before the figures;
`small`, every block from 64 KiB on is a mapping of its own, which returns to the system when it is freed, and costs
time. Needs glibc 2.33 (mallinfo2).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GIB = 2**30
SETTINGS: dict[str, dict[str, str]] = {
    "plain": {},
    "few_shapes": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"},
    "trimmed": {},
    "small": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
}
LONGEST = 512  # tokens of a row


_MALLINFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2, in bytes: `uordblks` in use, `fordblks` free, in the heaps of all threads; `hblkhd` in
    mappings of their own."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


@dataclass
class NoteMemory:
    """A callback: each rank writes its memory after the first step and after every tenth one."""

    trims: bool = False

    def on_step(self, run: Any) -> None:
        if run.step != 1 and run.step % 10:
            return
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = MallocInfo
        if self.trims:
            libc.malloc_trim(0)
        info, pages = libc.mallinfo2(), int(Path("/proc/self/statm").read_text().split()[1])
        figures = {
            "step": run.step,
            "resident": pages * os.sysconf("SC_PAGE_SIZE"),
            "in use": info.uordblks + info.hblkhd,
            "kept free": info.fordblks,
        }
        with open(run.output_dir / f"memory_{run.rank}.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--num_stages", type=int, default=2)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    ends = sorted({min(arguments.steps // 10 * 10, step) for step in (30, 90, 150, 300, arguments.steps)})
    columns = " | ".join(f"step {step}" for step in ends)
    print(f"| setting | stage | GiB above the first step | {columns} | seconds |")
    print("|---|---|---|" + "---|" * (len(ends) + 1), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, arguments.steps)
        for setting in arguments.settings:
            started = time.monotonic()
            train(folder, setting, arguments)
            seconds = time.monotonic() - started
            for stage in range(arguments.num_stages):
                lines = (folder / setting / f"memory_{stage}.jsonl").read_text().splitlines()
                first, *others = [json.loads(line) for line in lines]
                found = {line["step"]: line for line in others}
                for kind in ("resident", "in use", "kept free"):
                    grown = " | ".join(f"{(found[step][kind] - first[kind]) / GIB:+.2f}" for step in ends)
                    print(f"| {setting} | {stage} | {kind} | {grown} | {seconds:.0f} |", flush=True)


def write_data(folder: Path, steps: int) -> None:
    """Save a tokenizer, and one record a row: random words, most rows short and some as long as a row may be."""
    from benchmarks.small_models import save_tokenizer
    from scripts.make_demo import write_jsonl

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(500)]
    lengths = [min(LONGEST, round(draw.lognormvariate(5, 0.8))) for _ in range(8 * steps)]
    records = [{"prompt": words[0], "completion": " ".join(draw.choices(words, k=length))} for length in lengths]
    save_tokenizer(records[:500], 2048, folder)
    write_jsonl(folder / "train.jsonl", records)


def train(folder: Path, setting: str, arguments: argparse.Namespace) -> None:
    """Train for --steps steps under a setting; the ranks leave their figures in the run's folder."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.num_stages),
        str(ROOT / "trainer_base_ds_mp.py"), "-cn", "base", "model=llama_tiny", "init=random",
        "model_name_or_path=none", f"tokenizer_name_or_path={folder}/tokenizer", f"train_file={folder}/train.jsonl",
        f"data.cache_dir={folder}/cache", f"output_dir={folder / setting}", "precision=bf16",
        "model.vocab_size=49152", "model.hidden_size=576", "model.intermediate_size=1536",
        f"model.num_hidden_layers={arguments.layers}", "model.num_attention_heads=9", "model.num_key_value_heads=3",
        "model.tie_word_embeddings=true", f"num_stages={arguments.num_stages}", f"max_seq_length={LONGEST}",
        "micro_batch_size=2", "global_batch_size=8", "activation_checkpoint_interval=0", "save_final=false",
        f"max_steps={arguments.steps}", "learning_rate=1e-4",
        f"callbacks=[{{_target_: benchmarks.resident.NoteMemory, trims: {str(setting == 'trimmed').lower()}}}]",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **SETTINGS[setting]}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=sys.stderr)


if __name__ == "__main__":
    main()
