"""Counts what one decoder layer asks of a device in its forward and backward pass under bf16: operators, each at least
one kernel launch, and the bytes of activations that they read and write. The passes run on the meta device, so
any size is counted at once, and nothing depends on this machine.

    python benchmarks/launches.py [--model llama_8b] [--tokens 4000] [--rank 16]

    full            all weights trained
    frozen          none of them: what is left where only adapters are trained
    lora            LoRA on all projections, as a run has it
    lora of peft    the same, as peft runs it

`products` are the bytes of the same layer's matrix products and attention alone, which no fusion of what lies between
them removes; `the rest` is what it could. Fused attention is one operator and reads and writes what its kernels do.
Bytes of weights, which a micro-batch reads twice and whose gradients it writes, are not of a token and not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.workload import compose_run  # noqa: E402
from models.adapters.fused import fuse_products  # noqa: E402
from models.architecture.lookup import build_layers  # noqa: E402
from models.weights.config_file import parse_config  # noqa: E402
from training.costs.saved_activations import WithoutData  # noqa: E402

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
NO_LAUNCH = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "alias",
}


class Counted(TorchDispatchMode):
    """The operators of the passes within it, by name, and the bytes of activations that they read and write.

    weights: addresses of what is not counted. products: bytes of matrix products and attention; rest: of all others.
    """

    def __init__(self, weights: set[int], tokens: int) -> None:
        super().__init__()
        self._weights, self._tokens = weights, tokens
        self.operators: Counter[str] = Counter()
        self.products = self.rest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NO_LAUNCH:
            self.operators[name] += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            moved = sum(tensor.nbytes for tensor in tensors if self._is_activation(tensor))
            if name in PRODUCTS:
                self.products += moved
            else:
                self.rest += moved
        return result

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        """Returns whether it has elements for each token, unlike weights and their gradients."""
        return tensor.untyped_storage()._cdata not in self._weights and self._tokens in tensor.shape

    def add_attention(self, *tensors: torch.Tensor) -> None:
        self.operators["attention"] += 1
        self.products += sum(tensor.nbytes for tensor in tensors)


@contextmanager
def attention_as_one(counted: Counted) -> Iterator[None]:
    """Count the fused attention of `WithoutData` as its kernels: forward q, k, v to the output, backward all of these
    and the output's gradient to three gradients."""
    from training.costs import saved_activations

    fused = saved_activations._FusedAttention
    forward, backward = fused.forward, fused.backward

    def run_forward(context: Any, *inputs: torch.Tensor) -> torch.Tensor:
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


def count(module: nn.Module, hidden_size: int, tokens: int) -> tuple[Counted, Counted]:
    """Return what the forward and the backward pass of a layer's module do for a row of `tokens`."""
    weights = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    hidden_states = torch.empty(1, tokens, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    position_ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    passes = Counted(weights, tokens), Counted(weights, tokens)
    with WithoutData(), attention_as_one(passes[0]), passes[0]:
        output = module((hidden_states, position_ids, position_ids.to(torch.int32)))[0]
    gradient = torch.empty_like(output)
    with WithoutData(), attention_as_one(passes[1]), passes[1]:
        output.backward(gradient)
    return passes


def build_modules(model: str, rank: int) -> tuple[dict[str, nn.Module], int]:
    """Return a decoder layer's module as each of the contenders has it, on the meta device, and its hidden size."""
    config = parse_config(compose_run(f"model={model}").model, Path("conf/model"))
    config._attn_implementation = "sdpa"

    def build(adapted: bool) -> nn.Module:
        layer = build_layers(config)[1]
        module = layer.build_on_meta().to(torch.bfloat16)
        if not adapted:
            return module
        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        return peft.inject_adapter_in_model(lora, module, low_cpu_mem_usage=True).to(torch.bfloat16)

    fused = build(adapted=True)
    fuse_products(fused)
    modules = {
        "full": build(adapted=False),
        "frozen": build(adapted=False).requires_grad_(False),
        "lora": fused,
        "lora of peft": build(adapted=True),
    }
    return modules, config.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama_8b", help="of conf/model (llama_8b)")
    parser.add_argument("--tokens", type=int, default=4000, help="a row; no size of the model's weights (4000)")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    modules, hidden_size = build_modules(arguments.model, arguments.rank)
    print(f"a layer of {arguments.model}, {arguments.tokens} tokens, bf16; KB of a token\n")
    print("| | operators, forward | backward | products, forward | backward | the rest, forward | backward |")
    print("|---|---|---|---|---|---|---|")
    counts = {name: count(module, hidden_size, arguments.tokens) for name, module in modules.items()}
    for name, passes in counts.items():
        cells = [f"{each.operators.total()}" for each in passes]
        cells += [f"{each.products / arguments.tokens / 1e3:,.0f}" for each in passes]
        cells += [f"{each.rest / arguments.tokens / 1e3:,.0f}" for each in passes]
        print(f"| {name} | {' | '.join(cells)} |")
    for name, passes in counts.items():
        listed = " / ".join(", ".join(f"{n} {key}" for key, n in each.operators.most_common()) for each in passes)
        print(f"\n{name}: {listed}")


if __name__ == "__main__":
    main()
