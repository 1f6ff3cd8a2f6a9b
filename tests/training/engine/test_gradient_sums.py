"""Gradients of a step: summed as DeepSpeed sums them, to the bit, and each exactly once, whether autograd's hooks have
seen it or not; reduced to the rank that owns them, once, while passes still run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import CHECKPOINTED, Case, merge, train_case, worst_difference
from support.mixed_addmm import play_mixed_addmm
from support.tiny import VOCAB_SIZE, save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup, count_threads

from training.engine.gradient_sums import GradientSums, add_gradient

BF16, OFFLOADED = "precision=bf16", "offload_optimizer=cpu"
UNCLIPPED = "max_grad_norm=0"  # DeepSpeed's optimizers round the factor of clipping in their own ways
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
        overrides=(BF16, UNCLIPPED, "micro_batch_size=1", "global_batch_size=4", *overrides),
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
    ours = merge(workers(world_size).run(train_with_rounded_rows, case))
    assert_equal(ours, merge(workers(world_size).run(train_with_deepspeeds_sums, case)))


def train_with_rounded_rows(case: Case) -> dict[str, Any]:
    """The gradients of embeddings come from autograd, which sums those of a token within a micro-batch in bf16."""
    with patch("training.pipeline.preparation.add_rows"):
        return train_case(case)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-6, atol=0)
    assert worst_difference(found["weights"], expected["weights"])[0] == 0


class DeepSpeedsSums:
    """In place of `GradientSums`: gradients of a whole micro-batch, added when its backward pass ends, averaged when
    all have ended. By `BF16_Optimizer`, or `DeepSpeedZeroOptimizer` where it is offloaded."""

    def __init__(self, module: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self.module, self.optimizer = module, optimizer
        vars(optimizer).setdefault("overflow", False)  # which BF16_Optimizer has from 0.19.8 on
        self.is_flat = hasattr(optimizer, "fp32_groups_gradients")

    def start_step(self) -> None:
        self.optimizer.clear_backward_seen_flag()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def start_pass(self) -> None:
        self.optimizer.backward_prologue()

    def lend_sum(self, parameter: torch.nn.Parameter) -> None: ...

    def finish_pass(self) -> None:
        self.optimizer.backward_epilogue()

    def share_tied(self) -> None:
        import torch.distributed as dist

        for weight, group in self.module.get_tied_weights_and_groups():
            dist.all_reduce(weight._hp_grad if self.is_flat else weight.grad_accum, group=group)

    def reduce(self) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        (engine,) = [each for each in live_engines if each.optimizer is self.optimizer]
        DeepSpeedEngine.allreduce_gradients(engine)


live_engines: list[Any] = []


def train_with_deepspeeds_sums(case: Case) -> dict[str, Any]:
    from training.engine import pipeline_engine as engines

    written, build = engines.build_deepspeed_config, engines.StepEngine.__init__

    def write(*arguments: Any) -> dict[str, Any]:
        settings = written(*arguments)
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        return settings

    def start(engine: Any, *arguments: Any) -> None:
        build(engine, *arguments)
        live_engines[:] = [engine]

    with (
        patch.object(engines, "build_deepspeed_config", write),
        patch.object(engines.StepEngine, "__init__", start),
        patch.object(engines, "GradientSums", DeepSpeedsSums),
    ):
        return train_case(case)


def test_a_weight_without_a_gradient_keeps_nothing_of_the_step_before(
    workers: Callable[[int], WorkerGroup], root: Path
) -> None:
    case = build_case(root, False, 2, 2)
    ours, deepspeeds = (
        merge(workers(2).run(train_without_mlps, case, train))
        for train in (train_with_rounded_rows, train_with_deepspeeds_sums)
    )
    assert_equal(ours, deepspeeds)


def train_without_mlps(case: Case, train: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """From the second step on, no MLP is used."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    from training.engine.pipeline_engine import PipelineStage

    train_step = PipelineStage.train_step

    def step_without(engine: Any, micro_batches: Any, step: int, *more: Any, **named: Any) -> Any:
        with patch.object(LlamaMLP, "forward", pass_on) if step else nullcontext():
            return train_step(engine, micro_batches, step, *more, **named)

    with patch.object(PipelineStage, "train_step", step_without):
        return train(case)


