"""The search: everything that divides is tried, what fits comes first and fastest, and the printed overrides are a
run."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace

import pytest
from support.configs import compose_config
from support.planned import plan_config, search_config

from errors import UserError
from training.config import incompatible
from training.config.incompatible import INCOMPATIBLE, Feature, Pair
from training.config.schema import ContextParallelMode, RunConfig, to_typed
from training.planner.run import plan_run, resolve_planned
from training.planner.search import CHECKPOINTING, FINALISTS, SHOWN, Candidate, list_sharings
from training.planner.search_report import MARGIN, render_search

KEEP_ALL = ("activation_checkpoint_interval=0", "activation_checkpoint_mode=grouped", "offload_optimizer=none")
UNREAD = ("model_name_or_path", "train_file", "output_dir")
NEARLY = (
    "model=llama_3_1_8b", "world_size=1", "hardware=h200", "hardware.host_memory=10", "max_seq_length=4096",
)  # fmt: skip


def build(*overrides: str) -> RunConfig:
    return to_typed(compose_config("llama_7b_pp4", "plan=search", "global_batch_size=16", *overrides), UNREAD)


def test_every_split_that_divides_is_tried() -> None:
    found = [c for c in search_config(build("world_size=8")) if c.plan.layout.schedule == "1f1b"]
    layouts = {(c.plan.layout.num_stages, c.plan.layout.micro_batch_size) for c in found}
    assert layouts == {
        (stages, micro) for stages in (1, 2, 4, 8) for micro in (1, 2, 4, 8, 16) if 16 % (8 // stages * micro) == 0
    }
    always = [c for c in found if tuple(c.memory_overrides) in ((), ("offload_optimizer",))]
    assert len(always) == 2 * len(CHECKPOINTING) * len(layouts)  # with and without offloading
    assert all(candidate.plan.layout.global_batch_size == 16 for candidate in found)


@pytest.mark.full
def test_both_schedules_are_tried_where_a_layout_allows_it() -> None:
    found = search_config(build("world_size=8", "schedule=interleaved"))
    plain, interleaved = (
        {
            (c.plan.layout.num_stages, c.plan.layout.micro_batch_size)
            for c in found
            if c.plan.layout.schedule == schedule
        }
        for schedule in ("1f1b", "interleaved")
    )
    assert interleaved == {
        (stages, micro) for stages, micro in plain if stages > 1 and 16 // (8 // stages * micro) % stages == 0
    }
    assert all(("schedule=1f1b" in c.overrides) == (c.plan.layout.num_chunks == 1) for c in found)


def test_the_best_are_tried_without_a_bubble_too_and_win() -> None:
    config = build("world_size=8", "hardware=h200", "global_batch_size=8")
    found = search_config(config)
    schedules = [candidate.plan.layout.schedule for candidate in found]
    assert schedules.count("zero_bubble") == FINALISTS and "schedule=zero_bubble" in found[0].overrides
    assert "zero_bubble" not in {c.plan.layout.schedule for c in search_config(replace(config, compile=True))}


def test_what_fits_comes_first_and_the_fastest_of_it() -> None:
    config = build("world_size=8", "hardware=a100_40g")
    found = search_config(config)
    fits = [candidate.plan.fits for candidate in found]
    assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
    speeds = [candidate.plan.tokens_per_second for candidate in found if candidate.plan.fits]
    assert speeds == sorted(speeds, reverse=True)
    near = sum(speed > (1 - MARGIN) * speeds[0] for speed in speeds[1:])
    text = render_search(found, config, config.hardware)
    assert near > 0 and f"within 10% of the first: {near}, which" in text and "cost" not in text
    priced = render_search(found, config, replace(config.hardware, price_per_hour=2.0))
    first = priced.splitlines()[3]
    assert "1B tokens cost" in priced and float(first.split()[-1].replace(",", "")) == pytest.approx(
        2 * 8 * 1e9 / speeds[0] / 3600, rel=0.01
    )


def test_the_overrides_make_the_plan_that_was_ranked() -> None:
    config = build("world_size=8", "hardware=a100_40g")
    best = search_config(config)[0]
    report = "\n".join(plan_run(config))
    used = shlex.split(report.splitlines()[-1].removeprefix("use: "))
    assert tuple(used) == best.overrides
    again = build("world_size=8", "hardware=a100_40g", *used)
    plan = plan_config(again)
    assert plan.step_seconds == best.plan.step_seconds and plan.fullest.memory.peak == best.plan.fullest.memory.peak


@pytest.mark.full
@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_fewer_larger_micro_batches_are_faster_where_memory_permits(machine: str) -> None:
    """Gradients are summed once a micro-batch; nothing else tells one size from another in replicas without stages."""
    found = search_config(
        build("world_size=8", f"hardware={machine}", "global_batch_size=64", "offload_optimizer=none")
    )
    assert found[0].plan.layout.micro_batch_size > 1
    replicas = [
        c.plan
        for c in found
        if c.plan.layout.num_stages == 1 and c.overrides[4:7] == KEEP_ALL and not c.memory_overrides
    ]
    by_size = sorted(replicas, key=lambda plan: plan.layout.micro_batch_size)
    speeds = [plan.tokens_per_second for plan in by_size]
    assert len(speeds) == 4 and all(few > many * 1.001 for many, few in itertools.pairwise(speeds))


def test_where_a_gpu_is_too_small_replicas_shard_or_the_host_helps() -> None:
    """Memory overrides are tried for a layout only where the run without them does not fit; and a run of
    one replica has nothing to shard."""
    found = [c for c in search_config(build("world_size=8", "hardware=a100_40g")) if c.plan.layout.schedule == "1f1b"]
    by_layout: dict[tuple[int, int, int], list[Candidate]] = {}
    for c in found:
        way = next(number for number, choices in enumerate(CHECKPOINTING) if c.checkpointing in choices)
        by_layout.setdefault((c.plan.layout.num_stages, c.plan.layout.micro_batch_size, way), []).append(c)
    for (num_stages, _, _), tried in by_layout.items():
        plain = next(c.plan for c in tried if not c.memory_overrides)
        stages = {c.memory_overrides["zero_stage"] for c in tried if "zero_stage" in c.memory_overrides}
        if num_stages == 8 or (plain.fits and plain.layout.gradient_accumulation_steps > 1):
            assert not stages
        else:
            assert stages == ({2, 3} if num_stages == 1 and not plain.fits else {2})


@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_overrides_of_a_stage_of_zero_make_its_plan(zero_stage: int) -> None:
    found = search_config(build("world_size=8", "hardware=a100_40g"))
    used = next(c for c in found if c.plan.fits and c.memory_overrides == {"zero_stage": zero_stage})
    again = build("world_size=8", "hardware=a100_40g", *used.overrides)
    plan = plan_config(again)
    assert plan.step_seconds == used.plan.step_seconds and plan.fullest.memory.peak == used.plan.fullest.memory.peak


def test_a_list_of_layers_gives_way_to_a_balanced_split() -> None:
    assert (
        len({c.plan.layout.num_stages for c in search_config(build("world_size=4", "partition_method=[9,9,9,8]"))}) == 3
    )


def test_nothing_fits_and_by_how_much() -> None:
    config = build("world_size=1", "hardware=rtx4090")
    with pytest.raises(UserError) as caught:
        "\n".join(plan_run(config))
    nearest = search_config(config)[0].plan
    assert f"misses {nearest.missing_memory / 2**30:.1f} GiB on a GPU (stage 0; most of it is " in str(caught.value)
    assert str(caught.value).startswith(
        "no layout fits world_size=1 x hardware=rtx4090; the nearest (num_stages=1 micro_batch_size=1 "
    )


def test_nothing_fits_but_with_what_the_search_does_not_try() -> None:
    """Rounded averages of the optimizer, which change a run's numbers."""
    config = build(*NEARLY)
    with pytest.raises(UserError, match=r"misses .*; it would fit with (.* or )?optimizer\.state_dtype=bf16 \("):
        "\n".join(plan_run(config))


