"""Which state a user's optimizer keeps, and whether ZeRO may partition its parameters: found by running it.

What it keeps has to be in its state for each parameter. A number in a parameter group, such as a count of steps, is in
no checkpoint, and under ZeRO-3, where DeepSpeed calls the optimizer once for each part of the weights, it would count
those calls. Of a number in the state of parameters, such as a count of steps, a checkpoint keeps one for all of them.

Under ZeRO an optimizer never sees a parameter. It gets one flat tensor for each group: this rank's part of the group's
concatenated weights. An optimizer that treats each element by itself makes the same updates on that as on the weights;
one that looks at rows, at a matrix or at a norm (Adafactor, Muon, LAMB) silently makes others. So both are run here,
for a few steps on a few weights, and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from errors import UserError
from training.optim.state_kinds import StateTensor, describe_kept

Groups = list[dict[str, Any]]
Build = Callable[[Groups], torch.optim.Optimizer]

STEPS = 6  # RAdam starts to divide by its second moment in the sixth
BOUND = 1e-4  # relative to how far the weights move; fp32 is summed in another order
LEARNING_RATE, WEIGHT_DECAY = 0.05, 0.1
_SHAPES = (((6, 4), (3, 2)), ((5,), (4,)))  # the weights of each group
_NUM_RANKS = 2


def probe_optimizer(build: Build, name: str) -> dict[str, StateTensor]:
    """Return the state that the optimizer keeps for each flat tensor. build: from parameter groups. name: for messages.

    Raises UserError when it is not elementwise, keeps state that no checkpoint could save, or cannot take a step.
    """
    whole = _try(partial(_run_whole, build), lambda error: _refuse_fields(name, error))
    flat, state = _try(
        lambda: (_run_flat(build), _read_state(build)),
        lambda error: _refuse(name, f"on such a part it fails ({error})"),
    )
    unknown = [f"{kept} ({words})" for kept, words in state.items() if isinstance(words, str)]
    if unknown:
        raise _refuse(name, f"for such a part it keeps {', '.join(unknown)}")
    if elsewhere := _list_changed(build):
        raise UserError(
            f"optimizer.custom: {name} keeps {', '.join(elsewhere)}, and no checkpoint saves what is not in the state "
            "of a parameter; give an optimizer that keeps all of it there, such as optimizer=adamw, lion or "
            "torch.optim.RAdam"
        )
    if uneven := _list_uneven(build):
        raise UserError(
            f"optimizer.custom: {name} keeps {', '.join(uneven)}, a number that is another one in parameter groups of "
            "another learning rate, and a checkpoint keeps one for all; give an optimizer that keeps no such number, "
            "such as optimizer=adamw, lion or torch.optim.RAdam"
        )
    for one, other in zip(whole, flat, strict=True):
        if (one - other).abs().max() > BOUND * one.abs().max():
            raise _refuse(name, "on such a part it makes other steps than on whole weights")
    return {kept: words for kept, words in state.items() if isinstance(words, StateTensor)}


def _try(run: Callable[[], Any], explain: Callable[[str], UserError]) -> Any:
    try:
        return run()
    except UserError:
        raise
    except Exception as error:  # whatever a user's code raises
        raise explain(f"{type(error).__name__}: {error}".splitlines()[0]) from None


def _refuse_fields(name: str, error: str) -> UserError:
    return UserError(
        f"optimizer.custom: {name} does not take a step on matrices and vectors ({error}); change its fields, or give "
        "an optimizer that treats each element by itself, such as optimizer=adamw, lion or torch.optim.RAdam"
    )


def _refuse(name: str, seen: str) -> UserError:
    return UserError(
        f"optimizer.custom: {name} is not elementwise: ZeRO gives each rank a flat part of the weights, and {seen}; "
        "give an optimizer that treats each element by itself, such as optimizer=adamw, lion or torch.optim.RAdam"
    )


def _draw() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for shapes in _SHAPES]


def _draw_gradients() -> list[list[list[torch.Tensor]]]:
    """By step, group and weight; magnitudes differ, so that normalizing by one weight's magnitude shows."""
    generator = torch.Generator().manual_seed(1)
    return [
        [[10.0**i * torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)] for shapes in _SHAPES]
        for _ in range(STEPS)
    ]


