"""The converter against `cp` of the same bytes: speed, and anonymous memory against the largest layer.

    python benchmarks/convert.py [--dir DIR] [--pairs 5] [--num_layers 17]

A random Llama in bf16 (2.0 GB with 17 layers), several shards. Pairs are interleaved: `cp -r`, then the converter in a
fresh process, again for the export. Both sides end with every byte on the disk (fsync of each file), both find the
source in the page cache, and neither may share blocks with it. The converter's time is taken after its imports. DIR
needs four times the model's size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import models.families.llama  # noqa: E402, F401  (imports are not measured)
from benchmarks.anonymous import AnonymousPeak  # noqa: E402
from models.architecture.lookup import build_layers  # noqa: E402
from models.conversion.convert import convert_to_pipeline, export_hugging_face  # noqa: E402
from models.storage.safetensors_writer import (  # noqa: E402
    INDEX_NAME,
    TensorInfo,
    build_index,
    name_shards,
    plan_shards,
    write_safetensors,
)
from models.weights.sources import open_weights  # noqa: E402

SHARD_SIZE = 500 * 10**6
REQUIRED_SPEED = 0.8
DIRECTIONS = {"convert": convert_to_pipeline, "export": export_hugging_face}


@dataclass(frozen=True)
class Measure:
    seconds: float
    peak_bytes: int  # anonymous memory above that after the imports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to work (default: the system's temporary folder)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num_layers", type=int, default=17)
    parser.add_argument("--measure", nargs=3, metavar=("DIRECTION", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        direction, source, target = args.measure
        print(json.dumps(vars(measure_conversion(direction, Path(source), Path(target)))))
        return
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="benchmark-convert-") as root:
        run_pairs(Path(root), args.pairs, args.num_layers)


def run_pairs(root: Path, pairs: int, num_layers: int) -> None:
    """Prints a table with the medians of `pairs` interleaved pairs, each way."""
    largest = save_model(root / "hf", num_layers)
    convert_to_pipeline(open_weights(str(root / "hf")), root / "pipeline")
    sources = {"convert": root / "hf", "export": root / "pipeline"}
    copies: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    conversions: dict[str, list[Measure]] = {name: [] for name in DIRECTIONS}
    for _ in range(pairs):
        for name, source in sources.items():
            copies[name].append(time_copy(source, root / "copy"))
            conversions[name].append(run_in_fresh_process(name, source, root / "target"))
    size = sum(file.stat().st_size for file in (root / "hf").iterdir())
    print(f"Llama, bf16, {size / 1e9:.2f} GB, largest layer {largest / 1e6:.0f} MB.")
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores. Medians of {pairs} interleaved pairs, both synced to "
        "disk.\n"
    )
    print(
        "| direction | cp, s | converter, s | speed / cp: median, least | required | peak memory / largest layer | "
        "allowed |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in DIRECTIONS:
        ratios = [copy / conversion.seconds for copy, conversion in zip(copies[name], conversions[name], strict=True)]
        copying = statistics.median(copies[name])
        converting = statistics.median(conversion.seconds for conversion in conversions[name])
        peak = max(conversion.peak_bytes for conversion in conversions[name])
        print(
            f"| {name} | {copying:.2f} | {converting:.2f} | {statistics.median(ratios):.2f}, {min(ratios):.2f} | "
            f"{REQUIRED_SPEED} "
            f"| {peak / 1e6:.1f} MB / {largest / 1e6:.0f} MB = {peak / largest:.2f} | 2 |"
        )


def save_model(folder: Path, num_layers: int) -> int:
    """A Hugging Face folder with random weights; returns the bytes of the largest layer."""
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
    )
    config.save_pretrained(folder)
    layers = [
        [TensorInfo(layer.hf_prefix + name, tuple(shape), torch.bfloat16) for name, shape in layer.shapes().items()]
        for layer in build_layers(config)
    ]
    shards = plan_shards([info for layer in layers for info in layer], SHARD_SIZE)
    for name, shard in zip(name_shards(len(shards)), shards, strict=True):
        write_safetensors(folder / name, shard, lambda info: torch.randn(info.shape, dtype=torch.bfloat16))
    (folder / INDEX_NAME).write_text(json.dumps(build_index(shards)))
    return max(sum(info.nbytes for info in layer) for layer in layers)


def time_copy(source: Path, target: Path) -> float:
    """Seconds of `cp -r` until the copy is on the disk."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def run_in_fresh_process(direction: str, source: Path, target: Path) -> Measure:
    os.sync()
    command = [sys.executable, __file__, "--measure", direction, str(source), str(target)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(target)
    return Measure(**json.loads(output.splitlines()[-1]))


def measure_conversion(direction: str, source: Path, target: Path) -> Measure:
    """Measures one conversion in this process, with its anonymous memory."""
    with AnonymousPeak() as memory:
        start = time.perf_counter()
        DIRECTIONS[direction](open_weights(str(source)), target)
        seconds = time.perf_counter() - start
    return Measure(seconds, memory.added)


if __name__ == "__main__":
    main()
