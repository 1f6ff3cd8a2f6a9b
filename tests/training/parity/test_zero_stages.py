"""ZeRO-2, also under pipelines, and ZeRO-3: five steps of SGD against the plain Hugging Face model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_oracle,
    worst_difference,
)
from support.combination_runs import Material, check_row
from support.combinations import AXES, RANKS
from support.objective_runs import check_equal, load_model, train_answers
from support.pair_runs import train_oracle as train_pair_oracle
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    root = tmp_path_factory.mktemp("zero")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    records = save_records(root / "train.jsonl", 40)

    def case(tied: bool, dp_size: int, *overrides: str) -> Case:
        # one micro-batch a step would sum nothing
        batch = ("micro_batch_size=1",) if dp_size == 4 else ()
        return Case(root / f"tied{tied}", records, root, 1, dp_size, overrides=(*batch, *overrides))

    return case


TENSOR_PARALLEL, OFFLOADED = "tensor_parallel_size=2", "offload_optimizer=cpu"
find_oracle = cache(train_oracle)
KINDS = {
    "plain": (),
    "clipped": (CLIPPED,),
    "recomputed-clipped": (CHECKPOINTED, CLIPPED),
    "selective": SELECTIVE,
    "every-second": EVERY_SECOND,
}
FAST = [(3, 2, True, "recomputed-clipped")]
CASES = [
    pytest.param(
        stage, dp_size, tied, KINDS[kind], id=f"stage{stage}-dp{dp_size}-{'tied' if tied else 'untied'}-{kind}",
        marks=() if (stage, dp_size, tied, kind) in FAST else pytest.mark.full,
    )
    for stage in (2, 3) for dp_size in (2, 4) for tied in (False, True) for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(("stage", "dp_size", "tied", "overrides"), CASES)
def test_five_sgd_steps_equal_hugging_face(
    workers, material, stage: int, dp_size: int, tied: bool, overrides: tuple[str, ...]
) -> None:
    case = material(tied, dp_size, f"zero_stage={stage}", *overrides)
    result = merge(workers(dp_size).run(train_case, case))
    oracle = find_oracle(material(tied, 1, *({CLIPPED} & set(overrides))))
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


PIPELINES = {
    "pp2xdp2": (2, 4, ()),
    "pp2xdp2-checkpointed": (2, 4, (CHECKPOINTED,)),
    "pp2xdp2-interleaved": (2, 4, ("schedule=interleaved", "gradient_accumulation_steps=2", "micro_batch_size=2")),
    "pp2xdp2-zero-bubble": (2, 4, ("schedule=zero_bubble",)),
    "pp1xtp2xdp2": (1, 4, (TENSOR_PARALLEL,)),
    "pp2xtp2xdp2": (2, 8, (TENSOR_PARALLEL,)),
    "pp2xcp2": (2, 4, ("context_parallel_size=2",)),
    "pp2xdp2-offloaded": (2, 4, (OFFLOADED,)),
    "dp2-offloaded": (1, 2, (OFFLOADED,)),
    "pp2": (2, 2, ()),
}
SHORT = (("pp2xdp2", True), ("dp2-offloaded", False))


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(layout, tied, marks=() if (layout, tied) in SHORT else pytest.mark.full)
        for layout in PIPELINES for tied in (False, True)
    ],
)  # fmt: skip
def test_pipelines_equal_hugging_face(workers, material, layout: str, tied: bool) -> None:
    """Buckets of one parameter or two, so that they end in the middle of a layer."""
    num_stages, world_size, overrides = PIPELINES[layout]
    case = replace(material(tied, 1, "zero_stage=2", CLIPPED, *overrides), num_stages=num_stages, world_size=world_size)
    result = merge(workers(world_size).run(train_in_small_buckets, case))
    oracle = find_oracle(material(tied, 1, CLIPPED))
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def train_in_small_buckets(case: Case) -> dict[str, Any]:
    from training.engine import deepspeed_config

    with patch.object(deepspeed_config, "REDUCE_BUCKET", 3000):
        return train_case(case)


GROUPED = {  # num_stages, world_size, sharding_parallel_size
    "dp4-by-2": (1, 4, 2),
    "pp2xdp2-by-1": (2, 4, 1),
    "pp2xdp4-by-2": (2, 8, 2),
}


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("layout", GROUPED)
@pytest.mark.parametrize("place", ["none", "cpu"])
def test_shard_groups_equal_hugging_face(workers, material, place: str, layout: str, stage: int, tied: bool) -> None:
    num_stages, world_size, size = GROUPED[layout]
    keys = (f"zero_stage={stage}", f"sharding_parallel_size={size}", f"offload_optimizer={place}")
    keys += ("micro_batch_size=1", CLIPPED)
    case = replace(material(tied, 1, *keys), num_stages=num_stages, world_size=world_size)
    result = merge(workers(world_size).run(train_in_small_buckets, case))
    oracle = find_oracle(material(tied, 1, CLIPPED))
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2])
def test_groups_hold_what_fewer_replicas_would(workers, material, stage: int) -> None:
    """In bf16, where another optimizer runs: half of the fp32 weights on each of four ranks, saved once, and the same
    step as when all four shard them."""
    keys = ("precision=bf16", "data.pad_to=max_seq_length", f"zero_stage={stage}")
    whole, grouped = (
        workers(4).run(train_masters, material(False, 4, *keys, *more)) for more in ((), ("sharding_parallel_size=2",))
    )
    assert [bool(masters) for masters in grouped] == [True, True, False, False]
    assert worst_difference(gather_masters(grouped), gather_masters(whole))[0] < BOUND
    case = material(False, 4, f"zero_stage={stage}", "sharding_parallel_size=2")
    for held in workers(4).run(measure_held, case):
        _, gradients, masters = (share / held["all"] for share in held["held"])
        assert 0.49 < masters < 0.51 and (stage == 1 or 0.49 < gradients < 0.51)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_stages", "world_size", "keys"),
    [(1, 2, ("zero_stage=2",)), (2, 4, ("zero_stage=2",))]
    + [(1, 4, (f"zero_stage={stage}", "sharding_parallel_size=2")) for stage in (1, 2)],
    ids=["dp2", "pp2xdp2", "groups", "groups-stage2"],
)
def test_an_offloaded_step_is_the_same_to_the_bit(
    workers, material, num_stages: int, world_size: int, keys: tuple[str, ...]
) -> None:
    """In bf16, from several micro-batches; also of shard groups, whose gradients go to the host when averaged."""
    keys = ("precision=bf16", "data.pad_to=max_seq_length", "micro_batch_size=1", *keys)
    held, offloaded = (
        gather_masters(workers(world_size).run(train_masters, replace(case, num_stages=num_stages)))
        for more in ((), (OFFLOADED,))
        for case in [material(False, world_size, *keys, *more)]
    )
    assert held.keys() == offloaded.keys() and all(step.any() for step in held.values())
    assert [name for name, step in held.items() if not torch.equal(step, offloaded[name])] == []


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["clipped", "recomputed-clipped"])
def test_offloaded_weights_equal_hugging_face(workers, material, kind: str, tied: bool) -> None:
    case = material(tied, 2, "zero_stage=3", "offload_parameters=cpu", *KINDS[kind])
    result = merge(workers(2).run(train_offloaded, case))
    oracle = find_oracle(material(tied, 1, CLIPPED))
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def train_offloaded(case: Case) -> dict[str, Any]:
    """Check that the weights go to the host: when they are sharded, and in the optimizer."""
    from training.engine import zero3
    from training.pipeline import weight_sharding

    asked: list[Any] = []
    init, start = weight_sharding.Init, zero3.PipelineStage

    def shard(**arguments: Any) -> Any:
        asked.append(arguments.get("remote_device"))
        return init(**arguments)

    def begin(wrapped: Any, *others: Any, **named: Any) -> Any:
        assert wrapped.optimizer.offload_param
        return start(wrapped, *others, **named)

    with patch.object(weight_sharding, "Init", shard), patch.object(zero3, "PipelineStage", begin):
        result = train_case(case)
    assert asked and {*asked} == {"cpu"}
    return result


@pytest.mark.full
@pytest.mark.parametrize("dp_size", [2, 4])
@pytest.mark.parametrize(("stage", "overrides"), [(2, ()), (3, ()), (3, ("offload_parameters=cpu",))])
def test_lora_equals_peft(workers, tmp_path: Path, stage: int, overrides: tuple[str, ...], dp_size: int) -> None:
    save_llama(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    model = make_adapter(tmp_path / "adapter", tmp_path / "model")
    keys = (
        "adapter=lora",
        f"adapter.name_or_path={tmp_path}/adapter",
        CHECKPOINTED,
        CLIPPED,
        f"zero_stage={stage}",
        "micro_batch_size=1",
        *overrides,
    )
    case = Case(tmp_path / "model", save_records(tmp_path / "train.jsonl", 40), tmp_path, 1, dp_size, overrides=keys)
    result, oracle = merge(workers(dp_size).run(train_case, case)), train_oracle(case, model)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("dp_size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_preferences_equal_the_formulas(workers, tmp_path: Path, stage: int, tied: bool, dp_size: int) -> None:
    save_llama(tmp_path / "model", tied=tied)
    save_tokenizer(tmp_path / "model")
    keys = ("data=preference", "task=dpo", "dpo.beta=0.3", "micro_batch_size=1", CLIPPED, f"zero_stage={stage}")
    case = Case(tmp_path / "model", save_pairs(tmp_path / "train.jsonl", 21), tmp_path, 1, dp_size, overrides=keys)
    result, policy = merge(workers(dp_size).run(train_answers, case)), load_model(case.model)
    oracle = train_pair_oracle(case, policy, copy.deepcopy(policy))
    check_equal(result, oracle, first_metrics=1)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND


@pytest.mark.full
@pytest.mark.parametrize(
    "changed",
    [{"packing": "true"}, {"packing": "true", "objective": "pretrain", "length": "split"}, {"freeze": "layer"}],
    ids=["packed", "documents", "frozen"],
)
@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dp_size", [2, 4])
def test_packed_rows_and_frozen_layers(
    workers, tmp_path: Path, monkeypatch, dp_size: int, stage: int, tied: str, changed: dict[str, str]
) -> None:
    layout = f"dp{dp_size}"
    monkeypatch.setitem(AXES["layout"], layout, ("num_stages=1",))
    monkeypatch.setitem(RANKS, layout, dp_size)
    plainest = {axis: next(iter(values)) for axis, values in AXES.items()}
    row = plainest | {"layout": layout, "micro_batch": "1", "clipping": "on", "tied": tied, "zero": f"zero{stage}"}
    row |= changed
    check_row(workers, Material(tmp_path), "llama", row, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "num_stages"), [(2, 1), (2, 2), (3, 1)])
def test_gradients_of_bf16_are_summed_in_fp32(workers, material, stage: int, num_stages: int) -> None:
    """The gradient of a step that reaches the optimizer's fp32 weights, from four micro-batches on two replicas. Each
    of those is rounded, as autograd makes it; stage 1 adds products unrounded (`weight_gradients.py`)."""
    keys = ("precision=bf16", "data.pad_to=max_seq_length")
    sharded = (f"zero_stage={stage}",)
    exact, found, rounded, unrounded = (
        gather_masters(workers(2 * num_stages).run(train, replace(case, num_stages=num_stages)))
        for train, more in (
            (train_masters_by_autograd, ()),
            (train_masters, sharded),
            (train_masters, (*sharded, "gradient_reduce_dtype=bf16")),
            (train_masters, ()),
        )
        for case in [material(False, 2 * num_stages, "micro_batch_size=2", *keys, *more)]
    )
    assert worst_difference(found, exact)[0] < BOUND
    for other in (rounded, unrounded):
        assert 1e-4 < worst_difference(other, exact)[0] < 1e-2


def train_masters_by_autograd(case: Case) -> dict[str, torch.Tensor]:
    """As `train_masters`, with no sum lent to what could add to it."""
    from training.engine.gradient_sums import GradientSums

    with patch.object(GradientSums, "lend_sum", lambda sums, parameter: None):
        return train_masters(case)


def train_masters(case: Case) -> dict[str, torch.Tensor]:
    """How much one step of SGD lowers this rank's fp32 weights, by their names in a checkpoint."""
    from support.cases import build_engine

    from training.checkpoint.optimizer_state import collect_state

    engine, loader, *_ = build_engine(case)
    before = {name: tensor.clone() for name, tensor in collect_state(engine).items()}
    engine.train_step(loader.iterate(0, 1), 0, 1)
    return {name: before[name] - tensor for name, tensor in collect_state(engine).items()}