def _build_on(build: Build, weights: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    rates = [LEARNING_RATE * number for number in range(1, len(weights) + 1)]
    optimizer = build(
        [{"params": w, "lr": rate, "weight_decay": WEIGHT_DECAY} for w, rate in zip(weights, rates, strict=True)]
    )
    assert len(optimizer.param_groups) == len(weights)
    return optimizer


def _run_whole(build: Build) -> list[torch.Tensor]:
    """How far each group's weights have moved, flat."""
    start = _draw()
    weights = [[torch.nn.Parameter(weight.clone()) for weight in group] for group in start]
    optimizer = _build_on(build, weights)
    for gradients in _draw_gradients():
        for group, group_gradients in zip(weights, gradients, strict=True):
            for weight, gradient in zip(group, group_gradients, strict=True):
                weight.grad = gradient.clone()
        optimizer.step()
    moved = [[w.detach() - s for w, s in zip(*pair, strict=True)] for pair in zip(weights, start, strict=True)]
    return [_flatten(group) for group in moved]


def _run_flat(build: Build) -> list[torch.Tensor]:
    """The same with ranks that each have a part, whose optimizers get flat tensors after they are built."""
    start = [_flatten(group) for group in _draw()]
    gradients = [[_flatten(group) for group in step] for step in _draw_gradients()]
    parts = [_step_flat(build, start, gradients, rank)[0] for rank in range(_NUM_RANKS)]
    return [torch.cat(moved) - before for moved, before in zip(zip(*parts, strict=True), start, strict=True)]


def _step_flat(
    build: Build, start: list[torch.Tensor], gradients: list[list[torch.Tensor]], rank: int
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(_NUM_RANKS)[rank]

    optimizer = _build_on(build, [[torch.nn.Parameter(each) for each in group] for group in _draw()])
    flats = [torch.nn.Parameter(part(each).clone()) for each in start]
    for group, flat in zip(optimizer.param_groups, flats, strict=True):
        group["params"] = [flat]  # as DeepSpeed does
    for step_gradients in gradients:
        for flat, gradient in zip(flats, step_gradients, strict=True):
            flat.grad = part(gradient).clone()
        optimizer.step()
    return [flat.detach() for flat in flats], optimizer


def _read_state(build: Build) -> dict[str, StateTensor | str]:
    kept: dict[str, StateTensor | str] = {}
    for flat, state in _list_states(build):
        kept |= {name: describe_kept(v, flat) for name, v in state.items() if v is not None}
    return kept


def _list_states(build: Build) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """The flat tensor of each parameter group, and what the optimizer keeps for it."""
    gradients = [[_flatten(group) for group in step] for step in _draw_gradients()]
    _, optimizer = _step_flat(build, [_flatten(group) for group in _draw()], gradients, 0)
    flats = [flat for group in optimizer.param_groups for flat in group["params"]]
    return [(flat, optimizer.state.get(flat, {})) for flat in flats]


def _list_uneven(build: Build) -> list[str]:
    """The names of the numbers in the state of parameters that are not the same in all groups."""
    numbers: dict[str, set[float]] = {}
    for _, state in _list_states(build):
        for name, value in state.items():
            if isinstance(value, int | float) or (torch.is_tensor(value) and value.ndim == 0):
                numbers.setdefault(name, set()).add(float(value))
    return sorted(name for name, values in numbers.items() if len(values) > 1)


def _list_changed(build: Build) -> list[str]:
    """The names of the numbers outside the state of parameters that change from step to step. One that the first step
    sets and the others leave is set again after a restart."""
    gradients = [[_flatten(group) for group in step] for step in _draw_gradients()]
    start = [_flatten(group) for group in _draw()]
    before, after = (_list_numbers(_step_flat(build, start, steps, 0)[1]) for steps in (gradients[:1], gradients))
    return sorted(name for name, value in after.items() if before.get(name) != value)


def _list_numbers(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    fields = [(f"{name} of its parameter groups", value) for name, value in optimizer.param_groups[0].items()]
    return {
        name: repr(float(value))
        for name, value in [*fields, *vars(optimizer).items()]
        if isinstance(value, int | float) or (torch.is_tensor(value) and value.numel() == 1)
    }


def _flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
