"""Gradients are accumulated in fp32 by one function: the same to the bit as by DeepSpeed, and each exactly once,
whether autograd's hooks have seen it or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import CHECKPOINTED, CLIPPED, Case, merge, train_case, worst_difference
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from training.optim.gradient_sums import add_gradient

BF16, OFFLOADED = "precision=bf16", "offload_optimizer=cpu"
LORA = ("adapter=lora", "adapter.r=4")
FROZEN = ("freeze=['model.layers.[01].*','model.embed_tokens.*']",)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sums")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_records(root / "train.jsonl", 40)
    return root


def build_case(root: Path, tied: bool, num_stages: int, world_size: int, *overrides: str) -> Case:
    return Case(
        root / f"tied{tied}", root / "train.jsonl", root, num_stages, world_size, steps=2,
        overrides=(BF16, CLIPPED, "micro_batch_size=1", "global_batch_size=4", *overrides),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tied", "num_stages", "world_size", "overrides"),
    [
        pytest.param(False, 2, 2, (), id="pp2"),
        pytest.param(True, 2, 2, ("schedule=interleaved", CHECKPOINTED), id="interleaved-tied-checkpointed"),
        pytest.param(False, 2, 2, (OFFLOADED,), id="pp2-offloaded"),
        pytest.param(True, 1, 2, ("tensor_parallel_size=2",), id="tp2-tied", marks=pytest.mark.full),
        pytest.param(True, 1, 1, (), id="pp1-tied", marks=pytest.mark.full),
        pytest.param(True, 2, 2, (), id="pp2-tied", marks=pytest.mark.full),
        pytest.param(False, 1, 2, (), id="dp2", marks=pytest.mark.full),
        pytest.param(False, 1, 2, LORA, id="dp2-lora", marks=pytest.mark.full),
        pytest.param(False, 2, 2, FROZEN, id="pp2-frozen", marks=pytest.mark.full),
        pytest.param(True, 1, 1, (CHECKPOINTED,), id="pp1-tied-checkpointed", marks=pytest.mark.full),
        pytest.param(True, 2, 2, (OFFLOADED,), id="pp2-tied-offloaded", marks=pytest.mark.full),
        pytest.param(False, 1, 1, ("optimizer=adamw",), id="pp1-adamw", marks=pytest.mark.full),
    ],
)
def test_the_sums_are_those_of_deepspeed_to_the_bit(
    workers: Callable[[int], WorkerGroup], root: Path, tied: bool, num_stages: int, world_size: int,
    overrides: tuple[str, ...],
) -> None:  # fmt: skip
    case = build_case(root, tied, num_stages, world_size, *overrides)
    ours = merge(workers(world_size).run(train_case, case))
    assert_equal(ours, merge(workers(world_size).run(train_with_deepspeeds_sums, case)))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["losses"], found["norms"]) == (expected["losses"], expected["norms"])
    assert worst_difference(found["weights"], expected["weights"])[0] == 0


def train_with_deepspeeds_sums(case: Case) -> dict[str, Any]:
    """Gradients of a whole micro-batch, added when its backward pass ends, and set to zero for the next."""
    from training.engine import deepspeed_sums
    from training.engine import pipeline_engine as engines

    written = engines.build_deepspeed_config

    def build(*arguments: Any) -> dict[str, Any]:
        built = written(*arguments)
        built["bf16"] = {"enabled": True}
        return built

    def start_pass(sums: Any, chunk: int, half: Any) -> None:
        sums._optimizer.backward_prologue()

    def finish_pass(sums: Any) -> None:
        sums._optimizer.backward_epilogue()

    with (
        patch.object(engines, "build_deepspeed_config", build),
        patch.object(deepspeed_sums, "sum_by_one_function", lambda optimizer: None),
        patch.object(deepspeed_sums.DeepSpeedSums, "start_pass", start_pass),
        patch.object(deepspeed_sums.DeepSpeedSums, "finish_pass", finish_pass),
    ):
        return train_case(case)


def test_a_weight_without_a_gradient_keeps_nothing_of_the_step_before(
    workers: Callable[[int], WorkerGroup], root: Path
) -> None:
    case = build_case(root, False, 2, 2)
    ours, deepspeeds = (
        merge(workers(2).run(train_without_mlps, case, train)) for train in (train_case, train_with_deepspeeds_sums)
    )
    assert_equal(ours, deepspeeds)


def train_without_mlps(case: Case, train: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """From the second step on, no MLP is used."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    from training.engine import steps

    train_step = steps.train_step

    def step_without(engine: Any, micro_batches: Any, config: Any, step: int, *more: Any, **named: Any) -> Any:
        with patch.object(LlamaMLP, "forward", pass_on) if step else nullcontext():
            return train_step(engine, micro_batches, config, step, *more, **named)

    with patch.object(steps, "train_step", step_without):
        return train(case)


