"""The search: everything that divides can be found, what fits comes first and fastest, and the printed overrides are
a run."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.configs import compose_config
from support.planned import describe_machine, plan_config, search_config, share_models

from console import fit
from errors import UserError
from extensions.search import search
from extensions.search.command import build_command, list_needs, render_command
from extensions.search.report import MARGIN, render_other_updates, render_search, render_sizes
from extensions.search.run import SHARED_AS, list_other_updates, try_other_updates
from extensions.search.search import MOST_ORDERS, SHOWN, search_plans
from extensions.search.space import (
    CHECKPOINTING,
    PLAIN,
    VARIED,
    Candidate,
    Sharing,
    list_layouts,
    list_sharings,
)
from training.config import incompatible
from training.config.incompatible import INCOMPATIBLE, CheckedConfig, Feature, Pair, check_together
from training.config.schema import RunConfig, to_typed
from training.costs.cost import LayerCost, MicroBatchShape, count_layers
from training.costs.hardware import GIB
from training.distributed.topology import build_layout
from training.plan_command.run import build_plan, plan_run, resolve_planned
from training.planner.advice import SAVING, UNUSED
from training.resolution import counts
from training.resolution.counts import FAR
from training.resolution.resolve import ResolvedModel

UNREAD = ("model_name_or_path", "train_file", "output_dir")
NEARLY = (
    "model=llama_3_1_8b", "world_size=1", "hardware=h200", "hardware.host_memory=10", "max_seq_length=4096",
)  # fmt: skip


def build(*overrides: str) -> RunConfig:
    return to_typed(compose_config("llama_7b_pp4", "plan=search", "global_batch_size=16", *overrides), UNREAD)


def list_saving(candidate: Candidate) -> dict[str, Any]:
    """The overrides that save memory."""
    return {key: value for key, unused in UNUSED.items() if (value := getattr(candidate.keys, key)) != unused}


def find_all(config: RunConfig) -> list[Candidate]:
    """Everything that fits of what the search tries when it looks for more than there is."""
    return search_config(config, most=10**6)


def test_every_split_that_divides_is_a_layout() -> None:
    config = build("world_size=8")
    for tensor in (1, 2):
        sharing = Sharing.of(config)._replace(tensor_parallel_size=tensor)
        layouts = list_layouts(config, [sharing], 35)
        ranks = 8 // tensor
        assert {(keys.num_stages, keys.micro_batch_size) for keys in layouts} == {
            (stages, micro)
            for stages in (1, 2, 4, 8)
            for micro in (1, 2, 4, 8, 16)
            if ranks % stages == 0 and 16 % (ranks // stages * micro) == 0
        }
        assert all(keys.global_batch_size == 16 and Sharing.of(keys) == sharing for keys in layouts)


@pytest.mark.full
def test_every_schedule_is_tried_where_a_layout_allows_it() -> None:
    found = find_all(build("world_size=4", "model=llama_tiny"))
    plain, interleaved, zero_bubble = (
        {
            (c.keys.tensor_parallel_size, c.plan.layout.num_stages, c.plan.layout.micro_batch_size)
            for c in found
            if c.plan.layout.schedule == schedule
        }
        for schedule in (PLAIN, "interleaved", "zero_bubble")
    )
    assert interleaved == {
        (tensor, stages, micro)
        for tensor, stages, micro in plain
        if stages > 1 and 16 // (4 // tensor // stages * micro) % stages == 0
    }
    assert zero_bubble < plain and 0 < len(zero_bubble) <= MOST_ORDERS
    assert all((f"schedule={c.keys.schedule}" in c.overrides) == (c.keys.schedule != PLAIN) for c in found)


@pytest.mark.parametrize("memory", [pytest.param(40, marks=pytest.mark.full), 0.1])
def test_the_fastest_are_those_of_all(memory: float) -> None:
    """A search for everything finds the same best ones: those that are left out are slower. Each is named once, though
    with little memory several ways lead to it."""
    config = build("world_size=4", "model=llama_tiny", "hardware=a100_40g", f"hardware.memory={memory}")
    everything = [c.overrides for c in find_all(config)]
    best = [c.overrides for c in search_config(config)]
    assert len(best) == SHOWN < len(everything) == len(set(everything))
    assert best == everything[:SHOWN]


@pytest.mark.parametrize(
    "memory", [pytest.param(10, marks=pytest.mark.full), pytest.param(0.2, marks=pytest.mark.full), 0.12]
)
def test_nothing_that_fits_is_faster(memory: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of what is tried, planned by itself; without zero bubble, of which few are. Memory that a
    layout has is not saved: that it would be faster so (ZeRO stage 3 sums during the passes) is not looked for."""
    monkeypatch.setattr(search, "MOST_ORDERS", 0)
    config = build("world_size=2", "model=llama_tiny", "hardware=l40s", f"hardware.memory={memory}", "num_stages=1")
    models, machine = share_models(config), describe_machine(config)

    def name(keys: RunConfig) -> tuple[object, ...]:
        return Sharing.of(keys), keys.num_stages, keys.micro_batch_size, keys.schedule

    fitting = []
    for plain in list_layouts(config, list_sharings(models, 2, 8), models.model.num_units):
        for (mode, interval), overrides in itertools.product(itertools.chain(*CHECKPOINTING), ({}, *SAVING)):
            recomputed = replace(plain, activation_checkpoint_mode=mode, activation_checkpoint_interval=interval)
            keys = replace(recomputed, **overrides)
            with suppress(UserError):
                check_together(CheckedConfig(keys))
                plan = build_plan(keys, models.get(Sharing.of(keys)), machine)
                fitting += [(name(keys), plan.step_seconds)] if plan.fits else []
                if plan.fits and not overrides:
                    break
    found = search_config(config)
    listed = {name(candidate.keys): candidate.plan.step_seconds for candidate in reversed(found)}
    faster = [(key, seconds) for key, seconds in fitting if seconds < found[-1].plan.step_seconds]
    assert len(fitting) > len(found) == SHOWN and faster
    assert all(listed[key] <= seconds * (1 + 1e-9) for key, seconds in faster)


