"""The optimizer of a stage's parameters, and what it keeps for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from errors import UserError
from training.config.schema import OptimizerName, RunConfig


class StateKind(Enum):
    """How a tensor that an optimizer keeps relates to the parameter. A checkpoint saves each kind in its own way."""

    elementwise = "elementwise"  # one value for each element
    scalar = "scalar"  # one value, the same for all parameters


# The state of each optimizer, by the names that it gives to its tensors.
STATE_KINDS: dict[type[torch.optim.Optimizer], dict[str, StateKind]] = {
    torch.optim.AdamW: {
        "exp_avg": StateKind.elementwise,
        "exp_avg_sq": StateKind.elementwise,
        "step": StateKind.scalar,
    },
    torch.optim.SGD: {},
}


def build_optimizer(module: torch.nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW or plain SGD, torch's own: the fused kernels run on a GPU and, when the state is offloaded, on the host,
    and nothing is compiled on first use. Vectors (norms, biases) do not decay."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.learning_rate}
    if config.optimizer.name is OptimizerName.sgd:
        return torch.optim.SGD(groups, **options)
    options |= {"betas": tuple(config.optimizer.betas), "eps": config.optimizer.eps}
    return torch.optim.AdamW(groups, fused=True, **options)


def check_optimizer(config: RunConfig) -> None:
    """Raises UserError when the run's optimizer keeps something that is not declared here, or does not keep something
    that is: one step of it on a matrix and a vector of two elements shows what it keeps."""
    module = torch.nn.ParameterList([torch.zeros(2, 1), torch.zeros(2)])
    optimizer = build_optimizer(module, config)
    for parameter in module:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in module:
        check_state(parameter, optimizer.state[parameter], STATE_KINDS.get(type(optimizer), {}))


def check_state(weights: torch.Tensor, state: Mapping[str, Any], declared: Mapping[str, StateKind]) -> None:
    """Raises UserError when `state`, which an optimizer keeps for `weights`, is not what is declared."""
    found = {name: _describe_kind(value, weights) for name, value in state.items() if value is not None}
    expected = {name: kind.value for name, kind in declared.items()}
    if found != expected:
        raise UserError(
            f"for each parameter the optimizer keeps {_list_words(found)}, but a checkpoint saves "
            f"{_list_words(expected)}; install the versions that this project is made for (pip install -r "
            "requirements.txt)"
        )


def _describe_kind(value: Any, weights: torch.Tensor) -> str:
    if not torch.is_tensor(value):
        return type(value).__name__
    if value.shape == weights.shape:
        return StateKind.elementwise.value
    return StateKind.scalar.value if value.ndim == 0 else f"of shape {list(value.shape)}"


def _list_words(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(kinds.items())) or "nothing"
