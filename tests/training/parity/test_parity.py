"""Five steps of SGD through real pipeline stages against the plain Hugging Face model in one process.

SGD, because Adam hides a gradient that is wrong by a factor; a learning rate that moves the weights by a good part of
their size, because otherwise the weights would agree whatever the gradient.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    LAYOUTS,
    SELECTIVE,
    Case,
    build_engine,
    merge,
    train_case,
    train_oracle,
    worst_difference,
)
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(tied, ...): a model, its tokenizer and records, made once for all cases."""
    root = tmp_path_factory.mktemp("parity")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    records = save_records(root / "train.jsonl", 40)

    def case(tied: bool, layout: str, *overrides: str) -> Case:
        num_stages, world_size = LAYOUTS[layout]
        return Case(root / f"tied{tied}", records, root, num_stages, world_size, overrides=overrides)

    return case


def run(workers: Callable[[int], WorkerGroup], case: Case) -> dict:
    return merge(workers(case.world_size).run(train_case, case))


KINDS = {
    "plain": (),
    "checkpointed-clipped": (CHECKPOINTED, CLIPPED),
    "checkpointed": (CHECKPOINTED,),
    "clipped": (CLIPPED,),
    "selective": SELECTIVE,
    "every-second": EVERY_SECOND,
}
FAST = [  # every two of layout, embeddings and these kinds meet
    ("pp1", True, "plain"),
    ("pp1", False, "checkpointed-clipped"),
    ("pp2", False, "plain"),
    ("pp2", True, "checkpointed-clipped"),
    ("pp4", True, "plain"),
    ("pp4", False, "checkpointed-clipped"),
    ("pp2xdp2", False, "plain"),
    ("pp2xdp2", True, "checkpointed-clipped"),
]
CASES = [
    pytest.param(
        layout, tied, KINDS[kind], id=f"{layout}-{'tied' if tied else 'untied'}-{kind}",
        marks=() if (layout, tied, kind) in FAST else pytest.mark.full,
    )
    for layout in LAYOUTS for tied in (False, True) for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(("layout", "tied", "overrides"), CASES)
def test_five_sgd_steps_equal_hugging_face(
    workers, material, layout: str, tied: bool, overrides: tuple[str, ...]
) -> None:
    compare(workers, material(tied, layout, *overrides))


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = run(workers, case)
    oracle = find_oracle(replace(case, num_stages=1, world_size=1, overrides=tuple({CLIPPED} & set(case.overrides))))
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


find_oracle = cache(train_oracle)  # which knows nothing of layouts and recomputing


def test_selective_checkpointing(workers, material) -> None:
    compare(workers, material(True, "pp2", *SELECTIVE, CLIPPED))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("overrides", "num_kinds"),
    [((), 1), ((CHECKPOINTED,), 1), (EVERY_SECOND, 2), (SELECTIVE, 1)],
    ids=["kept", "checkpointed", "every-second", "selective"],
)
def test_compiled_layers(workers, material, overrides: tuple[str, ...], num_kinds: int) -> None:
    """Lengths differ from step to step (`data.pad_to=longest`): one compiled graph for the first, one for all others,
    whatever the number of layers of a kind. num_kinds: 2 where some layers are recomputed and others are not."""
    case = material(False, "pp2", "compile=true", *overrides)
    compiled, oracle = workers(2).run(train_compiled, case), train_oracle(case)
    assert worst_difference(merge(compiled)["weights"], oracle["weights"])[0] < BOUND
    assert [result["num_graphs"] for result in compiled] == [2 * num_kinds] * 2


def train_compiled(case: Case) -> dict:
    """As `train_case`, with the number of graphs that were compiled for it."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    result = train_case(case)
    return {**result, "num_graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize(
    "split", ["[7,1]", pytest.param("[1,7]", marks=pytest.mark.full)], ids=["head-alone", "embedding-alone"]
)
def test_a_stage_without_matrices_or_vectors(workers, material, split: str) -> None:
    """The norms of the optimizer's groups are summed over the stages one by one; every stage must have them all."""
    case = material(False, "pp2", f"partition_method={split}", CLIPPED)
    result, oracle = run(workers, case), train_oracle(case)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def test_sums_of_one_replica_stay_in_fp32(workers, material) -> None:
    """In bf16 nothing has to be averaged, so nothing is rounded on the way to the optimizer."""
    for share in workers(2).run(count_rounded, material(False, "pp2", "precision=bf16")):
        assert share < 0.5


def count_rounded(case: Case) -> float:
    """The share of this stage's gradients, as the optimizer gets them, that bf16 could hold."""

    engine, loader, *_ = build_engine(case)
    got: list[torch.Tensor] = []
    inner = engine.wrapped.optimizer.optimizer  # torch's, within DeepSpeed's
    inner.register_step_pre_hook(lambda *_: got.extend(group["params"][0].grad.clone() for group in inner.param_groups))
    engine.train_step(loader.iterate(0, 1), 0, 1)
    gradients = torch.cat(got)
    gradients = gradients[gradients != 0]
    return (gradients == gradients.bfloat16().float()).float().mean().item()


@pytest.mark.parametrize("overrides", [(), pytest.param(("offload_optimizer=cpu",), marks=pytest.mark.full)])
def test_replicas_are_summed_in_fp32(workers, material, overrides: tuple[str, ...]) -> None:
    """In bf16, micro-batches being the same: what two replicas give the optimizer is what one process would."""
    keys = ("precision=bf16", "micro_batch_size=1", "data.pad_to=max_seq_length", *overrides)
    case = replace(material(False, "pp1", *keys), steps=1)
    (alone,) = workers(1).run(train_gathering, case)
    shared = replace(case, world_size=2)
    exact, rounded = (
        workers(2).run(train_gathering, replace(shared, overrides=(*keys, f"gradient_reduce_dtype={dtype}")))[0]
        for dtype in ("fp32", "bf16")
    )
    assert worst_difference(exact, alone)[0] < BOUND
    assert 1e-3 < worst_difference(rounded, alone)[0] < 1e-2


def train_gathering(case: Case) -> dict:
    """The gradient of a step of plain SGD: by how much the optimizer's fp32 weights of all replicas went down."""

    engine, loader, _, layout, _ = build_engine(case)

    def gather() -> dict[str, torch.Tensor]:
        whole = {}
        for number, partition in enumerate(engine.list_partitions()):
            parts = [torch.empty_like(partition.weights) for _ in range(layout.dp_size)]
            torch.distributed.all_gather(parts, partition.weights.detach())
            used = sum(p.numel() for p in engine.module.parameters() if (p.ndim > 1) == (number == 0))
            whole[str(number)] = torch.cat(parts)[:used].clone()  # the rest is padding of the last part
        return whole

    before = gather()
    engine.train_step(loader.iterate(0, 1), 0, 1)
    return {name: before[name] - weights for name, weights in gather().items()}
