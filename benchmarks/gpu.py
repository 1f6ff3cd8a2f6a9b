"""Llama shapes on a machine with GPUs: this trainer at one stage and at as many as there are GPUs, beside the `Trainer`
of transformers.

    python benchmarks/gpu.py [--shapes 1b,3b,8b,8b-lora] [--gpus N] [--steps 5] [--global_batch_size 16] [--output
    gpu.md]
    python benchmarks/gpu.py --device cpu --tiny                     two ranks on the CPU, seconds, to see that all
    works

Random weights, bf16, sequences of 4,096 tokens, one a micro-batch, every layer checkpointed, AdamW, clipping. tokens/s:
the median step after two that warm up. MFU by the convention of docs/plan.md: 6 N a token and attention in full,
recomputation not, LoRA as if all were trained. Peak: what PyTorch allocated on the fullest GPU. This trainer keeps fp32
master weights and moments (ZeRO-1), so the `Trainer` runs twice: with fp32 weights under autocast, which is the same
work, and with nothing but bf16, which is less. On several GPUs it runs data-parallel. A run that ends out of memory, or
otherwise, is a row that says so. Nothing is installed or downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

IMPORTS = (
    "torch",
    "transformers",
    "deepspeed",
    "accelerate",
    "peft",
    "hydra",
    "omegaconf",
    "safetensors",
    "numpy",
    "packaging",
)
WARM_UP = 2
VOCABULARY = 128_256
_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {  # of Llama 3.2 and 3
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": _8B,
    "8b-lora": _8B,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Job:
    """A shape and how it is trained, the same for every runner."""

    shape: dict[str, Any]
    vocab_size: int
    seq_length: int
    global_batch_size: int
    steps: int
    lora: bool
    device: str

    def architecture(self) -> Any:
        from benchmarks.workload import build_llama

        return build_llama(
            **self.shape, vocab_size=self.vocab_size, max_position_embeddings=self.seq_length, rope_theta=500_000.0
        )

    def config(self, num_stages: int) -> Any:
        from benchmarks.workload import compose_run

        return compose_run(
            f"num_stages={num_stages}",
            "micro_batch_size=1",
            f"global_batch_size={self.global_batch_size}",
            f"max_seq_length={self.seq_length}",
            "precision=bf16",
            "activation_checkpoint_interval=1",
            "data.pad_to=max_seq_length",
            f"adapter={'lora' if self.lora else 'none'}",
        )


@dataclass(frozen=True)
class Outcome:
    """On one rank. peak: bytes on its device."""

    seconds: float
    peak: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="with commas between")
    parser.add_argument("--gpus", type=int, help="default: all that are there")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--global_batch_size", type=int, default=16, help="sequences an optimizer step")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the shapes at a size that takes seconds anywhere")
    parser.add_argument("--output", type=Path, help="where to write the table, too")
    arguments = parser.parse_args()
    if missing := [name for name in IMPORTS if find_spec(name) is None]:
        sys.exit(f"not installed here: {', '.join(missing)}; see requirements.txt")
    names = arguments.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no such shape: {', '.join(unknown)}")
    gpus = count_devices(arguments)
    lines = [
        describe_machine(arguments.device),
        "",
        "| shape | runner | tokens/s | MFU | peak, GiB a card |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        job = build_job(name, arguments)
        for runner, run in list_runners(job, gpus).items():
            lines.append(f"| {name} | {runner} | {render(job, run)} |")
            print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


def count_devices(arguments: argparse.Namespace) -> int:
    if arguments.device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        return arguments.gpus or 2
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU here; --device cpu --tiny shows that the benchmark runs")
    return arguments.gpus or torch.cuda.device_count()


def describe_machine(device: str) -> str:
    import torch
    import transformers

    cards = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        if device == "cuda"
        else f"CPU, {os.cpu_count()} cores"
    )
    return (
        f"{cards}; Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def build_job(name: str, arguments: argparse.Namespace) -> Job:
    shape = {**SHAPES[name], **TINY} if arguments.tiny else SHAPES[name]
    sizes = (512, 128) if arguments.tiny else (VOCABULARY, 4096)
    return Job(shape, *sizes, arguments.global_batch_size, arguments.steps, name.endswith("-lora"), arguments.device)


def list_runners(job: Job, gpus: int) -> dict[str, Callable[[], list[Outcome]]]:
    from benchmarks.workload import run_alone, run_ranks

    runners: dict[str, Callable[[], list[Outcome]]] = {}
    for num_stages in sorted({1, gpus}):
        runners[f"ours, pp{num_stages}"] = lambda n=num_stages: run_ranks(measure_ours, n, job, n)
    for in_bf16 in (False, True):
        weights = "bf16" if in_bf16 else "fp32"
        runners[f"Trainer, {weights} weights"] = lambda b=in_bf16: [run_alone(measure_trainer, job, b, 1)]
        if gpus > 1:
            runners[f"Trainer, {weights} weights, dp{gpus}"] = lambda b=in_bf16: run_ranks(
                measure_trainer, gpus, job, b, gpus
            )
    return runners


def render(job: Job, run: Callable[[], list[Outcome]]) -> str:
    from benchmarks.workload import RankFailed

    try:
        outcomes = run()
    except RankFailed as failure:
        return f"{failure} | - | -"
    rate = job.global_batch_size * job.seq_length / max(outcome.seconds for outcome in outcomes)
    mfu = compute_mfu(job, rate / len(outcomes))
    peak = max(outcome.peak for outcome in outcomes) / 2**30
    return f"{rate:,.0f} | {'-' if mfu is None else f'{mfu:.1%}'} | {peak:.1f}"


def compute_mfu(job: Job, rate_of_card: float) -> float | None:
    """None on a card that no file of conf/hardware describes."""
    import torch

    from models.architecture import build_layers
    from training.config.schema import load_hardware
    from training.planner.cost import count_layers
    from training.planner.plan import compute_model_flops

    if job.device == "cpu":
        return None
    card = torch.cuda.get_device_name(0)
    peak = next(
        (h.peak_flops["bf16"] for h in load_hardware() if h.peak_flops and re.search(h.device_name, card)), None
    )
    architecture = job.architecture()
    costs = count_layers(
        build_layers(architecture), architecture, micro_batch_size=1, seq_length=job.seq_length, dtype=torch.bfloat16
    )
    return rate_of_card * compute_model_flops(costs, job.seq_length) / peak if peak else None


def measure_ours(job: Job, num_stages: int) -> Outcome:
    """On a rank of the pipeline."""
    import torch

    from benchmarks.workload import RandomWeights, build_engine, repeat_batch
    from training.distributed.process import current_device
    from training.engine.steps import train_step
    from training.observability.stage_timer import MemoryPeak

    device = current_device()
    memory, config, architecture = MemoryPeak(device), job.config(num_stages), job.architecture()
    engine = build_engine(architecture, config, RandomWeights(architecture, torch.bfloat16, str(device)))
    memory.start()
    batches = repeat_batch(1, job.seq_length, job.vocab_size, str(device))
    seconds = []
    for step in range(WARM_UP + job.steps):
        start = time.perf_counter()
        train_step(engine, batches, config, step, 100)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Outcome(statistics.median(seconds[WARM_UP:]), memory.read())


def measure_trainer(job: Job, in_bf16: bool, gpus: int) -> Outcome:
    """In a process alone, or on a rank of the replicas."""
    if gpus == 1 and job.device == "cuda":  # the Trainer takes every card that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from benchmarks.workload import repeat_batch
    from training.observability.stage_timer import MemoryPeak

    device = (
        torch.device(job.device, int(os.environ.get("LOCAL_RANK", "0")))
        if job.device == "cuda"
        else torch.device("cpu")
    )
    memory, config = MemoryPeak(device), job.architecture()
    config.use_cache = False
    torch.set_default_dtype(torch.bfloat16 if in_bf16 else torch.float32)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        model.enable_input_require_grads()
    marks = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            synchronize(device)
            marks.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1,
        gradient_accumulation_steps=max(1, job.global_batch_size // gpus), max_steps=WARM_UP + job.steps,
        optim="adamw_torch_fused", max_grad_norm=1.0, bf16=True, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, ddp_find_unused_parameters=False,
        use_cpu=job.device == "cpu", save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    (input_ids, *_), _ = next(repeat_batch(1, job.seq_length, job.vocab_size))
    dataset = [{"input_ids": input_ids[0], "labels": input_ids[0]}] * (job.global_batch_size * (WARM_UP + job.steps))
    memory.start()
    Trainer(model, arguments, train_dataset=dataset, callbacks=[Clock()]).train()
    steps = [stop - start for start, stop in itertools.pairwise(marks)][WARM_UP - 1 :]
    return Outcome(statistics.median(steps), memory.read())


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