def count_sizes(config: RunConfig, model: ResolvedModel, sizes: Sequence[int]) -> list[Sequence[LayerCost]]:
    """The costs of the layers at micro-batches of these sizes, asked for in this order."""
    layout = build_layout(config, int(config.world_size), model.num_units, has_accelerator=True)
    layouts = (replace(layout, micro_batch_size=size) for size in sizes)
    return [model.counts.count_costs(each, config.max_seq_length) for each in layouts]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each micro-batch that layers have run with."""
    rows: list[int] = []

    def count(layers: Any, config: Any, batch: MicroBatchShape, **keys: Any) -> list[LayerCost]:
        rows.append(batch.rows)
        return count_layers(layers, config, batch, **keys)

    monkeypatch.setattr(counts, "count_layers", count)
    return rows


@pytest.mark.parametrize(
    ("keys", "ran"),
    [
        (("model=llama_tiny",), [1, 2, FAR]),
        (("model=llama_tiny", "tensor_parallel_size=2", "sequence_parallel=true"), [1, 2, FAR, 4]),  # copies no one row
        (("model=llama_tiny", "adapter=lora", "attn_implementation=eager"), [1, 2, FAR, 4]),  # another peak
        (("model=llama_tiny", "adapter=lora", "adapter.load_in_4bit=true", "compile=true"), [1, 2, FAR]),
        (("model=mixtral_8x7b", "model.num_hidden_layers=1", "expert_parallel_size=2"), [1, 2, FAR]),
    ],
    ids=str,
)
def test_layers_run_at_few_sizes_and_the_others_are_exact(
    keys: tuple[str, ...], ran: list[int], runs: list[int]
) -> None:
    config, sizes = build("world_size=2", "num_stages=1", *keys), [1, 2, 4, 8, 64]
    found = count_sizes(config, resolve_planned(config), sizes)
    assert runs == ran
    assert found == [count_sizes(config, resolve_planned(config), [size])[0] for size in sizes]
    assert runs == [*ran, *sizes]


def test_layers_whose_costs_are_on_no_line_run_at_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kink that the sizes before it do not show: the far one does."""

    def count(layers: Any, config: Any, batch: MicroBatchShape, **keys: Any) -> list[LayerCost]:
        costs = count_layers(layers, config, batch, **keys)
        return [replace(cost, bytes=replace(cost.bytes, widest=max(1, batch.rows - 8))) for cost in costs]

    monkeypatch.setattr(counts, "count_layers", count)
    config = build("world_size=1", "num_stages=1", "model=llama_tiny")
    found = count_sizes(config, resolve_planned(config), [1, 2, 4, 8, 16])
    assert [costs[1].bytes.widest for costs in found] == [1, 1, 1, 1, 8]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_other_schedules_are_tried_whatever_the_config_has(num_stages: int) -> None:
    found = search_config(build("world_size=2", "model=llama_tiny", f"num_stages={num_stages}"))
    assert {candidate.keys.schedule for candidate in found} >= {PLAIN, "interleaved"}