def pass_on(mlp: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states


@pytest.mark.parametrize(
    "overrides", [(), (OFFLOADED,), pytest.param(("schedule=interleaved",), marks=pytest.mark.full)]
)
def test_gradients_that_no_hook_has_seen_are_summed_once(
    workers: Callable[[int], WorkerGroup], root: Path, overrides: tuple[str, ...]
) -> None:
    case = build_case(root, False, 2, 2, *overrides)
    by_hooks, by_hand = (merge(workers(2).run(train, case)) for train in (train_case, train_without_hooks))
    assert_equal(by_hand, by_hooks)


def train_without_hooks(case: Case) -> dict[str, Any]:
    """Gradients come from `torch.autograd.grad` and are assigned, as by a split backward pass."""
    with patch.object(torch.Tensor, "backward", assign_gradients):
        return train_case(case)


def assign_gradients(output: torch.Tensor, gradient: torch.Tensor | None = None, retain_graph: bool = False) -> None:
    leaves = list(find_leaves(output.grad_fn, set()))
    for leaf, grad in zip(leaves, torch.autograd.grad(output, leaves, gradient, retain_graph=retain_graph)):
        leaf.grad = grad


def find_leaves(node: Any, known: set[Any]) -> Iterator[torch.Tensor]:
    if node is None or node in known:
        return
    known.add(node)
    if hasattr(node, "variable"):
        yield node.variable
    for parent, _ in node.next_functions:
        yield from find_leaves(parent, known)


@pytest.mark.parametrize("overrides", [(), pytest.param((OFFLOADED,), marks=pytest.mark.full)])
def test_no_gradient_outlives_its_layer(
    workers: Callable[[int], WorkerGroup], root: Path, overrides: tuple[str, ...]
) -> None:
    """While a pass runs, at most those of one layer; after it, none."""
    case = build_case(root, False, 2, 2, *overrides)
    for most, left, num_parameters in workers(2).run(count_gradients, case):
        assert (most, left) == (1, 0) and num_parameters > 10


def count_gradients(case: Case) -> tuple[int, int, int]:
    """(parameters that have a gradient at once, and after a step; parameters)."""
    from support.cases import build_engine

    from training.engine.steps import train_step

    engine, loader, config, _, _ = build_engine(case)
    parameters = list(engine.module.parameters())
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(sum(parameter.grad is not None for parameter in parameters))

    with counting(parameters, count):
        train_step(engine, loader.iterate(0, 1), config, 0, 1)
    count()
    return max(counts), counts[-1], len(parameters)


@contextmanager
def counting(parameters: list[torch.nn.Parameter], count: Callable[..., None]) -> Iterator[None]:
    def count_first(*arguments: Any) -> torch.Tensor:
        count()
        return add_gradient(*arguments)

    with patch("training.engine.zero_patches.add_gradient", count_first):
        yield


def test_a_sum_is_that_of_a_cast_copy() -> None:
    torch.manual_seed(0)
    parameter, total = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)), torch.randn(10, 100)
    parameter.grad = torch.randn(1000).bfloat16()
    expected = total + parameter.grad.float().view(10, 100)
    assert add_gradient(parameter, total) is total
    assert torch.equal(total, expected) and parameter.grad is None
    parameter.grad = torch.ones_like(parameter)
    assert add_gradient(parameter, None).dtype is torch.float32


def test_a_gradient_that_was_assigned_may_have_any_strides() -> None:
    """Only autograd's own accumulation gives a gradient the strides of its parameter."""
    parameter, total = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16)), torch.zeros(15)
    parameter.grad = torch.arange(15.0).bfloat16().view(5, 3).T
    expected = parameter.grad.float().flatten()
    assert torch.equal(add_gradient(parameter, total), expected)
