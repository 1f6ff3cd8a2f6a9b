"""The tensors that recomputation keeps leave the device, comes back in time, and is the same."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from training.pipeline import activation_offload
from training.pipeline.activation_offload import ActivationOffload

GROUPS = 4


class Layer(torch.nn.Module):
    """A group's layer, which takes positions beside the hidden states, as those of a model do."""

    def __init__(self, seen: list[weakref.ref[torch.UntypedStorage]]) -> None:
        super().__init__()
        self._linear, self._seen = torch.nn.Linear(8, 8), seen

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._seen.append(weakref.ref(hidden_states.untyped_storage()))
        return self._linear(hidden_states).tanh(), positions


def run(offloads: bool, passes: int = 2) -> tuple[list[torch.Tensor], int]:
    """Gradients of so many forward passes, then their backward passes; and, after the forward passes, how many of the
    groups' inputs still lie on the device."""
    torch.manual_seed(0)
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    layers = [Layer(seen) for _ in range(GROUPS)]
    function = partial(checkpoint, use_reentrant=False)
    if offloads:
        function = ActivationOffload().wrap(function)
    inputs = [torch.randn(2, 8, requires_grad=True) for _ in range(passes)]
    outputs = []
    for entering in inputs:
        hidden_states, positions = entering, torch.arange(8)
        for layer in layers:
            hidden_states, positions = function(layer, hidden_states, positions)
        outputs.append(hidden_states)
    gc.collect()
    alive = sum(storage() is not None for storage in seen)
    for output in outputs:
        output.sum().backward()
    return [tensor.grad for tensor in (*inputs, *(p for layer in layers for p in layer.parameters()))], alive


def test_gradients_are_the_same_to_the_bit() -> None:
    (kept, _), (moved, _) = run(False), run(True)
    assert all(torch.equal(*pair) for pair in zip(kept, moved, strict=True))


def test_only_the_inputs_of_the_first_groups_stay() -> None:
    assert run(False)[1] == 2 * GROUPS
    assert run(True)[1] == 2


def test_the_next_is_fetched_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    names: dict[int, str] = {}
    started, taken = activation_offload.HostCopy._start, activation_offload.HostCopy.take_back

    def name(copy: activation_offload.HostCopy) -> str:
        return names.setdefault(id(copy), str(len(names)))

    def start(copy: activation_offload.HostCopy) -> None:
        if copy._back is None:
            events.append(f"fetch {name(copy)}")
        started(copy)

    def take_back(copy: activation_offload.HostCopy) -> torch.Tensor:
        events.append(f"need {name(copy)}")
        return taken(copy)

    monkeypatch.setattr(activation_offload.HostCopy, "_start", start)
    monkeypatch.setattr(activation_offload.HostCopy, "take_back", take_back)
    run(True, passes=1)
    assert events == ["need 0", "fetch 0", "fetch 1", "need 1", "fetch 2", "need 2"]
