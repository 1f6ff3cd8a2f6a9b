"""Measures what loading costs a stage: memory against the stage's own weights, and bytes read against the model.

    python benchmarks/load.py [--dir DIR] [--num_layers 17] [--num_stages 1 2 4]

A random Llama in bf16 (2.0 GB with 17 layers), as a Hugging Face folder and converted, read by as many processes as
there are stages into the training dtype. Memory is the anonymous memory that a rank adds at its peak; pages of mapped
files are the kernel's. Bytes read are those that the disk gave (`read_bytes` in /proc/self/io), after the files have
been dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.anonymous import AnonymousPeak  # noqa: E402
from benchmarks.convert import save_model  # noqa: E402
from models.conversion.convert import convert_to_pipeline  # noqa: E402
from models.storage.folders import drop_from_memory  # noqa: E402
from models.weights.sources import open_weights  # noqa: E402

ALLOWED_MEMORY, ALLOWED_READ = 1.2, 1.1
PORT = 29519


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to work (default: the system's temporary folder)")
    parser.add_argument("--num_layers", type=int, default=17)
    parser.add_argument("--num_stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load_stage(arguments.load)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="benchmark-load-") as root:
        run(Path(root), arguments.num_layers, arguments.num_stages)


def run(root: Path, num_layers: int, num_stages: list[int]) -> None:
    """Prints a table: a row a source and number of stages."""
    save_model(root / "hf", num_layers)
    convert_to_pipeline(open_weights(str(root / "hf")), root / "converted")
    print("| source | stages | peak memory / own stage, worst rank | allowed | bytes read / model | allowed |")
    print("|---|---|---|---|---|---|")
    for source in ("hf", "converted"):
        size = sum(file.stat().st_size for file in (root / source).rglob("*") if file.suffix in (".safetensors", ".pt"))
        for count in num_stages:
            ranks = start_ranks(root / source, count)
            memory = max(rank["peak_bytes"] / rank["stage_bytes"] for rank in ranks)
            read = sum(rank["read_bytes"] for rank in ranks) / size
            print(
                f"| {source}, {size / 1e9:.2f} GB | {count} | {memory:.2f} | {ALLOWED_MEMORY} | {read:.2f} | "
                f"{ALLOWED_READ} |"
            )


def start_ranks(folder: Path, count: int) -> list[dict[str, int]]:
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            drop_from_memory(file)
    given = {
        "WORLD_SIZE": count,
        "LOCAL_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": PORT,
        "OMP_NUM_THREADS": 1,
    }
    environments = [
        {**os.environ, **{key: str(value) for key, value in {**given, "RANK": rank, "LOCAL_RANK": rank}.items()}}
        for rank in range(count)
    ]
    command = [sys.executable, __file__, "--load", str(folder)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for environment in environments
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank ended with {[process.returncode for process in processes]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def load_stage(folder: str) -> dict[str, int]:
    """Builds and loads the stage of a rank. Imports and the process group are not measured."""
    import torch

    from benchmarks.workload import compose_run
    from models.architecture.lookup import build_layers
    from training.build import build_stage
    from training.distributed.process import join_process_group
    from training.distributed.ranks import read_ranks
    from training.setup import Run, build_setup

    join_process_group()
    ranks, source = read_ranks(), open_weights(folder)
    count, num_layers = ranks.world_size, len(build_layers(source.config))
    ends = [round(num_layers * (stage + 1) / count) for stage in range(count)]
    split = [end - start for start, end in zip([0, *ends], ends)]
    config = compose_run(
        f"num_stages={count}", f"partition_method={split}", "precision=bf16", "micro_batch_size=1",
        "gradient_accumulation_steps=1",
    )  # fmt: skip
    run = Run.of(build_setup(config, source, ranks), ranks)
    torch.distributed.barrier()
    read_before = read_bytes()
    with AnonymousPeak() as memory:
        module = build_stage(run)
    stage_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    return {"peak_bytes": memory.added, "stage_bytes": stage_bytes, "read_bytes": read_bytes() - read_before}


def read_bytes() -> int:
    """Fetched from the disk for this process so far."""
    match = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


if __name__ == "__main__":
    main()