def test_layouts_without_a_bubble_are_tried_and_win() -> None:
    config = build("world_size=8", "hardware=h200", "global_batch_size=8", "hardware.cards_per_node=1")
    assert "schedule=zero_bubble" in search_config(config)[0].overrides
    assert "zero_bubble" not in {c.plan.layout.schedule for c in search_config(replace(config, compile=True))}


def test_layers_are_shared_within_a_node() -> None:
    config = build("world_size=8", "hardware=h200")
    models = share_models(config)

    def find(world_size: int, cards_per_node: int) -> list[tuple[int, bool]]:
        return [sharing[3:] for sharing in list_sharings(models, world_size, cards_per_node)]

    assert find(8, 8) == [(1, False), *((size, splits) for size in (2, 4, 8) for splits in (False, True))]
    assert find(8, 2) == [(1, False), (2, False), (2, True)] and find(2, 8) == find(8, 2)
    assert find(8, 1) == [(1, False)]


def test_the_overrides_share_layers_too() -> None:
    small = ("world_size=4", "model=llama_tiny", "hardware=a100_40g")
    found = find_all(build(*small))
    for splits_sequence in (False, True):
        used = next(c for c in found if c.sharing[3:] == (2, splits_sequence))
        plan = plan_config(build(*small, *used.overrides))
        assert plan.step_seconds == used.plan.step_seconds
        assert plan.fullest.memory.peak == used.plan.fullest.memory.peak
        assert plan.layout.tensor_parallel_size == 2


def test_what_fits_is_listed_and_the_fastest_of_it_first() -> None:
    config = build("world_size=8", "hardware=a100_40g")
    found = search_config(config)
    assert all(candidate.plan.fits for candidate in found) and len(found) == SHOWN
    speeds = [candidate.plan.tokens_per_second for candidate in found]
    assert speeds == sorted(speeds, reverse=True)
    near = sum(speed > (1 - MARGIN) * speeds[0] for speed in speeds[1:])
    text = render_search(found, [])
    margin = "a plan cannot tell apart what differs by less than 10%; so near to the first: "
    assert near > 0 and f"{margin}{near} of these" in text and "cost" not in text
    assert f"{margin}none of these" in render_search(found[:1], [])
    listed = search_config(build("world_size=8", "hardware=a100_40g", "hardware.price_per_hour=2"))
    priced = render_search(listed, [])
    first = priced.splitlines()[3]
    assert "1B tokens cost" in priced and float(first.split()[-1].replace(",", "")) == pytest.approx(
        2 * 8 * 1e9 / speeds[0] / 3600, rel=0.01
    )
    plan = listed[0].plan
    run = render_search(listed, [], total_steps=1000)
    assert "run costs" in run and "1B tokens" not in run
    assert float(run.splitlines()[3].split()[-1].replace(",", "")) == pytest.approx(
        plan.price(1000 * plan.step_seconds), rel=0.01
    )
    scored = render_search(listed, [], total_steps=1000, scored_rows=16_000)  # a reference goes over them once
    assert float(scored.splitlines()[3].split()[-1].replace(",", "")) == pytest.approx(
        plan.price(1000 * plan.step_seconds + plan.time_forward(16_000)), rel=0.01
    )


