"""Start-up: from entering `PipelineModule`'s construction to weights loaded, against DeepSpeed's own; and the time of a
plan.

    python benchmarks/startup.py [--pairs 7] [--num_layers 24] [--dir DIR]

A Llama of 1.3 B parameters in bf16, as layer files in the page cache, on two ranks of one core each. In turns: this
trainer's `StageModule`, and a bare `PipelineModule` with its default split that then loads the same files
(`load_state_dir`) and is cast to bf16. No imports, no optimizer. The plan is the whole command, from the shell. DIR
needs the size of the weights (2.7 GB).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.workload import ROOT, RandomWeights, build_llama, compose_run, run_ranks

PLAN = ("-cn", "llama_65b_pp8", "plan=true", "world_size=16", "hardware=a100_80g")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--num_layers", type=int, default=24)
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--dir", help="where to work (default: the system's temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        num_parameters = save_layers(Path(folder), arguments)
        seconds = run_ranks(measure, 2, Path(folder), arguments.pairs)[0]
        plans = [time_plan(folder) for _ in range(3)]
    ratios = [ours / bare for ours, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
    print(f"{num_parameters / 1e9:.2f} B parameters, bf16, pp2, {arguments.pairs} pairs")
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values):.2f} s ({min(values):.2f} - {max(values):.2f})")
    print(f"ours / bare: {statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})")
    print(f"{' '.join(PLAN)}: {min(plans):.2f} s (least of {len(plans)}, most {max(plans):.2f})")


def save_layers(folder: Path, arguments: argparse.Namespace) -> int:
    """A pipeline checkpoint of random weights. Returns its parameters."""
    from models.architecture.lookup import build_layers
    from models.weights.pipeline_checkpoint import layer_file

    hidden = arguments.hidden_size
    config = build_llama(
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        vocab_size=32000,
    )
    config.save_pretrained(folder)
    (folder / "latest").write_text("global_step0")
    (folder / "global_step0").mkdir()
    source, total = RandomWeights(config, torch.bfloat16), 0
    for index, layer in enumerate(build_layers(config)):
        tensors = source.read_layer(index, layer)
        total += sum(tensor.numel() for tensor in tensors.values())
        torch.save(tensors, layer_file(folder / "global_step0", index))
    return total


def measure(folder: Path, pairs: int) -> dict[str, list[float]]:
    """Seconds until both ranks are ready."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    builders: dict[str, Callable[[Path], Any]] = {"ours": build_ours, "bare": build_bare}
    for pair in range(pairs + 1):  # the first warms up
        for name in sorted(builders, reverse=pair % 2 == 1):
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            module = builders[name](folder)
            dist.barrier()
            seconds[name] += [time.perf_counter() - start] if pair else []
            assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
            del module
    return seconds


def build_ours(folder: Path) -> Any:
    from models.weights.sources import open_weights
    from training.build import build_stage
    from training.distributed.ranks import read_ranks
    from training.setup import Run, build_setup

    ranks = read_ranks()
    config = compose_run("num_stages=2", "precision=bf16", "micro_batch_size=1", "gradient_accumulation_steps=1")
    return build_stage(Run.of(build_setup(config, open_weights(str(folder)), ranks), ranks))


def build_bare(folder: Path) -> Any:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from models.architecture.lookup import build_layers
    from models.losses.cross_entropy import causal_lm_loss
    from models.weights.config_file import load_config
    from training.pipeline.module import build_layer_specs

    module = PipelineModule(build_layer_specs(build_layers(*load_config(folder))), num_stages=2, loss_fn=causal_lm_loss)
    module.load_state_dir(str(folder / "global_step0"), TorchCheckpointEngine())
    return module.to(torch.bfloat16)


def time_plan(folder: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / "trainer_base_ds_mp.py"), *PLAN, f"output_dir={folder}/plan"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