def test_a_host_that_is_too_small_is_named() -> None:
    config = build("world_size=4", "hardware=rtx4090", "hardware.host_memory=140")
    with pytest.raises(UserError, match=r"GiB of host memory a node; raise world_size"):
        render_search(search_config(config), config, config.hardware)


def test_a_global_batch_that_no_split_divides() -> None:
    with pytest.raises(UserError, match="no split of world_size=64 divides global_batch_size=7"):
        search_config(build("world_size=64", "global_batch_size=7", "micro_batch_size=null"))


def test_sequences_are_shared_where_samples_are_long() -> None:
    def find(*overrides: str) -> dict[int, str]:
        """The modes that are tried, by size."""
        config = build("world_size=8", *overrides)
        found: dict[int, list[str]] = {}
        for size, mode, _ in list_sharings(
            config,
            resolve_planned(replace(config, context_parallel_size=1, context_parallel_mode=ContextParallelMode.auto)),
            8,
        ):
            found.setdefault(size, []).append(mode.value)
        return {size: " ".join(modes) for size, modes in found.items()}

    both, long = "ulysses ring", "max_seq_length=16384"
    assert find(long) == {1: "auto", 2: both, 4: both, 8: both} and find() == {1: "auto"}
    own = find(long, "context_parallel_size=2", "tensor_parallel_size=2")
    assert own == {2: both, 1: "auto", 4: both} and next(iter(own)) == 2
    assert find(long, "context_parallel_mode=ring", "context_parallel_size=2") == {2: "ring", 4: "ring", 8: "ring"}
    assert find("max_seq_length=16388") == {1: "auto", 2: both, 4: "ulysses"}  # which the others do not divide
    assert find("context_parallel_size=2") == {2: both}
    assert find(long, "compile=true") == {1: "auto"}