def test_the_command_trains_as_the_plan_that_was_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are those of the search's own command, but for what the layout changes."""
    given = ["global_batch_size=16", "hardware=a100_40g", "num_stages=8", "micro_batch_size=2"]
    words = ["-cn", "llama_7b_pp4", "plan=search", "world_size=8", *given]
    monkeypatch.setattr(sys, "argv", ["trainer_base_ds_mp.py", *words])
    config = build("world_size=8", *given)
    best = search_config(config)[0]
    report = next(iter(plan_run(config)))
    use, *command = shlex.split(report.splitlines()[-1])
    launcher = ["deepspeed", "--num_gpus", "8", "trainer_base_ds_mp.py", "-cn", "llama_7b_pp4"]
    assert use == "use:" and command[: len(launcher)] == launcher
    keys = command[len(launcher) :]
    assert {*best.overrides} < {*keys} and {key.partition("=")[0] for key in keys} >= {"global_batch_size", "hardware"}
    assert best.keys.num_stages != 8 and "num_stages=8" not in keys and "plan=search" not in keys
    plan = plan_config(replace(build("world_size=8", *keys), plan=True))
    assert plan.step_seconds == best.plan.step_seconds and plan.fullest.memory.peak == best.plan.fullest.memory.peak


def test_only_what_differs_from_the_config_is_named() -> None:
    found = search_config(build("world_size=2", "model=llama_tiny", "hardware=a100_40g"))
    best = found[0]
    same = search_config(build("world_size=2", "model=llama_tiny", "hardware=a100_40g", *best.overrides))[0]
    assert best.overrides and same.overrides == () and same.plan.step_seconds == best.plan.step_seconds
    header = {*render_search(found, []).splitlines()[2].split()}
    assert header & {*VARIED} == {key for candidate in found for key in candidate.changed} and "tokens/s" in header


def test_the_command_can_be_pasted() -> None:
    keys = [f"key_{number}=1" for number in range(20)]
    command = ["deepspeed", "train.py", "data.prompt_template=Q: {prompt}", *keys]
    text = render_command(command, 60)
    assert len(text.splitlines()) > 3 and max(map(len, text.splitlines())) <= 60 and fit(text, 60) == text
    assert shlex.split(text.replace("\\\n", "")) == command == shlex.split(render_command(command, None))
    assert fit(narrow := render_command(command, 20), 20) == narrow  # though a word is wider


def test_the_command_of_several_hosts_names_their_file() -> None:
    best = search_config(build("world_size=4", "model=llama_tiny", "hardware=a100_40g", "hardware.cards_per_node=2"))[0]
    assert build_command(best, ["plan=search"])[1:4] == ["--hostfile", "hostfile", "trainer_base_ds_mp.py"]
    keys, hosts = list_needs(best)
    assert keys == "the command needs train_file=... too"
    assert hosts.startswith("hostfile has a line 'NAME slots=2' for each host, 4 slots in all; ")


