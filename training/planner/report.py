"""The plan as text: a table with a row per stage, the time of a step, and a verdict with the limit and what to
change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from training.config.schema import CheckpointMode, Offload, RunConfig
from training.cost_terms.cost_term import Memory
from training.costs.hardware import GIB, Machine
from training.distributed.topology import EXPERTS
from training.planner.disk import render_disk
from training.planner.formatting import render_cost, render_count, render_rows, render_seconds
from training.planner.plan import Plan, StagePlan
from training.planner.remedies import Remedy, describe_remedies

_RECOMPUTE_LESS = dict.fromkeys(
    CheckpointMode,
    "activation_checkpoint_mode=selective saves most of it, activation_checkpoint_interval=0 all of it",
) | {CheckpointMode.selective: "activation_checkpoint_interval=0 saves it"}
COLUMNS = (
    "stage", "layers", "params", "GFLOP/token", "weights", "gradients", "optimizer", "activations", "recompute", "loss",
    "buffers", "step", "peak", "boundary",
)  # fmt: skip


def render_plan(
    plan: Plan,
    config: RunConfig,
    hardware: Machine,
    total_steps: int | None,
    *,
    note: str = "",
    earlier: Mapping[str, float] = MappingProxyType({}),
    width: int | None = None,
    remedies: Sequence[Remedy] = (),
) -> str:
    """Return the report of a plan, without a newline at the end. total_steps: those that the run trains. note: on
    them. earlier: as in `render_run`. width: of the table, as in `render_rows`. remedies: for a plan that does not
    fit."""
    return "\n".join(
        [
            f"{plan.layout.describe()}; {plan.layout.gradient_accumulation_steps} micro-batches a step, "
            f"{_describe_samples(plan)}",
            f"{plan.layout.world_size} x {hardware.name}, {plan.memory_limit / GIB:.1f} GiB usable on each, "
            f"{config.precision.value}, zero_stage={config.zero_stage}, "
            f"offload_optimizer={config.offload_optimizer.value}, "
            f"activation_checkpoint_interval={config.activation_checkpoint_interval} "
            f"({config.activation_checkpoint_mode.value})",
            "",
            *render_table(plan, width),
            "",
            *render_step(plan, hardware),
            *render_run(plan, total_steps, hardware.price_per_hour, earlier),
            *([note] if note else []),
            f"on disk: {render_disk(plan.checkpoint, config)}",
            "",
            *render_verdict(plan, config, remedies),
        ]
    )


def _describe_samples(plan: Plan) -> str:
    if plan.tokens_per_sample == plan.longest_sample:
        return f"{plan.longest_sample} tokens a sample"
    return f"{plan.tokens_per_sample} tokens a sample on average, memory for the longest, of {plan.longest_sample}"


def list_figures(plan: Plan) -> dict[str, Any]:
    """Return the plan as values, by stage, to compare runs with. Bytes and seconds."""
    stages = {
        f"stage{stage.stage_id}": {
            "layers": stage.layers,
            "parameters": stage.num_parameters,
            "memory": {**asdict(stage.memory), "peak": stage.memory.peak},
            "forward_seconds": stage.forward_seconds,
            "backward_seconds": stage.backward_seconds,
        }
        for stage in plan.stages
    }
    run = {
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "bubble": plan.idle,
        "imbalance": plan.imbalance,
        "memory_limit": plan.memory_limit,
    }
    return {"layout": plan.layout.describe(), **run, **stages}


def render_table(plan: Plan, width: int | None = None) -> list[str]:
    """Return the lines of the table of stages, in GiB and TFLOP, and its notes. width: as in `render_rows`."""
    rows = [_row(stage) for stage in plan.stages]
    notes = [
        "memory in GiB on one GPU; loss and recompute never at once; step: the optimizer step's own, "
        "when activations are gone"
    ]
    if plan.has_estimates:
        notes.append(
            "activations are estimated from matrix sizes where a layer chooses by its data (experts) "
            "and cannot be traced"
        )
    return [*render_rows(COLUMNS, rows, width), *notes]


def _row(stage: StagePlan) -> tuple[str, ...]:
    memory = stage.memory
    kinds = (
        memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.recomputation, memory.loss,
        memory.buffers, memory.step, memory.peak,
    )  # fmt: skip
    sent = sum(chunk.boundary_bytes for chunk in stage.chunks)
    boundary = f"{sent / 2**20:.1f} MiB" if sent else "-"
    return (
        str(stage.stage_id),
        stage.layers,
        render_count(stage.num_parameters),
        f"{stage.forward_flops / 1e9:.2f}+{stage.backward_flops / 1e9:.2f}",
        *(f"{size / GIB:.2f}" for size in kinds),
        boundary,
    )


def render_step(plan: Plan, hardware: Machine) -> list[str]:
    """Return lines on a step: the pipeline's bubble, what its time is made of, and tokens per second."""
    num_ranks = min(plan.layout.world_size, hardware.cards_per_node)
    return [
        f"bubble {plan.bubble:.1%} = {plan.schedule.bubble_formula}; stages uneven by {plan.imbalance:.1%}; "
        f"a stage waits {plan.idle:.1%} of the pipeline's time",
        f"step {render_seconds(plan.step_seconds)} = pipeline {render_seconds(plan.pipeline_seconds)} "
        f"+ gradients and weights between replicas {render_seconds(plan.reduce_seconds)} "
        f"+ optimizer {render_seconds(plan.optimizer_seconds)}",
        *_render_sums(plan),
        *_render_sequences(plan, hardware),
        *_render_experts(plan),
        f"{plan.tokens_per_second:,.0f} tokens/s with samples of {plan.tokens_per_sample} tokens, "
        f"{plan.tokens_per_second / plan.layout.world_size:,.0f} per GPU; "
        f"MFU {plan.mfu:.1%}; while computing, a GPU is assumed to reach {hardware.efficiency:.0%} of its peak",
        f"host memory {plan.host_bytes / GIB:,.0f} GiB a node of {num_ranks} rank{'s' * (num_ranks > 1)}, "
        f"of {plan.host_limit / GIB:,.0f}",
    ]