def pass_on(mlp: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (OFFLOADED,),
        pytest.param(("precision=fp32",), marks=pytest.mark.full),
        pytest.param(("schedule=interleaved",), marks=pytest.mark.full),
    ],
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
    grads = torch.autograd.grad(output, leaves, gradient, retain_graph=retain_graph, allow_unused=True)
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad  # None where it has been added to the sum


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

    engine, loader, *_ = build_engine(case)
    parameters = list(engine.module.parameters())
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(sum(parameter.grad is not None for parameter in parameters))

    with counting(parameters, count):
        engine.train_step(loader.iterate(0, 1), 0, 1)
    count()
    return max(counts), counts[-1], len(parameters)


@contextmanager
def counting(parameters: list[torch.nn.Parameter], count: Callable[..., None]) -> Iterator[None]:
    def count_first(*arguments: Any, **named: Any) -> None:
        count()
        add_gradient(*arguments, **named)

    with patch("training.engine.gradient_sums.add_gradient", count_first):
        yield


def test_a_sum_is_that_of_a_cast_copy() -> None:
    torch.manual_seed(0)
    parameter, total = torch.nn.Parameter(torch.zeros(10, 100, dtype=torch.bfloat16)), torch.randn(10, 100)
    parameter.grad = torch.randn(10, 100).bfloat16()
    expected = total + parameter.grad.float()
    add_gradient(parameter, total)
    assert torch.equal(total, expected) and parameter.grad is None
    parameter.grad = torch.ones_like(parameter)
    add_gradient(parameter, total, is_first=True)
    assert torch.equal(total, torch.ones(10, 100))