@pytest.mark.full
def test_the_overrides_share_sequences_too() -> None:
    long = ("world_size=4", "hardware=a100_40g", "max_seq_length=32768", "model=llama_tiny")
    config = build(*long)
    best = next(candidate for candidate in search_config(config) if candidate.plan.layout.context_parallel_size > 1)
    assert {f"context_parallel_size={best.sharing.size}", f"context_parallel_mode={best.sharing.mode.value}"} < {
        *best.overrides
    }
    again = build(*long, *best.overrides)
    plan = plan_config(again)
    assert plan.step_seconds == best.plan.step_seconds and plan.fullest.memory.peak == best.plan.fullest.memory.peak


def test_what_the_run_would_refuse_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("world_size=4", "hardware=a100_80g")
    best, *_ = search_config(config)
    mode, interval = best.checkpointing
    taken = Feature("the best way", lambda run: run.config.activation_checkpoint_mode is mode)
    much = Feature("as often", lambda run: run.config.activation_checkpoint_interval == interval)
    monkeypatch.setattr(incompatible, "INCOMPATIBLE", (*INCOMPATIBLE, Pair(taken, much, "of a test", "give another")))
    offered = search_config(config)[:SHOWN]
    assert len(offered) == SHOWN and best.checkpointing not in [candidate.checkpointing for candidate in offered]


@pytest.mark.full
def test_the_overrides_divide_experts_too() -> None:
    mixture = ("world_size=8", "hardware=h200", "model=mixtral_8x7b", "global_batch_size=8")
    config = build(*mixture)
    found = search_config(config)
    assert {candidate.sharing.experts for candidate in found} == {1, 2, 4, 8}
    assert all(candidate.plan.layout.num_weight_replicas % candidate.sharing.experts == 0 for candidate in found)
    best = next(candidate for candidate in found if candidate.sharing.experts > 1)
    assert f"expert_parallel_size={best.sharing.experts}" in best.overrides
    plan = plan_config(build(*mixture, *best.overrides))
    assert plan.step_seconds == best.plan.step_seconds and plan.fullest.memory.peak == best.plan.fullest.memory.peak
    compiled = replace(config, compile=True)  # with which experts are not divided
    assert {sharing.experts for sharing in list_sharings(compiled, resolve_planned(compiled), 8)} == {1}
