"""Counts what one decoder layer asks of a device in its forward and backward pass under bf16: operators, each at least
one kernel launch, and the bytes of activations that they read and write. The passes run on the meta device, so
any size is counted at once, and nothing depends on this machine.

    python benchmarks/launches.py [--model llama_8b] [--tokens 4000] [--rank 16]
    python benchmarks/launches.py --host 200     what the host needs for a layer, without and with recomputation

    full            all weights trained
    frozen          none of them: what is left where only adapters are trained
    lora            LoRA on all projections, as a run has it
    lora of peft    the same, as peft runs it
    packed          all weights trained, the row packed with --documents, by varlen_attn
    ring            all weights trained, a rank of two that share rows of twice as many tokens around a ring
    packed ring     the same with packed rows

Times are those of a token at the peaks of a GPU of conf/hardware: of the FLOPs of matrix products and attention, and of
all bytes at the bandwidth of its memory. What a layer may take is the larger one of both for each product, and nothing
for the rest if it were fused into them.

`products` are the bytes of the same layer's matrix products and attention alone, which no fusion of what lies between
them removes; `the rest` is what it could. Fused attention is one operator and reads and writes what its kernels do.
Bytes of weights, which a micro-batch reads twice and whose gradients it writes, are not of a token and not counted.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import compose_run  # noqa: E402
from models.adapters.fused import fuse_products  # noqa: E402
from models.architecture.lookup import build_layers  # noqa: E402
from models.layers.decoder import PipelineDecoderLayer  # noqa: E402
from models.layers.documents import DocumentBounds  # noqa: E402
from models.layers.packed_attention import VARLEN  # noqa: E402
from models.parallel import block_kernels, blocks, ring  # noqa: E402
from models.parallel.shard import NO_CP, ContextParallel  # noqa: E402
from models.sharding.context_parallel import share_sequence  # noqa: E402
from models.weights.config_file import parse_config  # noqa: E402
from training.config.schema import CheckpointMode, HardwareConfig, load_hardware  # noqa: E402
from training.costs.without_data import WithoutData  # noqa: E402
from training.pipeline.activation_checkpoint import ActivationCheckpointing  # noqa: E402

_SMALL = {  # a layer for `--host`
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 8, "vocab_size": 256,
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
ATTENTION = {
    "_varlen_attn", "_varlen_attn_backward", "_flash_attention_forward", "_flash_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
}  # fmt: skip
NO_LAUNCH = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "alias",
    "promote_types",
}


class Counted(TorchDispatchMode):
    """The operators of the passes within it, by name, and the bytes of activations that they read and write.

    weights: addresses of what is not counted. tokens: lengths of a row and of its parts. products: bytes of matrix
    products and attention; rest: of all others.
    """

    def __init__(self, weights: set[int], tokens: set[int]) -> None:
        super().__init__()
        self._weights, self._tokens = weights, tokens
        self.operators: Counter[str] = Counter()
        self.products = self.rest = self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NO_LAUNCH:
            self.operators[name] += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            moved = sum(tensor.nbytes for tensor in tensors if self._is_activation(tensor))
            if name in ("mm", "addmm"):
                left, right = args[-2:]
                self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
            if name in PRODUCTS | ATTENTION:
                self.products += moved
            else:
                self.rest += moved
        return result

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        """Returns whether it has elements for each token, unlike weights and their gradients."""
        return tensor.untyped_storage()._cdata not in self._weights and not self._tokens.isdisjoint(tensor.shape)

    def add_attention(self, *tensors: torch.Tensor | None) -> None:
        """tensors: what its kernel reads and writes; None for a mask that is not given."""
        self.operators["attention"] += 1
        self.products += sum(tensor.nbytes for tensor in tensors if tensor is not None)


@contextmanager
def attention_as_one(counted: Counted) -> Iterator[None]:
    """Count the fused attention of `WithoutData` as its kernels: forward q, k, v to the output, backward all of these
    and the output's gradient to three gradients."""
    from training.costs.without_data import FusedAttention as fused

    forward, backward = fused.forward, fused.backward

    def run_forward(context: Any, *inputs: torch.Tensor | None) -> torch.Tensor:
        output = forward(context, *inputs)
        counted.add_attention(*inputs, output)
        return output

    def run_backward(context: Any, gradient: torch.Tensor) -> Any:
        inputs = context.saved_tensors
        counted.add_attention(*inputs[:4], gradient, *inputs[:3])
        return backward(context, gradient)

    fused.forward, fused.backward = staticmethod(run_forward), staticmethod(run_backward)
    try:
        yield
    finally:
        fused.forward, fused.backward = staticmethod(forward), staticmethod(backward)


