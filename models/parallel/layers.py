"""The modules of a sharded layer that transformers does not have: projections, a norm, and hooks that communicate.

`models/sharding/tensor_parallel.py` installs them and says why the project has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from models.parallel.sequence import BlockInput, sum_tokens
from models.parallel.shard import ShardSpec, TensorParallel, sum_backward, sum_forward


def sum_outputs(outputs: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return the sum of the ranks' outputs [B, T, D] of a block, or this rank's part of it."""
    return sum_tokens(outputs, parallel) if parallel.splits_sequence else sum_forward(outputs, parallel)


class PerRankRNG:
    """Random numbers of this rank alone from the start of a block to its last projection, for dropout in its own heads.

    Before and after the block all ranks draw the same. A recomputed block draws the same again: everything follows from
    the state before the block.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: list[tuple[Any, torch.Tensor]] = []

    def begin(self, device: torch.device) -> None:
        seed = int(torch.randint(2**62, ()))
        sources = [torch] + ([torch.get_device_module(device)] if device.type not in ("cpu", "meta") else [])
        self._before = [(source, source.get_rng_state()) for source in sources]
        torch.manual_seed(seed + self._rank)

    def end(self) -> None:
        for source, state in self._before:
            source.set_rng_state(state)
        self._before = []


class RowParallelLinear(nn.Linear):
    """A projection of which this rank has a shard of the inputs. The bias is whole, and added once.

    gives_share: the outputs stay this rank's share of the sum, which is computed after the block.
    """

    parallel: TensorParallel
    randomness: PerRankRNG | None = None
    gives_share = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.randomness is not None:
            self.randomness.end()
        if self.gives_share:
            outputs = self.multiply(inputs)
            return outputs if self.bias is None else outputs + self.bias / self.parallel.size
        outputs = sum_outputs(self.multiply(inputs), self.parallel)
        return outputs if self.bias is None else outputs + self.bias

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight)


class RowParallelConv1D(Conv1D):
    """`RowParallelLinear` for GPT-2's projections, whose weight is [inputs, outputs]; not in blocks of experts."""

    parallel: TensorParallel
    randomness: PerRankRNG | None = None
    gives_share = False
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.randomness is not None:
            self.randomness.end()
        return sum_outputs(self.multiply(inputs), self.parallel) + self.bias

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


class ShardedNorm(nn.Module):
    """The RMSNorm of transformers' OLMo 2 over a vector of which this rank has a shard."""

    def __init__(self, norm: Any, parallel: TensorParallel) -> None:
        super().__init__()
        weight = norm.weight
        spec = ShardSpec(0, (len(weight),))
        self.weight, self.shard_specs = nn.Parameter(spec.take(weight.detach(), parallel)), {"weight": spec}
        self._epsilon, self._length, self._parallel = norm.variance_epsilon, len(weight), parallel

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs.to(torch.float32)
        squares = values.pow(2).sum(-1, keepdim=True)
        # Each rank's outputs depend on the squares of all, so the gradient of the sum is a sum over the ranks too.
        variance = sum_backward(sum_forward(squares, self._parallel), self._parallel) / self._length
        return (self.weight * (values * torch.rsqrt(variance + self._epsilon))).to(inputs.dtype)


class InputGradAllReduce:
    """The hook before a block: the gradient of its first argument, the hidden states, is summed over the ranks; where
    each has a part of them, they are gathered.

    copies: the block changes its argument in place while it trains, which autograd refuses for what a function of ours
    returns.
    """

    def __init__(self, parallel: TensorParallel, randomness: PerRankRNG | None, copies: bool = False) -> None:
        self._parallel, self._randomness, self._copies = parallel, randomness, copies
        self.gathers = BlockInput(parallel) if parallel.splits_sequence else None

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if self.gathers is not None:
            hidden_states = self.gathers.gather(hidden_states)
        else:
            hidden_states = sum_backward(hidden_states, self._parallel)
        if self._copies and block.training:
            hidden_states = hidden_states.clone()
        if self._randomness is not None and block.training:
            self._randomness.begin(hidden_states.device)
        return ((hidden_states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden_states})


class OutputSum:
    """The hook after a block of experts whose parts return shares, flat or not: sums them, and returns this rank's part
    of the sequence."""

    def __init__(self, parallel: TensorParallel, entry: BlockInput) -> None:
        self._parallel, self._entry = parallel, entry

    def __call__(self, block: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        share = outputs[0] if isinstance(outputs, tuple) else outputs
        own = sum_tokens(share.view(self._entry.shape), self._parallel)
        return (own, *outputs[1:]) if isinstance(outputs, tuple) else own


class VocabParallelEmbedding:
    """The hooks around an embedding of the tokens `start` to `stop`: other tokens are looked up as its first one and
    set to zero."""

    def __init__(self, start: int, stop: int, parallel: TensorParallel) -> None:
        self._start, self._stop, self._parallel = start, stop, parallel

    def localize(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        input_ids, *integers = args[0]
        self._is_here = (input_ids >= self._start) & (input_ids < self._stop)
        return (((input_ids - self._start) * self._is_here, *integers),)

    def complete(
        self, module: nn.Module, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        hidden_states, *integers = outputs
        return sum_outputs(hidden_states * self._is_here.unsqueeze(-1), self._parallel), *integers
