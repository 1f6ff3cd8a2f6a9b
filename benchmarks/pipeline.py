"""Measures how close a pipeline of two stages comes to its bubble bound, and compares it with its peers, on two CPU
cores.

    python benchmarks/pipeline.py [--micro_batches 16] [--rounds 9]             against the bound and bare DeepSpeed
    python benchmarks/pipeline.py --runners all [--vocab_size 32000]            against everybody

Two processes, each pinned to one core with one thread, take turns in every round at runners of the same layers,
micro-batches and AdamW:

    ours            this trainer's stages, loader and step
    ours-interleaved  the same with schedule=interleaved, two chunks a process
    ours-zero-bubble  the same with schedule=zero_bubble
    copies          each process alone with the whole model, no pipeline and no engine; their rates are summed
    bare            the same specs in a plain DeepSpeed `PipelineModule`, fed from a list, with our split
    bare-default    the same with the split that DeepSpeed makes by default (`parameters`)
    torch           `torch.distributed.pipelining`, 1F1B, with our split
    torch-default   the same with as many layers on either stage; it has no split of its own, and this is the usual one
    interleaved     the same in four chunks, two a process, interleaved 1F1B, with our split
    zbv             the same, zero bubble in the shape of a V, with the split of ours
    torch-dualpipev the same, its DualPipeV
    dualpipev       DeepSpeed's `DualPipeVModule`, four chunks, with the split of our zero bubble
    trainer         the `Trainer` of transformers in one process on both cores

The bound of ours is M / (M + P - 1) of the copies' rate: what a pipeline without any cost but its bubble would reach.
Printed are medians over the rounds of the ratios within a round, since the machine's speed drifts from one to the next.
All of them keep the memory that they free, as on a GPU (`--fresh_memory`: glibc's own way, by which every large tensor
comes from the kernel page by page). Of ours also the host's time around a pass: the CPU time of a step's thread outside
of its passes and the optimizer step, over the number of passes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, trainer_peer
from benchmarks.allocation import keep_freed_memory
from benchmarks.workload import build_llama, compose_run, run_ranks, take_turns

NUM_STAGES = 2
RUNNERS = (
    "ours",
    "ours-interleaved",
    "ours-zero-bubble",
    "copies",
    "bare",
    "bare-default",
    "torch",
    "torch-default",
    "interleaved",
    "zbv",
    "torch-dualpipev",
    "dualpipev",
    "trainer",
)
# With the default vocabulary the head is as much work as one decoder layer, so that two stages can be given the same:
# what is measured is the pipeline, and not how well ten layers happen to divide by two.
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a runner takes in a round")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--vocab_size", type=int, default=6144)
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--seq_length", type=int, default=256)
    parser.add_argument("--micro_batch_size", type=int, default=4)
    parser.add_argument("--fresh_memory", action="store_true", help="glibc's own allocator, page faults and all")
    parser.add_argument(
        "--runners", default="ours,copies,bare", help=f"all, or some of {', '.join(RUNNERS)}, with commas between"
    )
    arguments = parser.parse_args()
    arguments.runners = RUNNERS if arguments.runners == "all" else tuple(arguments.runners.split(","))
    if unknown := set(arguments.runners) - set(RUNNERS):
        parser.error(f"no such runner: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), arguments)
        trainer = start_trainer(arguments) if "trainer" in arguments.runners else None
        ranks = run_ranks(work, NUM_STAGES, Path(folder), arguments, trainer)
    report([rates for rates, _ in ranks], arguments)
    for name, seconds in ranks[0][1].items():
        worst = max(seconds, *(around[name] for _, around in ranks[1:]))
        print(f"{name}: {1e3 * worst:.2f} ms of host time around a pass")


def describe_model(arguments: argparse.Namespace) -> dict[str, int]:
    return {**MODEL, "num_hidden_layers": arguments.layers, "vocab_size": arguments.vocab_size}


def make_material(folder: Path, arguments: argparse.Namespace) -> None:
    """A random model, and samples of exactly `seq_length` tokens in which every token is a target."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    LlamaForCausalLM(build_llama(**describe_model(arguments))).save_pretrained(folder / "model")
    vocabulary = {f"w{i}": i for i in range(arguments.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(
        folder / "model"
    )
    with open(folder / "train.jsonl", "w") as file:
        for _ in range(arguments.micro_batches * arguments.micro_batch_size * 4):
            words = " ".join(
                f"w{i}" for i in torch.randint(3, arguments.vocab_size, (arguments.seq_length - 2,)).tolist()
            )
            file.write(f'{{"prompt": "w3", "completion": "{words}"}}\n')


def start_trainer(arguments: argparse.Namespace) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    options = (
        theirs,
        describe_model(arguments),
        arguments.micro_batches,
        arguments.micro_batch_size,
        arguments.seq_length,
        arguments.precision,
        arguments.fresh_memory,
    )
    context.Process(target=trainer_peer.serve_trainer, args=options, daemon=True).start()
    theirs.close()
    return ours


def work(
    folder: Path, arguments: argparse.Namespace, trainer: Connection | None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Tokens/s of each runner on this rank, round by round, and seconds of host time around a pass of ours."""
    if not arguments.fresh_memory:
        keep_freed_memory()
    runners = build_runners(folder, arguments, trainer)
    tokens = arguments.micro_batches * arguments.micro_batch_size * arguments.seq_length * arguments.steps
    rates = take_turns(runners, arguments.rounds, arguments.steps, tokens)
    around = {name: step.measure_around() for name, step in runners.items() if isinstance(step, OurStep)}
    return rates, around


def build_runners(
    folder: Path, arguments: argparse.Namespace, trainer: Connection | None
) -> dict[str, Callable[[], object]]:
    """Name -> a function that takes one optimizer step."""
    import torch.distributed as dist

    from models.weights.sources import open_weights
    from training.distributed.ranks import read_ranks
    from training.pipeline.partition import split_layers, weigh_layers
    from training.setup import build_setup

    given = (
        f"model_name_or_path={folder}/model",
        f"train_file={folder}/train.jsonl",
        f"output_dir={folder}/out",
        f"data.cache_dir={folder}/cache",
        f"num_stages={NUM_STAGES}",
        f"micro_batch_size={arguments.micro_batch_size}",
        f"gradient_accumulation_steps={arguments.micro_batches}",
        f"max_seq_length={arguments.seq_length}",
        "data.prompt_template='{prompt}'",
        f"precision={arguments.precision}",
        "activation_checkpoint_interval=0",
    )

    def prepare(*overrides: str) -> peers.Work:
        config = compose_run(*given, *overrides)
        return peers.Work(config, build_setup(config, open_weights(config.model_name_or_path), read_ranks()))

    shared = prepare()
    layers, bounds = shared.layers, shared.setup.bounds
    folded = prepare("schedule=zero_bubble").setup.bounds
    builders: dict[str, Callable[[], Callable[[], object]]] = {
        "ours": lambda: build_ours(shared),
        "ours-interleaved": lambda: build_ours(prepare("schedule=interleaved")),
        "ours-zero-bubble": lambda: build_ours(prepare("schedule=zero_bubble")),
        "copies": lambda: peers.build_copies(shared),
        "bare": lambda: peers.build_bare(shared, bounds),
        "bare-default": lambda: peers.build_bare(shared, None),
        "torch": lambda: peers.build_torch(shared, bounds),
        "torch-default": lambda: peers.build_torch(
            shared, split_layers(weigh_layers(layers, "uniform"), NUM_STAGES, "uniform")
        ),
        "interleaved": lambda: peers.build_torch(shared, prepare("schedule=interleaved").setup.bounds),
        "zbv": lambda: peers.build_torch(shared, folded, "ScheduleZBVZeroBubble"),
        "torch-dualpipev": lambda: peers.build_torch(shared, folded, "ScheduleDualPipeV"),
        "dualpipev": lambda: peers.build_dualpipev(shared, folded),
        "trainer": lambda: trainer_peer.build_trainer(trainer if dist.get_rank() == 0 else None),
    }
    return {name: builders[name]() for name in arguments.runners}


class OurStep:
    """One optimizer step of this trainer, as a callable."""

    def __init__(self, engine: Any, step: Callable[[], object]) -> None:
        self._engine, self._step = engine, step
        self._passes: list[float] = []

    def __call__(self) -> object:
        return self._step()

    def before(self, unit: str) -> None:
        self._start = time.thread_time()

    def after(self, unit: str) -> None:
        from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, WEIGHTS

        if unit in (FORWARD, BACKWARD, WEIGHTS, OPTIMIZER):
            self._passes.append(time.thread_time() - self._start)

    def measure_around(self) -> float:
        self._engine.observe(self)
        start = time.thread_time()
        self._step()
        return (time.thread_time() - start - sum(self._passes)) / len(self._passes)


def build_ours(shared: peers.Work) -> OurStep:
    from data.storage.tokenized import TokenizedDataset
    from training.build import build_engine, build_loaders
    from training.distributed.ranks import read_ranks
    from training.inputs.datasets import load_tokenizer, tokenize
    from training.inputs.loaders import RankData
    from training.inputs.step_budget import StepBudget
    from training.setup import Run

    config, setup, ranks, total_steps = shared.config, shared.setup, read_ranks(), 10**5
    run = Run.of(setup, ranks)
    tokenizer = load_tokenizer(config, setup.source)
    datasets = tokenize(config, tokenizer)
    engine = build_engine(run)
    budget = StepBudget(len(TokenizedDataset(datasets["train_file"], False, False)), total_steps, total_steps)
    loader = build_loaders(run, engine, RankData(datasets, tokenizer, setup.layout, ranks), budget).train
    micro_batches, steps = loader.iterate(0, total_steps), itertools.count()
    return OurStep(engine, lambda: engine.train_step(micro_batches, next(steps), total_steps))


def report(ranks: list[dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    """A runner's rate is that of its slower rank; the copies' rates add up."""
    rates = {
        name: [sum(pair) if name == "copies" else min(pair) for pair in zip(*(rank[name] for rank in ranks))]
        for name in arguments.runners
    }
    if "trainer" in rates:  # which one rank waits for
        rates["trainer"] = ranks[0]["trainer"]
    print(
        f"\npp{NUM_STAGES}, {arguments.layers} layers, {arguments.micro_batches} micro-batches of "
        f"{arguments.micro_batch_size} x {arguments.seq_length}, vocabulary {arguments.vocab_size:,}, "
        f"{arguments.precision}; medians of {arguments.rounds} rounds (least - most)\n"
    )
    own = [name for name in rates if name.startswith("ours")]
    print(f"| runner | tokens/s | {' | '.join(f'{name} / this' for name in own)} |\n{'|---' * (2 + len(own))}|")
    for name, values in rates.items():
        ratios = (describe([a / b for a, b in zip(rates[ours], values)], ".3f") for ours in own)
        print(f"| {name} | {describe(values, ',.0f')} | {' | '.join(ratios)} |")
    if "copies" in rates:
        bound = arguments.micro_batches / (arguments.micro_batches + NUM_STAGES - 1)
        print(
            f"\nours / ({bound:.3f} of the copies): "
            f"{describe([a / (b * bound) for a, b in zip(rates['ours'], rates['copies'])], '.3f')}"
        )


def describe(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


if __name__ == "__main__":
    main()
