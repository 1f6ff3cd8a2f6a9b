"""The optimizer of a stage's parameters."""

from __future__ import annotations

from typing import Any

import torch

from training.config.schema import OptimizerName, RunConfig


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