def _render_sums(plan: Plan) -> list[str]:
    size = plan.layout.tensor_parallel_size
    return (
        [f"the {size} ranks that share layers sum activations for {_share_of_sums(plan):.1%} of a step"]
        if size > 1
        else []
    )


def _render_experts(plan: Plan) -> list[str]:
    size, sent = plan.layout.topology.num_expert_shares, plan.sent_in_passes.get(EXPERTS, 0)
    return [f"the {size} ranks that divide experts each send {sent / GIB:.2f} GiB of rows a step"] if size > 1 else []


def _render_sequences(plan: Plan, hardware: Machine) -> list[str]:
    """The bytes that ranks that share sequences send, by mode, and the time that the mode adds to a micro-batch."""
    if not plan.sequence_modes:
        return []
    links = {
        f"within a node ({hardware.intra_node_bandwidth:g} GB/s)": "seconds_within",
        f"between nodes ({hardware.inter_node_bandwidth:g} GB/s)": "seconds_between",
    }
    described = [
        f"{mode.mode}{' (this run)' * mode.is_chosen} {mode.sent_bytes / GIB:.2f} GiB, adding "
        f"{' or '.join(f'{render_seconds(getattr(mode, name))} {link}' for link, name in links.items())}"
        for mode in plan.sequence_modes
    ]
    ranks = f"the {plan.layout.context_parallel_size} ranks that share sequences each send a micro-batch"
    lines = [f"{ranks}: {'; '.join(described)}"]
    if len(plan.sequence_modes) > 1:
        faster = [
            f"{min(plan.sequence_modes, key=lambda mode: getattr(mode, name)).mode} {link.split(' (')[0]}"
            for link, name in links.items()
        ]
        lines.append(f"the faster context_parallel_mode: {', '.join(faster)}")
    return lines


