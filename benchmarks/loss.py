"""The loss in chunks, and torch's own, against the plain one: time and peak memory of a forward and backward pass, as
ratios.

    python benchmarks/loss.py [--vocab_size 128000] [--tokens 4096] [--hidden_size 512] [--precision bf16] [--rounds 7]

All run in this process on the same tensors, in turns; the ratios are taken within a round, since the machine's speed
drifts. Memory is that of all tensors that live at once, without the inputs. On a GPU if there is one. Torch's own is
`F.linear_cross_entropy` with its default options, where torch has it; it is one operator, so on a CPU nothing sees the
memory that it takes for itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batch import IGNORE_INDEX, Targets
from benchmarks.allocation import AllocationPeak
from models.losses.cross_entropy import causal_lm_loss

PLAIN, IN_CHUNKS, TORCHS = "plain", "in chunks", "torch's own"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Loss = Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab_size", type=int, default=128_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    inputs = make_inputs(arguments)
    losses = list_losses()
    peaks = {name: measure_peak(loss, *inputs) for name, loss in losses.items()}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(arguments.rounds):
        for name in sorted(losses, reverse=number % 2 == 1):  # who comes first takes turns
            seconds[name].append(measure_seconds(losses[name], *inputs))
    report(arguments, peaks, seconds)


def list_losses() -> dict[str, Loss]:
    losses: dict[str, Loss] = {PLAIN: plain_loss, IN_CHUNKS: causal_lm_loss}
    if hasattr(F, "linear_cross_entropy"):
        return {**losses, TORCHS: torch_loss}
    print(f"torch {torch.__version__} has no F.linear_cross_entropy, which 2.13 has")
    return losses


def make_inputs(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, Targets]:
    """hidden_states [1, T, D], weight [V, D], and targets [1, T] at every place."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": DTYPES[arguments.precision], "device": device}
    hidden_states = torch.randn(1, arguments.tokens, arguments.hidden_size, **options, requires_grad=True)
    weight = (
        torch.randn(arguments.vocab_size, arguments.hidden_size, **options)
        .mul_(arguments.hidden_size**-0.5)
        .requires_grad_()
    )
    target_ids = torch.randint(arguments.vocab_size, (1, arguments.tokens), device=device)
    return hidden_states, weight, Targets.find(target_ids, torch.tensor(float(arguments.tokens), device=device))


def plain_loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
    """The same function with whole logits."""
    hidden_states, weight = outputs
    has_target = targets.ids != IGNORE_INDEX
    logits = F.linear(hidden_states[has_target], weight)
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    return F.cross_entropy(logits, targets.ids[has_target], reduction="sum") / targets.denominator


def torch_loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
    """The same function by torch, which has no logits of all tokens at once either."""
    hidden_states, weight = outputs
    has_target = targets.ids != IGNORE_INDEX
    options = nn.LinearCrossEntropyOptions()
    given = hidden_states[has_target], weight, targets.ids[has_target]
    return F.linear_cross_entropy(*given, reduction="sum", options=options) / targets.denominator


def take_pass(loss: Loss, hidden_states: torch.Tensor, weight: torch.Tensor, targets: Targets) -> None:
    torch.autograd.grad(loss((hidden_states, weight), targets), (hidden_states, weight))


def measure_seconds(loss: Loss, *inputs: Any) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    take_pass(loss, *inputs)
    synchronize()
    return time.perf_counter() - start


def measure_peak(loss: Loss, hidden_states: torch.Tensor, weight: torch.Tensor, targets: Targets) -> int | None:
    """Returns the peak bytes of all live storages, without the inputs; None where they are not seen."""
    inputs = hidden_states, weight, targets
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        take_pass(loss, *inputs)
        return torch.cuda.max_memory_allocated() - before
    with AllocationPeak(hidden_states, weight, targets.ids, targets.indices, targets.denominator) as counter:
        take_pass(loss, *inputs)
    return None if loss is torch_loss else counter.peak


def report(arguments: argparse.Namespace, peaks: dict[str, int | None], seconds: dict[str, list[float]]) -> None:
    print(
        f"vocabulary {arguments.vocab_size:,}, {arguments.tokens:,} tokens, hidden {arguments.hidden_size:,}, "
        f"{arguments.precision}"
    )
    print("| loss | peak, GiB | s, median |\n|---|---|---|")
    for name, peak in peaks.items():
        print(f"| {name} | {'-' if peak is None else f'{peak / 2**30:.2f}'} | {statistics.median(seconds[name]):.2f} |")
    plain_peak = peaks.pop(PLAIN)
    for name, peak in peaks.items():
        ratios = [other / plain for other, plain in zip(seconds[name], seconds[PLAIN], strict=True)]
        if peak is not None and plain_peak is not None:
            print(f"peak: {name} / plain = {peak / plain_peak:.3f}")
        print(
            f"time: {name} / plain = {statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f}, "
            f"{arguments.rounds} rounds)"
        )


if __name__ == "__main__":
    main()