@pytest.mark.full
@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_fewer_larger_micro_batches_are_faster_where_memory_permits(machine: str) -> None:
    """Gradients are summed once a micro-batch; nothing else tells one size from another in replicas without stages."""
    found = find_all(build("world_size=8", f"hardware={machine}", "global_batch_size=64", "hardware.cards_per_node=1"))
    assert found[0].plan.layout.micro_batch_size > 1
    replicas = [
        c.plan
        for c in found
        if c.plan.layout.num_stages == 1 and c.checkpointing in CHECKPOINTING[0] and not list_saving(c)
    ]
    by_size = sorted(replicas, key=lambda plan: plan.layout.micro_batch_size)
    speeds = [plan.tokens_per_second for plan in by_size]
    assert len(speeds) > 1 and all(few > many * 1.001 for many, few in itertools.pairwise(speeds))


def test_where_a_gpu_is_too_small_replicas_shard_or_the_host_helps() -> None:
    """Memory overrides are tried for a layout only where the run without them does not fit; and a run of
    one replica has nothing to shard."""
    config = build("world_size=8", "hardware=a100_40g", "hardware.cards_per_node=1")
    found = find_all(config)
    assert {list_saving(c).get("zero_stage", 1) for c in found} == {1, 2, 3}
    assert any("offload_optimizer" in list_saving(c) for c in found)
    for c in found:
        layout = c.plan.layout
        if "zero_stage" in list_saving(c):
            assert layout.num_stages < 8 and (list_saving(c)["zero_stage"] == 2 or layout.num_stages == 1)
        is_free = list_saving(c) == {"zero_stage": 2} and layout.gradient_accumulation_steps == 1
        if layout.num_stages == 1 and list_saving(c) and not is_free:  # else layers may have moved to other stages
            assert not plan_config(replace(c.keys, plan=True, **UNUSED)).fits


@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_overrides_of_a_stage_of_zero_make_its_plan(zero_stage: int) -> None:
    found = find_all(build("world_size=8", "hardware=a100_40g", "hardware.cards_per_node=1"))
    used = next(c for c in found if list_saving(c) == {"zero_stage": zero_stage})
    again = build("world_size=8", "hardware=a100_40g", "hardware.cards_per_node=1", *used.overrides)
    plan = plan_config(again)
    assert plan.step_seconds == used.plan.step_seconds and plan.fullest.memory.peak == used.plan.fullest.memory.peak


def test_a_list_of_layers_gives_way_to_a_balanced_split() -> None:
    found = find_all(build("world_size=4", "partition_method=[9,9,9,8]", "hardware.cards_per_node=1"))
    assert {c.plan.layout.num_stages for c in found} == {1, 2, 4}
    assert all("partition_method=balanced" in c.overrides for c in found)


def test_nothing_fits_and_by_how_much() -> None:
    config = build("world_size=1", "hardware=rtx4090")
    with pytest.raises(UserError) as caught:
        "\n".join(plan_run(config))
    nearest, *others = search_config(config)
    plan = nearest.plan
    assert not others
    assert f"misses {plan.missing_memory / 2**30:.1f} GiB on a GPU (stage 0; most of it is " in str(caught.value)
    assert str(caught.value).startswith("no layout fits world_size=1 x hardware=rtx4090; the nearest (num_stages=1 ")


def test_nothing_fits_but_with_what_the_search_does_not_try() -> None:
    """Rounded averages of the optimizer, which change a run's numbers."""
    config = build(*NEARLY)
    with pytest.raises(UserError, match=r"misses .*; it would fit with (.* or )?optimizer\.state_dtype=bf16 \("):
        "\n".join(plan_run(config))


def test_a_host_that_is_too_small_is_named() -> None:
    config = build("world_size=4", "hardware=rtx4090", "hardware.host_memory=140")
    with pytest.raises(UserError, match=r"GiB of host memory a node; raise world_size"):
        render_search(search_config(config), [])


