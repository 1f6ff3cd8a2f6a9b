"""The experts of a layer against transformers' `grouped_mm` and a dense layer of the same active FLOPs: time and
peak memory of a forward and backward pass, as ratios.

    python benchmarks/experts.py [--rounds 9] [--precisions fp32 bf16] [--intermediate_sizes 256 1408] [--tiny]

64 experts, 8 for each token, 4,096 tokens of 512, each token's experts drawn at random: all alike, or some more often
(Zipf). LoRA of rank 8 on all of them, against the same experts trained in full, and against the same experts frozen
without it; and, in a second table, on experts that stay in nf4 (QLoRA; needs bitsandbytes), fp8, mxfp4 and int4, eight
of which are dequantized at once. One thread; in this process, on the same tensors, in turns; ratios are taken within a
round, since the machine's speed drifts. Time is the processor's, which other programs on the machine disturb less than
a clock's; on a GPU, if there is one, a clock's.
Freed memory is kept for the next tensor, as a GPU's allocator does; with --fresh_memory the kernel hands out, and
clears, large tensors page by page, as glibc has it. Memory is that of all tensors that live at once, without inputs and
weights. --tiny: small ones, to see that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peft import LoraConfig, inject_adapter_in_model
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeMLP

from benchmarks.allocation import AllocationPeak, keep_freed_memory
from benchmarks.workload import draw_parts
from models.adapters.quantized import hold, quantize
from models.adapters.targets import list_adaptable
from models.experts import frozen
from models.experts.grouped import GROUPED
from models.experts.lora import use_grouped_products
from models.layers.frozen import FrozenStack

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUTINGS = ("uniform", "zipf")
OURS, THEIRS, DENSE, LORA, FROZEN = "ours", "grouped_mm", "dense", "LoRA", "frozen"
FORMS = ("nf4", "fp8", "mxfp4", "int4")
EXPERTS_AT_ONCE = 8
INPUTS = 4  # of a contender before its weights: hidden states, experts, their weights, the gradient


@dataclass(frozen=True)
class Shape:
    tokens: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 64
    num_active: int = 8


@dataclass(frozen=True)
class Contender:
    """run: a forward and backward pass. inputs: what it starts from, weights included."""

    run: Callable[[], Any]
    inputs: Sequence[torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--intermediate_sizes", nargs="+", type=int, default=[256, 1408])
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--fresh_memory", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.fresh_memory:
        keep_freed_memory()
    sizes = [32] if arguments.tiny else arguments.intermediate_sizes
    shape = Shape(tokens=64, hidden_size=32, num_experts=8, num_active=2) if arguments.tiny else Shape()
    print_head(shape, arguments.rounds)
    frozen.count_chunk = lambda shape: min(EXPERTS_AT_ONCE, shape[0])
    quantized = []
    for precision, size, routing in itertools.product(arguments.precisions, sizes, arguments.routings):
        contenders = build_contenders(dataclasses.replace(shape, intermediate_size=size), precision, routing)
        peaks = {name: measure_peak(contender) for name, contender in contenders.items()}
        seconds, case = measure_seconds(contenders, arguments.rounds), f"{precision} | {size} | {routing}"
        print_row(case, seconds, peaks)
        held = {name: count_held(contenders[name]) for name in (LORA, *FORMS)}
        quantized.append([case, *(describe_form(name, seconds, peaks, held) for name in FORMS)])
    heads = [f"{name} / LoRA: time; weights; peak beyond them, MiB of MiB" for name in FORMS]
    print(f"\n| precision | intermediate | routing | {' | '.join(heads)} |\n|{'---|' * (3 + len(FORMS))}")
    for cells in quantized:
        print(f"| {' | '.join(cells)} |")


def build_contenders(shape: Shape, precision: str, routing: str) -> dict[str, Contender]:
    """Returns the contenders, all on the same hidden states, gradient and experts of each token."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "dtype": DTYPES[precision],
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    hidden_states = torch.randn(shape.tokens, shape.hidden_size, **options, requires_grad=True)  # [N, D]
    gradient = torch.randn_like(hidden_states)
    top_k_weights, top_k_index = route(shape, routing)  # [N, K]
    top_k_weights = top_k_weights.to(**options).requires_grad_()
    experts = {name: build_experts(shape, OURS, options) for name in (OURS, FROZEN, LORA, *FORMS)}
    experts[THEIRS] = build_experts(shape, THEIRS, options)
    experts[THEIRS].load_state_dict(experts[OURS].state_dict())
    experts[FROZEN].requires_grad_(False)
    experts |= {name: put_adapter_on(experts[name]) for name in (LORA, *FORMS)}
    for form in FORMS:
        layer = nn.ModuleDict({"experts": experts[form]})
        for each in hold(layer, draw_stacks(layer, form, options)):
            each.replace()
    routed = (hidden_states, top_k_index.to(hidden_states.device), top_k_weights)
    dense = build_dense(shape, options)
    return {
        **{name: build_contender(module, routed, gradient) for name, module in experts.items()},
        DENSE: build_contender(dense, (hidden_states,), gradient),
    }