def test_a_gradient_that_was_assigned_may_have_any_strides() -> None:
    """Only autograd's own accumulation gives a gradient the strides of its parameter."""
    parameter, total = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16)), torch.zeros(3, 5)
    parameter.grad = torch.arange(15.0).bfloat16().view(5, 3).T
    expected = parameter.grad.float()
    add_gradient(parameter, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule=zero_bubble",),
        (),
        (CHECKPOINTED,),
        pytest.param(("schedule=zero_bubble", OFFLOADED), marks=pytest.mark.full),
        pytest.param((OFFLOADED,), marks=pytest.mark.full),
    ],
)
def test_products_are_added_to_the_sums(
    workers: Callable[[int], WorkerGroup], root: Path, overrides: tuple[str, ...]
) -> None:
    """By the operator of a GPU, played: one call for each, and no gradient in bf16."""
    case = build_case(root, False, 2, 2, *overrides)
    found, calls, products = zip(*workers(2).run(train_as_a_gpu, case), strict=True)
    plain = merge(workers(2).run(train_case, case))
    assert calls == products and min(calls) > 0
    # Two steps apart by the rounding of gradients to bf16
    assert merge(list(found))["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert worst_difference(merge(list(found))["weights"], plain["weights"])[0] < 1e-2


def train_as_a_gpu(case: Case) -> tuple[dict[str, Any], int, int]:
    """Return the results, the number of sums that a product was added to, and of products of weights."""
    products: list[torch.nn.Parameter] = []
    lend = GradientSums.lend_sum

    def record(sums: GradientSums, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        assert parameter.grad is None
        if parameter.shape[0] != VOCAB_SIZE:  # not the embedding's
            products.append(parameter)
        return lend(sums, parameter)

    with play_mixed_addmm() as shapes, patch.object(GradientSums, "lend_sum", record):
        return train_case(case), len(shapes), len(products)


# Reduction to the ranks that own the sums

SIZES = ((7, 3), (5,), (11,), (2, 2), (1,))  # of parameters
GROUPS = ((0, 2, 3), (1, 4))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_a_gradient_that_is_missing_on_one_rank_counts_as_zero(
    workers: Callable[[int], WorkerGroup], shards: bool, reduce_dtype: torch.dtype
) -> None:
    """Ranks whose gradients come in different orders, and not all of them, run the same collectives. A second step
    keeps nothing of the first."""
    results = workers(2).run(sum_two_steps, shards, reduce_dtype)
    for number, group in enumerate(GROUPS):
        expected = torch.cat([draw(0, index).add(draw(1, index)).flatten() for index in group])  # twice the mean
        found = torch.cat([parts[number] for parts, _ in results])
        bound = 0.01 if reduce_dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(found[: len(expected)], expected, rtol=bound, atol=bound)
        assert not found[len(expected) :].any()  # padding
    norm = sum(part.square().sum() for parts, _ in results for part in parts).sqrt()
    for _, found in results:
        torch.testing.assert_close(found, norm)


def draw(rank: int, index: int) -> torch.Tensor:
    """The gradient of a parameter in each pass; rank 1 has none of the third."""
    values = torch.randn(SIZES[index], generator=torch.Generator().manual_seed(10 * rank + index))
    return torch.zeros(SIZES[index]) if (rank, index) == (1, 2) else values


def sum_two_steps(shards: bool, reduce_dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The parts of this rank, and the norm of the whole."""
    import torch.distributed as dist

    from training.engine.gradient_sums import GradientSums
    from training.pipeline.schedule import Unit, UnitKind

    rank = dist.get_rank()
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SIZES]
    groups = [[parameters[index] for index in group] for group in GROUPS]
    sizes = [-(-sum(each.numel() for each in group) // 2) for group in groups]
    optimizer = SimpleNamespace(
        bit16_groups=groups, averaged_gradients={}, reduce_bucket_size=16, partition_size=sizes, cpu_offload=False,
        params_in_partition=[list_held(group, size, rank) for group, size in zip(groups, sizes)],
        dp_process_group=dist.group.WORLD, real_dp_process_group=[dist.group.WORLD] * len(groups), _grad_acc_hooks=[],
        check_grad_overflow=False, check_overflow=None, scaled_global_norm=None,
    )  # fmt: skip
    alone = dist.new_subgroups(1)[0]
    # A stage of one layer that has them all
    layer = torch.nn.ParameterList(parameters)
    module: Any = SimpleNamespace(
        chunk_numbers=[0], list_modules=lambda chunk: [layer], parameters=layer.parameters,
        get_tied_weights_and_groups=list, ranks=SimpleNamespace(parallel=SimpleNamespace(rank=0)),
        mpu=lambda: SimpleNamespace(get_model_parallel_group=lambda: alone),
    )  # fmt: skip
    passes = [Unit(0, number, UnitKind.backward) for number in range(2)]
    sums = GradientSums(module, optimizer, passes, shards=shards, reduce_dtype=reduce_dtype)
    for step in (0, 1):
        sums.start_step()
        for number in range(2):
            sums.start_pass()
            for index in (0, 1, 2, 3, 4) if number == rank else (4, 3, 2, 1, 0):
                if step == 0 or (rank, index) != (1, 2):
                    accumulate(parameters[index], draw(rank, index) + (1 - step))
                    sums.add(parameters[index])
            sums.finish_pass()
        sums.share_tied()
        sums.reduce()
        assert all(parameter.grad is None for parameter in parameters)
    optimizer.check_overflow()
    assert not optimizer.overflow
    return [optimizer.averaged_gradients[number].flat_partition for number in range(2)], optimizer.scaled_global_norm()


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """As autograd does."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def list_held(group: list[torch.nn.Parameter], part_size: int, rank: int) -> list[torch.nn.Parameter]:
    """The parameters that have elements in a rank's part."""
    held, start = [], 0
    for parameter in group:
        stop = start + parameter.numel()
        if start < part_size * (rank + 1) and stop > part_size * rank:
            held.append(parameter)
        start = stop
    return held


@pytest.mark.parametrize(
    ("num_stages", "overrides"),
    [
        (1, ()),
        pytest.param(2, ("schedule=zero_bubble",), marks=pytest.mark.full),
        pytest.param(2, ("schedule=interleaved", BF16), marks=pytest.mark.full),
    ],
)
def test_replicas_reduce_once_while_passes_still_run(
    workers: Callable[[int], WorkerGroup], root: Path, num_stages: int, overrides: tuple[str, ...]
) -> None:
    """At stage 1 each gradient is sent once, to the rank that owns it, and none after the last backward pass."""
    case = build_case(root, False, num_stages, 2 * num_stages, "precision=fp32", *overrides)
    for calls, num_trained in workers(2 * num_stages).run(record_reductions, case):
        names = [name for name, _ in calls]
        assert sum(size for name, size in calls if name == "reduce") == num_trained
        passes = [number for number, name in enumerate(names) if name in ("BackwardPass", "WeightPass")]
        reduced = [number for number, name in enumerate(names) if name == "reduce"]
        last_begins = passes[-2]  # a pass is recorded as it begins and as it ends
        assert reduced[-1] < names.index("ReduceTiedGrads")
        assert len([number for number in reduced if number < passes[-1]]) > len(reduced) / 2
        assert num_stages == 1 or reduced[0] < last_begins


def record_reductions(case: Case) -> tuple[list[tuple[str, int]], int]:
    """(unit of a step, as it begins and ends, or collective; elements), and the elements of all trained weights."""
    from support.cases import build_engine

    from training.engine import gradient_sums

    engine, loader, *_ = build_engine(case)
    calls: list[tuple[str, int]] = []
    reduce = gradient_sums.dist.reduce

    def recorded(tensor: torch.Tensor, **named: Any) -> Any:
        calls.append(("reduce", tensor.numel()))
        return reduce(tensor, **named)

    def note(unit: str) -> None:
        calls.append((unit, 0))

    engine.observe(SimpleNamespace(before=note, after=note))
    with patch.object(gradient_sums.dist, "reduce", recorded):
        engine.train_step(loader.iterate(0, 1), 0, 1)
    return calls, sum(parameter.numel() for parameter in engine.module.parameters())


def test_an_engine_that_is_gone_leaves_no_process_groups(workers: Callable[[int], WorkerGroup], root: Path) -> None:
    """Each has threads that wake a hundred times a second."""
    case = build_case(root, False, 2, 2)
    _, after_one, after_two, after_three = (workers(2).run(train_and_count_threads, case)[0] for _ in range(4))
    assert after_one == after_two == after_three  # the first one may start autograd's own


def train_and_count_threads(case: Case) -> int:
    """Threads of the process before the case, with those of its default process group."""
    threads = count_threads("self")
    train_case(case)
    return threads


def test_a_rank_that_waits_for_a_reduction_is_seen_to_wait(workers: Callable[[int], WorkerGroup], root: Path) -> None:
    """The watchdog must not name it as the one that is stuck."""
    case = build_case(root, False, 1, 2)
    for waits in workers(2).run(find_waits, case):
        assert waits and all(waits)


def find_waits(case: Case) -> list[bool]:
    import sys

    from training.distributed.watchdog import find_place
    from training.engine import gradient_sums

    seen: list[bool] = []
    reduce = gradient_sums.dist.reduce

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            seen.append(find_place(sys._getframe(1))[1])
            self._work.wait()

    with patch.object(gradient_sums.dist, "reduce", lambda *given, **named: Work(reduce(*given, **named))):
        train_case(case)
    return seen
