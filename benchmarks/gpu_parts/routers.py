"""The experts that routers choose for each token, kept by sample: of a run and of its oracle, to be compared.

Two right programs in fp32 may differ by more than its bound where rounding sends one token to another expert. Whether
one did is seen here, and by how little its router decided.

B samples of a micro-batch, T tokens of each, K experts per token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu_parts.material import PADDING

Sample = tuple[int, ...]  # its token ids, without padding


@dataclass(frozen=True)
class Choice:
    """The choices of a router for one sample. experts: int16 [T, K], sorted. margins: fp32 [T], how much the logit of
    the last chosen expert exceeds that of the first one that was not."""

    experts: torch.Tensor
    margins: torch.Tensor


@dataclass
class RouterChoices:
    """passes: of each sample, the choices of all layers by the number of the pass on its rank, one pass in each step.

    All ranks have as many passes in a step, so the numbers are in the order of the steps across ranks too.
    """

    passes: dict[Sample, dict[int, list[Choice]]] = field(default_factory=lambda: defaultdict(dict))
    _count: int = 0

    def watch(self, model: nn.Module) -> None:
        """Note what the routers of a model choose from now on; `start` announces each forward pass."""
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda _, __, outputs: self._note(outputs[0].detach(), outputs[-1]))

    def start(self, input_ids: torch.Tensor) -> None:
        """Begin a pass. input_ids: int64 [B, T], padded on the right."""
        self._shape = input_ids.shape
        self._current: list[list[Choice]] = []
        for row in input_ids.tolist():
            length = max(place for place, token in enumerate(row, start=1) if token != PADDING)
            self._current.append([])
            self.passes[tuple(row[:length])][self._count] = self._current[-1]
        self._count += 1

    def _note(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        ordered = logits.float().sort(dim=-1, descending=True).values
        count = chosen.shape[-1]
        margins = (ordered[:, count - 1] - ordered[:, count]).view(self._shape).cpu()
        experts = chosen.sort(dim=-1).values.to(torch.int16).view(*self._shape, count).cpu()
        for layers, row_experts, row_margins in zip(self._current, experts, margins, strict=True):
            layers.append(Choice(row_experts, row_margins))

    def save(self, file: Path) -> None:
        torch.save(
            {
                sample: {
                    number: [(choice.experts, choice.margins) for choice in layers] for number, layers in passes.items()
                }
                for sample, passes in self.passes.items()
            },
            file,
        )


def load_choices(files: Iterable[Path]) -> RouterChoices:
    """Read the files of all ranks."""
    loaded = RouterChoices()
    for file in files:
        for sample, passes in torch.load(file, weights_only=True).items():
            for number, layers in passes.items():
                loaded.passes[sample][number] = [Choice(*choice) for choice in layers]
    return loaded


@dataclass(frozen=True)
class Moved:
    """A token that was sent to other experts than the oracle's. step, layer: from 1. margin: its router's."""

    step: int
    layer: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """moved: in the order of steps and layers. count: all choices. margin: the smallest of all tokens."""

    moved: Sequence[Moved]
    count: int
    margin: float

    def __str__(self) -> str:
        text = f"{len(self.moved)} of {self.count:,} moved"
        if not self.moved:
            return f"{text}, smallest margin {self.margin:.1e}"
        first = self.moved[0]
        return f"{text}, the first in step {first.step}, layer {first.layer}, where the margin is {first.margin:.1e}"


def compare_choices(actual: RouterChoices, expected: RouterChoices) -> Comparison:
    """Raises ValueError where the samples, or the numbers of their passes, are not the same."""
    moved, count, smallest = [], 0, math.inf
    if actual.passes.keys() != expected.passes.keys():
        raise ValueError("the routers of the run have seen other samples than the oracle's")
    for sample, passes in expected.passes.items():
        length = len(sample)
        steps = zip(_list_steps(actual.passes[sample]), _list_steps(passes), strict=True)
        for step, (own, wanted) in enumerate(steps, start=1):
            for layer, (found, right) in enumerate(zip(own, wanted, strict=True), start=1):
                margins = right.margins[:length]
                differ = (found.experts[:length] != right.experts[:length]).any(dim=-1)
                moved += [Moved(step, layer, margin) for margin in margins[differ].tolist()]
                count, smallest = count + length, min(smallest, margins.min().item())
    return Comparison(sorted(moved, key=lambda token: (token.step, token.layer)), count, smallest)


def _list_steps(passes: dict[int, list[Choice]]) -> list[list[Choice]]:
    return [passes[number] for number in sorted(passes)]