def test_several_numbers_of_gpus() -> None:
    tiny = ("model=llama_tiny", "hardware=a100_40g")
    least = ("num_stages=1", "micro_batch_size=1", "gradient_accumulation_steps=null", "activation_offload=true")
    least = (*least, "activation_checkpoint_interval=1", "offload_optimizer=cpu")
    needed = plan_config(build("world_size=1", *tiny, *least)).fullest.memory.peak
    small = (*tiny, f"hardware.memory={0.95 * needed / GIB}", "hardware.usable_memory=1")
    *_, text = plan_run(build("world_size=[1,2,4,2]", *small, "hardware.price_per_hour=2"))
    best = {size: search_config(build(f"world_size={size}", *small))[0] for size in (1, 2, 4)}
    fitting = {size: candidate.plan.tokens_per_second for size, candidate in best.items() if candidate.plan.fits}
    assert list(fitting) == [2, 4]
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["2", "4"]
    (nothing,) = (line for line in lines if line.startswith("nothing fits "))
    assert nothing.startswith("nothing fits 1 x a100_40g: the nearest (") and " misses " in nothing
    named = {name: place for place, line in enumerate(lines) for name in line.partition(":")[0].split(", ")}
    fastest, cheapest = max(fitting, key=lambda n: fitting[n]), max(fitting, key=lambda n: fitting[n] / n)
    for name, size in (("fastest", fastest), ("cheapest", cheapest), ("fewest GPUs", 2)):
        line, command = lines[named[name]], next(line for line in lines[named[name] :] if line.startswith("use: "))
        assert f": {size} GPUs, {fitting[size]:,.0f} tokens/s, {fitting[size] / size:,.0f} per GPU" in line
        assert f"--num_gpus {size} " in command and command.endswith(" ".join(best[size].overrides))
        assert "1B tokens cost" in line


def test_what_changes_the_update_is_a_table_of_its_own() -> None:
    small = ("world_size=2", "model=llama_tiny", "hardware=a100_40g", "max_seq_length=256")
    config = build(*small)
    table, others = plan_run(config)
    assert "lora" not in table and "state_dtype" not in table
    rows = [line.split() for line in others.splitlines()[4:-2]]
    named = {row[0]: row for row in reversed(rows)}  # of two with adapters the first, without 4 bits
    assert {"optimizer.state_dtype=bf16", "adapter=lora"} <= {*named}
    lora, among = build(*small, "adapter=lora"), [candidate.sharing for candidate in search_config(config)[:SHARED_AS]]
    best = search_plans(lora, share_models(lora), describe_machine(lora), most=1, among=among)[0]
    assert f"{best.plan.tokens_per_second:,.0f}" in named["adapter=lora"]
    already = build(*small, "adapter=lora", "optimizer.state_dtype=bf16")
    assert [overrides for overrides, _ in list_other_updates(already)] == ["optimizer=adamw_8bit"]


def test_weights_in_4_bits_are_tried_without_tensor_parallelism() -> None:
    """Where all of the best layouts have it."""
    config = build("world_size=2", "model=llama_tiny", "hardware=a100_40g", "max_seq_length=256")
    models, machine = share_models(config), describe_machine(config)
    shared = Sharing.of(config)._replace(tensor_parallel_size=2)
    best = try_other_updates(config, models, machine, search_plans(config, models, machine, most=1, among=[shared]))
    assert best["adapter=lora"].sharing == shared
    assert best["adapter=lora adapter.load_in_4bit=true"].sharing == shared._replace(tensor_parallel_size=1)


def test_what_a_plan_cannot_tell_apart_is_named_with_the_margin() -> None:
    config = build("world_size=2", "model=llama_tiny", "hardware=a100_40g")
    found = search_config(config)
    fast, slow = found[0], found[-1]
    assert slow.plan.tokens_per_second < (1 - MARGIN) * fast.plan.tokens_per_second
    others = render_other_updates({"one": fast, "two": slow}, fast)
    assert others.endswith("differs by less than 10%; so near to the run's own fastest: one")
    others = render_other_updates({"two": fast}, slow)
    assert others.endswith("so near to the run's own fastest: none of these")  # faster by more
    sizes = render_sizes({2: fast, 4: fast}, [])
    assert "differs by less than 10%; so near to the fastest: 4 GPUs; to the cheapest: none of these\n" in sizes