def count_attention(config: Any, documents: int, length: int, tokens: int) -> int:
    """Return the FLOPs of causal attention of `tokens` in a forward pass, in documents that fill rows of `length`; a
    backward pass has 2.5 times as many."""
    seen = length // documents // 2  # on average
    return 4 * tokens * seen * config.num_attention_heads * config.head_dim


@dataclass(frozen=True)
class Contender:
    """A decoder layer's module on the meta device, and what it is given: the number of documents of a row, and the
    ranks that share rows around a ring."""

    module: nn.Module
    documents: int = 1
    parts: ContextParallel = NO_CP


def count(contender: Contender, hidden_size: int, tokens: int) -> tuple[Counted, Counted]:
    """Return what the forward and the backward pass of a layer do for `tokens` of a row on this rank."""
    module, parts = contender.module, contender.parts
    weights = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    hidden_states = torch.empty(1, tokens, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    position_ids = torch.zeros(1, tokens * parts.size, dtype=torch.long, device="meta")
    inputs = hidden_states, position_ids, position_ids.to(torch.int32)
    lengths = {tokens, tokens // 2} if parts.is_ring else {tokens}
    passes = Counted(weights, lengths), Counted(weights, lengths)
    module.context.bounds = DocumentBounds(contender.documents, -(-tokens * parts.size // contender.documents))
    with ring_as_on_a_gpu() if parts.is_ring else nullcontext():
        with WithoutData():
            module(inputs)  # what follows from the documents is derived once for all layers
        with WithoutData(), attention_as_one(passes[0]), passes[0]:
            output = module(inputs)[0]
        gradient = torch.empty_like(output)
        with WithoutData(), attention_as_one(passes[1]), passes[1]:
            output.backward(gradient)
    return passes


@contextmanager
def ring_as_on_a_gpu() -> Iterator[None]:
    """Blocks go through the kernels of a GPU, transfers arrive at once, and both are counted."""

    class Transfer:
        def __init__(self, sent: torch.Tensor, *_: object) -> None:
            self._sent = sent

        def receive(self) -> torch.Tensor:
            return torch.empty_like(self._sent)

    flash = block_kernels.BlockKernel(block_kernels._attend_flash, block_kernels._differentiate_flash)
    with ExitStack() as stack:
        stack.enter_context(patch.object(blocks, "find_kernel", lambda _: flash))
        stack.enter_context(patch.object(ring, "Transfer", Transfer))
        stack.enter_context(patch.object(ring, "_disable_current_modes", nullcontext))
        yield


def build_contenders(model: str, rank: int, documents: int) -> tuple[dict[str, Contender], Any]:
    """Return the contenders by name, and the model's config. rank: of LoRA."""
    config = parse_config(compose_run(f"model={model}").model, Path("conf/model"))

    def build(adapted: bool = False, attention: str = "sdpa", parts: ContextParallel = NO_CP) -> nn.Module:
        config._attn_implementation = attention
        layer = build_layers(copy.deepcopy(config))[1]
        module = layer.build_on_meta().to(torch.bfloat16)
        if parts.size > 1:
            share_sequence(module, parts)
        if not adapted:
            return module
        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        return peft.inject_adapter_in_model(lora, module, low_cpu_mem_usage=True).to(torch.bfloat16)

    fused = build(adapted=True)
    fuse_products(fused)
    parts = ContextParallel(rank=1, size=2, is_ring=True)
    contenders = {
        "full": Contender(build()),
        "frozen": Contender(build().requires_grad_(False)),
        "lora": Contender(fused),
        "lora of peft": Contender(build(adapted=True)),
        "packed": Contender(build(attention=VARLEN), documents),
        "ring": Contender(build(parts=parts), 1, parts),
        "packed ring": Contender(build(parts=parts), documents, parts),
    }
    return contenders, config


def render(passes: tuple[Counted, Counted], attention: int, tokens: int, hardware: HardwareConfig) -> Iterator[str]:
    """Yield the cells of a row: operators, and of a token KB and us. attention: FLOPs of its forward pass."""
    assert hardware.peak_flops is not None and hardware.memory_bandwidth is not None

    def join(values: Iterable[float], scale: float, digits: int) -> str:
        return " / ".join(f"{value * scale:,.{digits}f}" for value in values)

    products = [each.products / tokens for each in passes]
    rest = [each.rest / tokens for each in passes]
    flops = [(passes[0].flops + attention) / tokens, (passes[1].flops + 2.5 * attention) / tokens]
    yield join((each.operators.total() for each in passes), 1, 0)
    yield join(products, 1e-3, 0)
    yield join(rest, 1e-3, 0)
    yield join(flops, 1e6 / hardware.peak_flops["bf16"], 2)
    yield join(products, 1e-3 / hardware.memory_bandwidth, 2)
    yield join(rest, 1e-3 / hardware.memory_bandwidth, 2)


def tabulate(
    model: str, tokens: int, rank: int, documents: int, hardware_name: str
) -> tuple[list[str], dict[str, tuple[Counted, Counted]]]:
    """Return a row of the table, in Markdown, for each of the contenders, and what was counted of it."""
    contenders, config = build_contenders(model, rank, documents)
    (hardware,) = (each for each in load_hardware() if each.name == hardware_name)
    counts = {name: count(each, config.hidden_size, tokens) for name, each in contenders.items()}
    rows = []
    for name, passes in counts.items():
        length = tokens * contenders[name].parts.size
        attention = count_attention(config, contenders[name].documents, length, tokens)
        rows.append(f"| {name} | {' | '.join(render(passes, attention, tokens, hardware))} |")
    return rows, counts


def measure_host(rounds: int) -> dict[str, float]:
    """Return the milliseconds that this machine's processor takes for a layer's two passes in each mode: the median of
    `rounds` rounds, in each of which every mode runs once, over eight layers so small that hardly anything else counts.
    """
    torch.set_num_threads(1)
    config = parse_config(compose_run("model=llama_8b").model, Path("conf/model"))
    for key, value in _SMALL.items():
        setattr(config, key, value)
    config._attn_implementation = "sdpa"
    specs = [layer for layer in build_layers(config) if issubclass(layer.module_class, PipelineDecoderLayer)]
    layers = [spec.module_class(*spec.args) for spec in specs]
    for parameter in (each for layer in layers for each in layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    modes: dict[str, Callable[..., Any]] = {
        "kept": lambda function, *given: function(*given),
        "recomputed": ActivationCheckpointing(1).build_function(draws=False),
        "recomputed by torch's checkpoint": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
        "selective": ActivationCheckpointing(1, CheckpointMode.selective).build_function(draws=False),
    }
    start = torch.randn(1, 16, config.hidden_size, requires_grad=True)
    integers = torch.arange(16)[None], torch.ones(1, 16, dtype=torch.int32)
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(rounds):
        for name, run in modes.items():
            began, states = time.process_time(), (start, *integers)
            for layer in layers:
                states = run(lambda *given, layer=layer: layer(given), *states)
            states[0].sum().backward()
            seconds[name].append((time.process_time() - began) / len(layers))
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama_8b", help="of conf/model (llama_8b)")
    parser.add_argument("--tokens", type=int, default=4000, help="a row; no size of the model's weights (4000)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--documents", type=int, default=32, help="of a packed row, equally long (32)")
    parser.add_argument("--hardware", default="h100", help="of conf/hardware (h100)")
    parser.add_argument(
        "--host", type=int, default=0, metavar="ROUNDS", help="time the host instead, in 200 rounds, say"
    )
    arguments = parser.parse_args()
    if arguments.host:
        for name, milliseconds in measure_host(arguments.host).items():
            print(f"{name}: {milliseconds:.2f} ms a layer")
        return
    rows, counts = tabulate(arguments.model, arguments.tokens, arguments.rank, arguments.documents, arguments.hardware)
    print(f"a layer of {arguments.model}, {arguments.tokens} tokens, bf16; of a token, forward / backward\n")
    print("| | operators | products, KB | the rest, KB | FLOPs at peak, us | products, us | the rest, us |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    for name, passes in counts.items():
        listed = " / ".join(", ".join(f"{n} {key}" for key, n in each.operators.most_common()) for each in passes)
        print(f"\n{name}: {listed}")


if __name__ == "__main__":
    main()
