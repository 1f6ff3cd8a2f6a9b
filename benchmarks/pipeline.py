"""How close a pipeline of two stages comes to its bubble bound, and to bare DeepSpeed, on two CPU cores.

    python benchmarks/pipeline.py [--micro_batches 8] [--rounds 9]

Two processes, each pinned to one core with one thread, take turns in every round at three runners of the same layers, the same
micro-batches and the same AdamW:

    copies  each process alone with the whole model, no pipeline and no engine; their rates are summed
    ours    this trainer's stages, loader and step
    bare    the same specs and split in a plain DeepSpeed `PipelineModule`, fed from a list

The bound of ours is M / (M + P - 1) of the copies' rate: what a pipeline without any cost but its bubble would reach. Printed are
medians over the rounds of the ratios within a round, since the machine's speed drifts from one to the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_STAGES = 2
# The head is as much work as one decoder layer, so that two stages can be given the same: what is measured is the pipeline, and not
# how well ten layers happen to divide by two.
MODEL = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 6144,
}  # fmt: skip
SEQ_LENGTH, MICRO_BATCH_SIZE = 256, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a runner takes in a round")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), arguments.micro_batches)
        rates = run_workers(Path(folder), arguments)
    report(rates, arguments)


def make_material(folder: Path, micro_batches: int) -> None:
    """A random model, and samples of exactly SEQ_LENGTH tokens in which every token is a target."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    LlamaForCausalLM(LlamaConfig(**MODEL, bos_token_id=0, eos_token_id=1, pad_token_id=2)).save_pretrained(folder / "model")
    vocabulary = {f"w{i}": i for i in range(MODEL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(folder / "model")
    with open(folder / "train.jsonl", "w") as file:
        for _ in range(micro_batches * MICRO_BATCH_SIZE * 4):
            words = " ".join(f"w{i}" for i in torch.randint(3, MODEL["vocab_size"], (SEQ_LENGTH - 2,)).tolist())
            file.write(f'{{"prompt": "w3", "completion": "{words}"}}\n')


def run_workers(folder: Path, arguments: argparse.Namespace) -> list[dict[str, list[float]]]:
    """What each of the two ranks measured."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=work, args=(rank, port, folder, arguments)) for rank in range(NUM_STAGES)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.2)
        if any(process.exitcode for process in processes):  # the other would wait for it for ever
            for process in processes:
                process.terminate()
            sys.exit("a rank failed, see above")
    return [json.loads((folder / f"rates_{rank}.json").read_text()) for rank in range(NUM_STAGES)]


def work(rank: int, port: int, folder: Path, arguments: argparse.Namespace) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_STAGES), LOCAL_SIZE=str(NUM_STAGES),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    sys.stdout = open(os.devnull, "w")
    import deepspeed
    import torch.distributed as dist

    from training.ranks import read_ranks
    from training.process import take_device

    take_device(read_ranks())
    deepspeed.init_distributed()
    runners = build_runners(folder, arguments)
    rates: dict[str, list[float]] = {name: [] for name in runners}
    tokens = arguments.micro_batches * MICRO_BATCH_SIZE * SEQ_LENGTH * arguments.steps
    for round_number in range(arguments.rounds + 1):
        names = list(runners) if round_number % 2 else list(runners)[::-1]
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(arguments.steps):
                runners[name]()
            rates[name].append(tokens / (time.perf_counter() - start))
    warm = {name: values[1:] for name, values in rates.items()}  # the first round warms up
    (folder / f"rates_{rank}.json").write_text(json.dumps(warm))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Shared:
    """What the three runners have in common."""

    config: Any
    source: Any
    layers: list[Any]
    layout: Any
    bounds: list[int]
    micro_batches: int


def build_runners(folder: Path, arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Name -> a function that takes one optimizer step."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from models.architecture import build_layers
    from models.weights import open_weights
    from training.config import register_schema
    from training.layout import build_layout
    from training.partition import compute_bounds

    register_schema()
    overrides = [
        f"model_name_or_path={folder}/model", f"train_file={folder}/train.jsonl", f"output_dir={folder}/out", f"data.cache_dir={folder}/cache",
        f"num_stages={NUM_STAGES}", f"micro_batch_size={MICRO_BATCH_SIZE}", f"gradient_accumulation_steps={arguments.micro_batches}",
        f"max_seq_length={SEQ_LENGTH}", "data.prompt_template='{prompt}'", f"precision={arguments.precision}", "activation_checkpoint_interval=0",
    ]  # fmt: skip
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose("base", overrides))
    source = open_weights(config.model_name_or_path)
    source.config._attn_implementation = "sdpa"
    layers = build_layers(source.config)
    layout = build_layout(config, NUM_STAGES, len(layers), False)
    bounds = compute_bounds(layers, NUM_STAGES, config.partition_method)
    shared = Shared(config, source, layers, layout, bounds, arguments.micro_batches)
    return {"copies": build_copies(shared), "ours": build_ours(shared), "bare": build_bare(shared)}


def build_copies(shared: Shared) -> Callable[[], object]:
    import torch

    from models.loss import causal_lm_loss
    from training.run import DTYPES

    modules = []
    for index, layer in enumerate(shared.layers):
        module = layer.module_class(*layer.args)
        module.load_state_dict(shared.source.read_layer(index, layer))
        modules.append(module.to(DTYPES[shared.config.precision]))
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    batches = repeat_batch()

    def run() -> None:
        for _ in range(shared.micro_batches):
            activations, targets = next(batches)
            for module in modules:
                activations = module(activations)
            (causal_lm_loss(activations, targets) / shared.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def build_ours(shared: Shared) -> Callable[[], object]:
    from data.tokenized import TokenizedDataset
    from training.engine import initialize_engine, train_step
    from training.horizon import Horizon
    from training.pipeline import StageModule
    from training.ranks import read_ranks
    from training.preparation import load_tokenizer, tokenize
    from training.run import DTYPES
    from training.stage_loaders import build_loaders

    config, ranks, horizon_steps = shared.config, read_ranks(), 10**5
    tokenizer = load_tokenizer(config, shared.source)
    datasets = tokenize(config, tokenizer)
    module = StageModule(shared.layers, shared.bounds, shared.source, DTYPES[config.precision], 0)
    engine = initialize_engine(module, config, shared.layout)
    horizon = Horizon(len(TokenizedDataset(datasets["train_file"], False, False)), horizon_steps, horizon_steps)
    loader, _ = build_loaders(config, shared.layout, datasets, horizon, module, tokenizer, ranks)
    micro_batches, steps = loader.iterate(0, horizon_steps), itertools.count()
    return lambda: train_step(engine, micro_batches, config, next(steps), horizon_steps)


def build_bare(shared: Shared) -> Callable[[], object]:
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from models.loss import causal_lm_loss
    from training.pipeline import build_layer_specs

    class SplitModule(PipelineModule):
        def _partition_layers(self, method: str = "") -> None:
            self.parts = shared.bounds
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    module = SplitModule(build_layer_specs(shared.layers), num_stages=NUM_STAGES, loss_fn=causal_lm_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    bf16 = shared.config.precision.value == "bf16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE, "gradient_accumulation_steps": shared.micro_batches,
        "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "steps_per_print": 10**9, "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    batches = repeat_batch()
    return lambda: engine.train_batch(batches)


def repeat_batch() -> Iterator[Any]:
    """The same micro-batch for ever, in which every token is a target."""
    import torch

    input_ids = torch.randint(3, MODEL["vocab_size"], (MICRO_BATCH_SIZE, SEQ_LENGTH), generator=torch.Generator().manual_seed(0))  # [B, T]
    position_ids = torch.arange(SEQ_LENGTH).repeat(MICRO_BATCH_SIZE, 1)  # [B, T]
    denominator = torch.tensor(float(MICRO_BATCH_SIZE * (SEQ_LENGTH - 1)))
    return itertools.repeat(((input_ids, position_ids), (input_ids, denominator)))


def report(rates: list[dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    """A pipeline's rate is that of its slower rank; the copies' rates add up."""
    copies = [sum(pair) for pair in zip(*(rank["copies"] for rank in rates))]
    ours = [min(pair) for pair in zip(*(rank["ours"] for rank in rates))]
    bare = [min(pair) for pair in zip(*(rank["bare"] for rank in rates))]
    bound = arguments.micro_batches / (arguments.micro_batches + NUM_STAGES - 1)
    to_bound = [a / (b * bound) for a, b in zip(ours, copies)]
    to_bare = [a / b for a, b in zip(ours, bare)]
    print(f"\npp{NUM_STAGES}, {arguments.micro_batches} micro-batches, {arguments.precision}; medians of {arguments.rounds} rounds (least - most)\n")
    print("| runner | tokens/s |\n|---|---|")
    for name, values in {"two copies, summed": copies, "ours": ours, "bare PipelineModule": bare}.items():
        print(f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f} - {max(values):,.0f}) |")
    print("\n| ratio | median | least - most |\n|---|---|---|")
    for name, values in {f"ours / ({bound:.3f} of the copies)": to_bound, "ours / bare": to_bare}.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} - {max(values):.3f} |")


if __name__ == "__main__":
    main()