def gather_masters(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameter -> its elements, of all ranks."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in (item for rank in ranks for item in rank.items()):
        name, _, start = key.rpartition("@")
        pieces.setdefault(name, {})[int(start)] = tensor
    return {name: torch.cat([found[start] for start in sorted(found)]) for name, found in pieces.items()}


@pytest.mark.full
@pytest.mark.parametrize(("stage", "num_stages"), [(2, 1), (2, 2), (3, 1)])
def test_what_a_rank_holds(workers, material, stage: int, num_stages: int) -> None:
    """Elements of (weights, gradients between two micro-batches, fp32 weights of the optimizer), of all of the stage:
    all of the first at stage 2, all else in two parts."""
    case = replace(material(False, 2 * num_stages, "micro_batch_size=1", f"zero_stage={stage}"), num_stages=num_stages)
    for held in workers(2 * num_stages).run(measure_held, case):
        weights, gradients, masters = (share / held["all"] for share in held["held"])
        assert weights == 1 if stage == 2 else weights < 0.51
        assert 0.49 < gradients < 0.51 and masters < 0.51


def measure_held(case: Case) -> dict[str, Any]:
    from support.cases import build_engine

    from training.pipeline.weight_sharding import is_sharded, whole_shape

    engine, loader, *_ = build_engine(case)
    parameters = list(engine.module.parameters())
    counter = CountSums(engine, parameters)
    engine.observe(counter)
    engine.train_step(loader.iterate(0, 1), 0, 1)
    weights = sum(each.ds_tensor.numel() if is_sharded(each) else each.numel() for each in parameters)
    masters = sum(partition.weights.numel() for partition in engine.list_partitions())
    whole = sum(whole_shape(each).numel() for each in parameters)
    return {"held": (weights, counter.most, masters), "all": whole}


class CountSums:
    """The most elements that there are of gradients before a forward pass."""

    def __init__(self, engine: Any, parameters: list[torch.nn.Parameter]) -> None:
        self.most, self._engine, self._parameters = 0, engine, parameters

    def before(self, unit: str) -> None:
        from training.engine.engine import FORWARD

        if unit == FORWARD:
            optimizer, sums = self._engine.wrapped.optimizer, self._engine.gradients
            held = [each for group in optimizer.averaged_gradients.values() for each in group or ()]
            held += getattr(sums, "parts", [])
            held += [p.grad for p in self._parameters if p.grad is not None]
            self.most = max(self.most, sum(each.numel() for each in held))

    def after(self, unit: str) -> None:
        pass