def _share_of_sums(plan: Plan) -> float:
    return plan.layout.gradient_accumulation_steps * max(stage.sum_seconds for stage in plan.stages) / plan.step_seconds


def render_run(
    plan: Plan,
    total_steps: int | None,
    price_per_hour: float | None = None,
    earlier: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Return a line on the whole run: steps, tokens, time, and its price where that of a GPU is known; says so where
    `total_steps` is not known. earlier: the seconds of each pass over the data before training, by its name."""
    if total_steps is None:
        billion = _render_price(plan, 1e9 / plan.tokens_per_second, price_per_hour)
        unknown = "whole run: not known; give max_steps, or a train_file, with a tokenizer where its samples are packed"
        return ["; ".join([unknown, *(f"1B tokens cost {price}" for price in billion)])]
    seconds = total_steps * plan.step_seconds + sum(earlier.values())
    parts = " and ".join(f"{render_seconds(each)} {name}" for name, each in earlier.items())
    bound = "at most" if plan.tokens_per_sample == plan.longest_sample else "about"
    line = (
        f"whole run: {total_steps:,} steps, {bound} {render_count(total_steps * plan.tokens_per_step)} tokens, "
        f"{render_seconds(seconds)}{f' ({parts} before training)' * bool(earlier)}"
    )
    return [", ".join([line, *_render_price(plan, seconds, price_per_hour)])]


def _render_price(plan: Plan, seconds: float, price_per_hour: float | None) -> list[str]:
    if price_per_hour is None:
        return []
    return [f"{render_cost(plan.price_seconds(seconds, price_per_hour))} at {price_per_hour:g} per GPU and hour"]


def render_verdict(plan: Plan, config: RunConfig, remedies: Sequence[Remedy] = ()) -> list[str]:
    """Return lines that say whether the plan fits, what limits it, and what to change. remedies: what would make it
    fit."""
    fullest = plan.fullest
    memory, stage = fullest.memory, fullest.stage_id
    moment = _name_moment(memory)
    used = f"stage {stage} needs {memory.peak / GIB:.1f} of {plan.memory_limit / GIB:.1f} GiB, {moment}"
    lines = []
    if plan.missing_memory > 0:
        lines.append(
            f"DOES NOT FIT: {used}, {plan.missing_memory / GIB:.1f} GiB too much; most of it is {largest_kind(fullest)}"
        )
    if plan.missing_host_memory > 0:
        lines.append(
            f"DOES NOT FIT the host: a node needs {plan.host_bytes / GIB:,.0f} GiB, "
            f"{plan.missing_host_memory / GIB:,.0f} too much; more nodes share it"
        )
    if plan.fits:
        lines.append(f"FITS: {used}, {-plan.missing_memory / GIB:.1f} GiB to spare")
        lines.append(_speed_advice(plan, config))
    elif remedies:
        lines.append(f"would fit with {describe_remedies(remedies)}")
    else:
        lines.append(f"change: {'; '.join(_memory_advice(plan, config))}; or let plan=search look")
    return lines


def _name_moment(memory: Memory) -> str:
    if memory.backward_peak >= memory.peak:
        return "in the backward pass"
    return "in the teacher's pass" if memory.first_pass > memory.step else "at the optimizer step"


def largest_kind(stage: StagePlan) -> str:
    """Return the name of the largest kind of memory at the stage's peak."""
    memory = stage.memory
    kinds = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "buffers": memory.buffers,
    }
    if memory.backward_peak >= memory.peak:
        kinds |= {
            "activations": memory.activations,
            "recomputed activations": memory.recomputation,
            "logits and loss": memory.loss,
        }
    elif memory.first_pass > memory.step:
        kinds |= {"the teacher's pass": memory.first_pass}
    else:
        kinds |= {"the optimizer step's copies of gradients": memory.step}
    return max(kinds, key=lambda kind: kinds[kind])


