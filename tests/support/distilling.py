"""Distillation as its formulas are written, for tests: plain tensors, differentiated by autograd."""

from __future__ import annotations

import torch


def join_others(p: torch.Tensor, q: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p, q [n, V] of the teacher's top_k tokens, and of all others as one event: [n, top_k + 1], or [n, V] with all."""
    token_ids = q.topk(top_k, dim=-1).indices
    chosen = [each.gather(1, token_ids) for each in (p, q)]
    if top_k == p.shape[1]:
        return chosen[0], chosen[1]
    is_other = torch.ones_like(q).scatter(1, token_ids, 0)
    joined = [torch.cat([top, (each * is_other).sum(-1, keepdim=True)], 1) for top, each in zip(chosen, (p, q))]
    return joined[0], joined[1]


def compute_divergence(p: torch.Tensor, q: torch.Tensor, name: str) -> torch.Tensor:
    """The divergence of each row: [n]. p: the student's probabilities. q: the teacher's."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    mean = (p + q) / 2
    return {
        "forward": lambda: kl(q, p),
        "reverse": lambda: kl(p, q),
        "jensen_shannon": lambda: (kl(p, mean) + kl(q, mean)) / 2,
    }[name]()