def test_several_numbers_of_gpus_that_cannot_be_compared() -> None:
    with pytest.raises(UserError, match=r"world_size=\[2, 4\] compares runs of one global batch, and none is given"):
        list(plan_run(build("world_size=[2,4]", "global_batch_size=null", "gradient_accumulation_steps=1")))
    with pytest.raises(UserError, match="world_size=3 is not a multiple of"):
        list(plan_run(build("world_size=[2,3]", "tensor_parallel_size=2")))
    config = build("world_size=[1,2]", "hardware=rtx4090", "hardware.memory=2")
    with pytest.raises(UserError, match="no layout fits world_size=2 x hardware=.*; the nearest"):
        list(plan_run(config))


def test_a_global_batch_that_no_split_divides() -> None:
    with pytest.raises(UserError, match="no split of world_size=64 divides global_batch_size=7"):
        search_config(
            build("world_size=64", "global_batch_size=7", "micro_batch_size=null", "hardware.cards_per_node=1")
        )


def test_sequences_are_shared_where_samples_are_long() -> None:
    def find(*overrides: str) -> dict[int, str]:
        """The modes that are tried, by size."""
        config = build("world_size=8", *overrides)
        found: dict[int, list[str]] = {}
        models = share_models(config)
        for size, mode, _, tensor, splits in list_sharings(models, 8, 8):
            if tensor == config.tensor_parallel_size and not splits:
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
    best = next(candidate for candidate in find_all(config) if candidate.plan.layout.context_parallel_size > 1)
    assert {
        f"context_parallel_size={best.keys.context_parallel_size}",
        f"context_parallel_mode={best.keys.context_parallel_mode.value}",
    } < {*best.overrides}
    again = build(*long, *best.overrides)
    plan = plan_config(again)
    assert plan.step_seconds == best.plan.step_seconds and plan.fullest.memory.peak == best.plan.fullest.memory.peak


def test_what_the_run_would_refuse_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("world_size=4", "hardware=a100_80g")
    best, *_ = search_config(config)
    staged = Feature("as many stages", lambda run: run.config.num_stages == best.plan.layout.num_stages)
    sized = Feature("as large", lambda run: run.config.micro_batch_size == best.plan.layout.micro_batch_size)
    monkeypatch.setattr(incompatible, "INCOMPATIBLE", (*INCOMPATIBLE, Pair(staged, sized, "of a test", "give another")))
    offered = [(c.plan.layout.num_stages, c.plan.layout.micro_batch_size) for c in search_config(config)]
    assert len(offered) == SHOWN and (best.plan.layout.num_stages, best.plan.layout.micro_batch_size) not in offered


@pytest.mark.full
def test_the_overrides_divide_experts_too() -> None:
    mixture = ("world_size=8", "hardware=h200", "model=mixtral_8x7b", "global_batch_size=8")
    config = build(*mixture)
    found = find_all(config)
    assert {candidate.keys.expert_parallel_size for candidate in found} == {1, 2, 4, 8}
    assert all(c.plan.layout.num_weight_replicas % c.keys.expert_parallel_size == 0 for c in found)
    best = next(candidate for candidate in found if candidate.keys.expert_parallel_size > 1)
    assert f"expert_parallel_size={best.keys.expert_parallel_size}" in best.overrides
    plan = plan_config(build(*mixture, *best.overrides))
    assert plan.step_seconds == best.plan.step_seconds and plan.fullest.memory.peak == best.plan.fullest.memory.peak
    compiled = replace(config, compile=True)  # with which experts are not divided
    models = share_models(compiled)
    assert {sharing.expert_parallel_size for sharing in list_sharings(models, 8, 8)} == {1}