def _memory_advice(plan: Plan, config: RunConfig) -> list[str]:
    """Changes that give the memory that is missing, and take none that is."""
    if plan.missing_memory <= 0:
        offloads = {
            "offload_optimizer=none": config.offload_optimizer is not Offload.none,
            "activation_offload=false": config.activation_offload,
            "offload_parameters=none": config.offload_parameters is not Offload.none,
        }
        return [*(key for key, is_given in offloads.items() if is_given), "fewer ranks on each node"]
    advice = _gpu_advice(plan, config)
    if config.shards_weights and config.offload_parameters is Offload.none and plan.has_host_room("weights"):
        advice.append("offload_parameters=cpu")
    if config.offload_optimizer is Offload.none and not config.shards_weights and plan.has_host_room("optimizer"):
        advice.append("offload_optimizer=cpu")
    return [*advice, "more num_stages"]


def _gpu_advice(plan: Plan, config: RunConfig) -> list[str]:
    advice = []
    if (config.activation_checkpoint_interval, config.activation_checkpoint_mode) != (1, CheckpointMode.grouped):
        advice.append("activation_checkpoint_interval=1 activation_checkpoint_mode=grouped")
    if plan.layout.micro_batch_size > 1:
        advice.append("a smaller micro_batch_size")
    if plan.layout.num_stages == 1 and plan.layout.dp_size > 1 and not config.shards_weights:
        advice.append("zero_stage=3")
    if plan.layout.num_stages > 1 and plan.layout.dp_size == 1 and config.offload_optimizer is Offload.none:
        advice.append("twice the world_size, so that replicas share the optimizer")
    return advice


def _speed_advice(plan: Plan, config: RunConfig) -> str:
    """The largest cost in time apart from the work itself, and what reduces it."""
    step = plan.step_seconds
    waiting = plan.idle * plan.pipeline_seconds / step
    uneven = plan.imbalance / (1 + plan.imbalance) * plan.pipeline_seconds / step
    also = "" if plan.layout.num_chunks > 1 else ", schedule=interleaved"
    computing = sum(plan.busy_seconds)
    again = plan.layout.gradient_accumulation_steps * sum(stage.recomputed_seconds for stage in plan.stages)
    recomputed = again / computing
    optimizer, exchange, sums = plan.optimizer_seconds / step, plan.reduce_seconds / step, _share_of_sums(plan)
    excess = plan.layout.gradient_accumulation_steps * max(stage.excess_seconds for stage in plan.stages) / step
    losses = [
        (
            again / (len(plan.stages) * step),
            f"recomputation takes {recomputed:.0%} of the work; {_RECOMPUTE_LESS[config.activation_checkpoint_mode]}, "
            "where activations fit",
        ),
        (
            waiting - uneven,
            f"waiting takes {waiting:.0%} of a step; more micro-batches (a larger global_batch_size){also} or "
            "fewer num_stages lessen it",
        ),
        (uneven, f"uneven stages take {uneven:.0%} of a step; another partition_method or num_stages lessens it"),
        (
            optimizer,
            f"the optimizer takes {optimizer:.0%} of a step; a larger global_batch_size, or more replicas, lessens it",
        ),
        (
            sums,
            f"the ranks that share layers sum activations for {sums:.0%} of a step; "
            "a smaller tensor_parallel_size lessens it",
        ),
        (
            exchange,
            f"replicas exchange gradients for {exchange:.0%} of a step; a larger global_batch_size lessens it",
        ),
        (
            excess,
            f"FlashAttention-2's kernels, torch's only ones for packed rows and rings, take {excess:.0%} of a step "
            "longer than the GPU's fastest; flash_kernels=fa3 (on H100 and H200, with its package), or "
            "data.packing=false without a ring, saves it",
        ),
    ]
    return f"what limits speed: {max(losses, key=lambda loss: loss[0])[1]}"
