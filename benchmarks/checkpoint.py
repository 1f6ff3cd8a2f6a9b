"""All that is promised of checkpoints, in one run: converting and exporting (convert.py), loading (load.py), and here
saving and resuming a training state, against copies of the same bytes in memory and on the disk.

    python benchmarks/checkpoint.py [--dir DIR] [--pairs 5] [--model_layers 17] [--state_layers 8]

A model of 2.0 GB, and a random Llama in bf16 with fp32 weights and AdamW's moments, in one process (2.0 GB with 8
layers). What is compared runs in turn:

    stall    `save` until training can continue, asynchronously       : a copy of the state in memory
    save     `save` to the last byte on the disk, synchronously       : `cp -r` of the checkpoint, each file synced
    resume   the manifest checked, weights, engine, optimizer's state : the same `cp -r`

Everything of these is in the page cache before it is read. DIR needs four times the larger size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers import LlamaConfig  # noqa: E402

from benchmarks import convert, load  # noqa: E402
from benchmarks.workload import RandomWeights  # noqa: E402
from data.collator import shift_labels  # noqa: E402
from models.weights.sources import open_weights  # noqa: E402
from training.checkpoint.resume import find_damage  # noqa: E402
from training.checkpoint.share import plan_share  # noqa: E402
from training.checkpoint.state import TrainerState, load_checkpoint  # noqa: E402
from training.checkpoint.writer import CheckpointWriter  # noqa: E402

# What, its time's counterpart, the counterpart in words, and the ratio that is allowed.
COMPARED = (
    ("stall", "copy", "a copy of the state in memory", "1"),
    ("save", "cp", "`cp`, synced", "-"),
    ("resume", "cp", "`cp`, synced", "2"),
)
STATE = TrainerState(
    step=1,
    num_tokens=0,
    num_stages=1,
    dp_size=1,
    global_batch_size=1,
    micro_batch_size=1,
    num_samples=1,
    total_steps=1,
    seed=0,
    precision="bf16",
    optimizer="adamw",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to work (default: the system's temporary folder)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model_layers", type=int, default=17)
    parser.add_argument("--state_layers", type=int, default=8)
    arguments = parser.parse_args()
    print("## Converting and exporting\n", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        convert.run_pairs(Path(folder), arguments.pairs, arguments.model_layers)
    print("\n## Loading\n", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        load.run(Path(folder), arguments.model_layers, [1, 2, 4])
    print("\n## Saving and resuming", flush=True)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=arguments.state_layers,
        num_attention_heads=16,
    )
    config.tie_word_embeddings = False
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        measure(Path(folder), config, arguments.pairs)


def measure(folder: Path, config: LlamaConfig, pairs: int) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    sys.stdout = open(os.devnull, "w")  # DeepSpeed reports its memory
    from training.distributed.process import join_process_group

    join_process_group()
    run_config = compose_config()
    engine = build_engine(RandomWeights(config), run_config)
    engine.train_step(make_batches(), 0, 10)  # so that the moments are there
    checkpoints, copy = folder / "checkpoints", folder / "copy"
    config.save_pretrained(checkpoints)
    times: dict[str, list[tuple[float, float]]] = {"stall": [], "save": [], "resume": []}
    writers = {
        asynchronous: CheckpointWriter(engine, checkpoints, asynchronous=asynchronous) for asynchronous in (False, True)
    }
    for pair in range(pairs + 1):  # the first warms up
        state = replace(STATE, step=pair + 1)
        step_dir = checkpoints / f"global_step{state.step}"
        taken = {
            "copy": clock(
                lambda: [tensor.to("cpu", copy=True) for file in plan_share(engine) for tensor in file.tensors.values()]
            )
        }
        taken["stall"] = clock(lambda: writers[True].save(state))
        writers[True].wait()
        shutil.rmtree(step_dir)
        taken["save"] = clock(lambda: writers[False].save(state))
        taken["cp"] = clock(lambda: copy_synced(step_dir, copy))
        taken["resume"] = clock(lambda: resume(step_dir, run_config))
        size = sum(file.stat().st_size for file in step_dir.iterdir())
        shutil.rmtree(step_dir)
        shutil.rmtree(copy)
        for name, other, *_ in COMPARED:
            times[name] += [(taken[name], taken[other])] if pair else []
    print(f"\n{size / 1e9:.2f} GB, medians of {pairs} pairs.\n", file=sys.__stdout__)
    print(
        "| what | seconds | against | ratio: median (least to most) | allowed |\n|---|---|---|---|---|",
        file=sys.__stdout__,
    )
    for name, _, against, allowed in COMPARED:
        ratios = sorted(ours / theirs for ours, theirs in times[name])
        seconds = statistics.median(ours for ours, _ in times[name])
        print(
            f"| {name} | {seconds:.2f} | {against} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}) | {allowed} |",
            file=sys.__stdout__,
        )


def resume(step_dir: Path, run_config: Any) -> None:
    """Does what a run does before its first step, except the data and the allocation of the engine's buffers, which any
    start has."""
    assert find_damage(step_dir, 0, 1) is None
    engine = build_engine(open_weights(str(step_dir)), run_config)
    load_checkpoint(engine, step_dir, STATE)


def compose_config() -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from training.config.schema import register_schema

    register_schema()
    overrides = [
        "model_name_or_path=none",
        "train_file=none",
        "output_dir=none",
        "micro_batch_size=1",
        "global_batch_size=1",
        "precision=bf16",
        "activation_checkpoint_interval=0",
        "warmup_ratio=0",
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_object(compose("base", overrides))


def build_engine(source: Any, run_config: Any) -> Any:
    from training import build
    from training.distributed.ranks import SINGLE_PROCESS
    from training.setup import Run, build_setup

    return build.build_engine(Run.of(build_setup(run_config, source, SINGLE_PROCESS), SINGLE_PROCESS))


def make_batches() -> Iterator[Any]:
    ids = torch.arange(16)[None]
    inputs = (ids, ids, torch.ones_like(ids, dtype=torch.int32))
    return iter([(inputs, (shift_labels(ids), torch.tensor(15.0, dtype=torch.float64)))])


def copy_synced(source: Path, target: Path) -> None:
    os.system(f"cp -r --reflink=never '{source}' '{target}'")
    for file in (*target.iterdir(), target):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def clock(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
