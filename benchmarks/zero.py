"""Replicas that shard accumulated gradients (ZeRO-2) and weights (ZeRO-3) against their peers, on two CPU cores.

    python benchmarks/zero.py [--rounds 9] [--micro_batches 4] [--stages 2 3] [--precision bf16]

Two processes, each pinned to one core with one thread, take turns in every round at runners of the same model,
micro-batches, clipping and AdamW; of each stage

    ours       this trainer with num_stages=1, its own layers, loss, loader and step
    deepspeed  DeepSpeed's plain engine around the Hugging Face model, and its own loss
    fsdp       torch's `fully_shard` of each layer of the same (FSDP 2), which keeps weights whole between the passes
               (as stage 2 does) or gathers them anew (as stage 3 does)

Printed are medians over the rounds of tokens/s, of both ranks, and of the ratios within a round, since the machine's
speed drifts from one to the next.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks import peers
from benchmarks.allocation import keep_freed_memory
from benchmarks.pipeline import build_ours, describe, describe_model, make_material
from benchmarks.workload import build_llama, compose_run, repeat_batch, run_ranks, take_turns

NUM_RANKS = 2
PEERS = ("deepspeed", "fsdp")
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a runner takes in a round")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 3), default=[2, 3])
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--micro_batch_size", type=int, default=1)
    parser.add_argument("--seq_length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab_size", type=int, default=6144)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), arguments)
        report(run_ranks(work, NUM_RANKS, Path(folder), arguments), arguments)


def work(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of each runner on this rank, round by round."""
    keep_freed_memory()
    runners: dict[str, Step] = {}
    for stage in arguments.stages:
        runners[f"ours, stage {stage}"] = build_trainer(folder, arguments, stage)
        runners[f"deepspeed, stage {stage}"] = build_deepspeed(folder, arguments, stage)
        runners[f"fsdp, stage {stage}"] = build_fsdp(folder, arguments, stage)
    tokens = arguments.micro_batches * arguments.micro_batch_size * arguments.seq_length * arguments.steps
    return take_turns(runners, arguments.rounds, arguments.steps, tokens)


def build_trainer(folder: Path, arguments: argparse.Namespace, stage: int) -> Step:
    from models.weights.sources import open_weights
    from training.distributed.ranks import read_ranks
    from training.setup import build_setup

    config = compose_run(
        f"model_name_or_path={folder}/model",
        f"train_file={folder}/train.jsonl",
        f"output_dir={folder}/out",
        f"data.cache_dir={folder}/cache",
        f"zero_stage={stage}",
        f"micro_batch_size={arguments.micro_batch_size}",
        f"gradient_accumulation_steps={arguments.micro_batches}",
        f"max_seq_length={arguments.seq_length}",
        "data.prompt_template='{prompt}'",
        f"precision={arguments.precision}",
        "activation_checkpoint_interval=0",
    )
    return build_ours(peers.Work(config, build_setup(config, open_weights(config.model_name_or_path), read_ranks())))


def build_deepspeed(folder: Path, arguments: argparse.Namespace, stage: int) -> Step:
    import deepspeed

    in_bf16 = arguments.precision == "bf16"
    model = load_model(folder, torch.bfloat16 if in_bf16 else torch.float32)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch_size,
        "gradient_accumulation_steps": arguments.micro_batches,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": in_bf16},
        "communication_data_type": "fp32",
        **({"data_types": {"grad_accum_dtype": "fp32"}} if in_bf16 else {}),
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), config=config
    )
    batches = repeat_labelled(arguments)

    def step() -> None:
        for _ in range(arguments.micro_batches):
            input_ids, labels = next(batches)
            engine.backward(engine(input_ids=input_ids, labels=labels, use_cache=False).loss)
            engine.step()

    return step


def build_fsdp(folder: Path, arguments: argparse.Namespace, stage: int) -> Step:
    """Gradients are summed over the ranks after each micro-batch, as ZeRO does, so that none is held whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    in_bf16 = arguments.precision == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if in_bf16 else None
    model = load_model(folder, torch.float32)
    shard = partial(
        fully_shard,
        mesh=init_device_mesh("cpu", (NUM_RANKS,)),
        reshard_after_forward=stage == 3,
        mp_policy=policy or MixedPrecisionPolicy(),
    )
    for layer in model.model.layers:
        shard(layer)
    shard(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    batches = repeat_labelled(arguments)

    def step() -> None:
        for number in range(arguments.micro_batches):
            is_last = number == arguments.micro_batches - 1
            model.set_is_last_backward(is_last)
            if stage == 2:
                model.set_reshard_after_backward(is_last)
            input_ids, labels = next(batches)
            loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
            (loss / arguments.micro_batches).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder / "model", dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
    )
    return model.train()


def repeat_labelled(arguments: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches in which every token is a target: of the Hugging Face model the labels are its inputs."""
    for batch in repeat_batch(arguments.micro_batch_size, arguments.seq_length, arguments.vocab_size):
        assert batch.inputs is not None
        yield batch.inputs.input_ids, batch.inputs.input_ids


def report(ranks: list[dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    """A runner's rate is that of its slower rank, twice."""
    rates = {name: [NUM_RANKS * min(pair) for pair in zip(*(rank[name] for rank in ranks))] for name in ranks[0]}
    size = sum(parameter.numel() for parameter in count_parameters(arguments))
    print(
        f"\ndp{NUM_RANKS}, {size / 1e6:.1f} M parameters, {arguments.micro_batches} micro-batches of "
        f"{arguments.micro_batch_size} x {arguments.seq_length} a rank, {arguments.precision}; medians of "
        f"{arguments.rounds} rounds (least - most)\n"
    )
    print(f"| stage | ours, tokens/s | {' | '.join(f'ours / {peer}' for peer in PEERS)} |\n|---|---|---|---|")
    for stage in arguments.stages:
        own = rates[f"ours, stage {stage}"]
        ratios = ([a / b for a, b in zip(own, rates[f"{peer}, stage {stage}"])] for peer in PEERS)
        print(f"| {stage} | {describe(own, ',.0f')} | {' | '.join(describe(each, '.3f') for each in ratios)} |")


def count_parameters(arguments: argparse.Namespace) -> Iterator[nn.Parameter]:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(build_llama(**describe_model(arguments))).parameters()


if __name__ == "__main__":
    main()