def build_contender(module: nn.Module, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> Contender:
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    stacks = (each for part in module.modules() for each in vars(part).values() if isinstance(each, FrozenStack))
    given = (*inputs, gradient, *module.parameters(), *(tensor for stack in stacks for tensor in stack.parts))
    return Contender(lambda: torch.autograd.grad(module(*inputs), wanted, gradient), given)


def draw_stacks(layer: nn.Module, form: str, options: dict[str, Any]) -> dict[str, FrozenStack]:
    """The stacks of a layer in a form: in nf4 with their values, else of random numbers."""
    names = list_adaptable(layer).stacks
    if form == "nf4":
        return quantize(layer, names)
    shapes = {name: layer.get_parameter(name).shape for name in names}
    return {
        name: FrozenStack(form, draw_parts(form, shape, options["device"]), shape, options["dtype"])
        for name, shape in shapes.items()
    }


def build_experts(shape: Shape, implementation: str, options: dict[str, Any]) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_active,
    )
    config._experts_implementation = GROUPED if implementation == OURS else implementation
    return draw_weights(Qwen3MoeExperts(config), options)


def put_adapter_on(experts: nn.Module) -> nn.Module:
    """Adds LoRA to both stacks of experts, as a run does."""
    layer = nn.ModuleDict({"experts": experts})
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    inject_adapter_in_model(LoraConfig(r=8, target_modules=[], target_parameters=stacks), layer)
    use_grouped_products(layer)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return layer["experts"]


def build_dense(shape: Shape, options: dict[str, Any]) -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=shape.hidden_size)
    return draw_weights(Qwen3MoeMLP(config, intermediate_size=shape.intermediate_size * shape.num_active), options)


def draw_weights(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module.to(**options)


def route(shape: Shape, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts) of each token, [N, K], drawn without replacement: expert e by 1, or by 1 / (e + 1)."""
    popularity = torch.ones(shape.num_experts) if routing == "uniform" else 1 / torch.arange(1.0, 1 + shape.num_experts)
    experts = torch.multinomial(popularity.expand(shape.tokens, -1), shape.num_active)
    return torch.rand(experts.shape).softmax(dim=-1), experts


def measure_seconds(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in turn(list(contenders), number):
            start = read_clock()
            contenders[name].run()
            seconds[name].append(read_clock() - start)
    return seconds


def turn(names: list[str], number: int) -> Iterator[str]:
    """All of them, each round another first."""
    return itertools.islice(itertools.cycle(names), number % len(names), number % len(names) + len(names))


def read_clock() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_peak(contender: Contender) -> int:
    """Returns the peak bytes of all live storages, without the inputs."""
    seen = patch.object(frozen, "frozen_mm", frozen.multiply_in_chunks)  # whose operators the counter sees
    with seen, AllocationPeak(*contender.inputs) as counter:
        contender.run()
    return counter.peak


def print_head(shape: Shape, rounds: int) -> None:
    print(
        f"{shape.num_experts} experts, {shape.num_active} for each of {shape.tokens:,} tokens of {shape.hidden_size}; "
        f"{rounds} rounds, medians (least - most)"
    )
    columns = ["precision", "intermediate", "routing", "grouped_mm / ours, time", "ours / dense, time"]
    columns += ["LoRA / ours, time", "LoRA / frozen, time", "ours, s"]
    columns += ["peak, MiB: ours", "grouped_mm", "dense", "LoRA"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def print_row(case: str, seconds: dict[str, list[float]], peaks: dict[str, int]) -> None:
    cells = [
        case,
        compare(seconds[THEIRS], seconds[OURS]),
        compare(seconds[OURS], seconds[DENSE]),
        compare(seconds[LORA], seconds[OURS]),
        compare(seconds[LORA], seconds[FROZEN]),
        f"{statistics.median(seconds[OURS]):.2f}",
        *(f"{peaks[name] / 2**20:,.0f}" for name in (OURS, THEIRS, DENSE, LORA)),
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def count_held(contender: Contender) -> int:
    """Returns the bytes of the experts' weights."""
    return sum(tensor.nbytes for tensor in contender.inputs[INPUTS:])


def describe_form(name: str, seconds: dict[str, list[float]], peaks: dict[str, int], held: dict[str, int]) -> str:
    weights, peak = (f"{each[name] / 2**20:,.0f} of {each[LORA] / 2**20:,.0f}" for each in (held, peaks))
    return f"{compare(seconds[name], seconds[LORA])}; {weights}; {peak}"


def compare(seconds: list[float], others: list[float]) -> str:
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


if __name__ == "__main__":
    main()
