"""The plan as text: a table with a row per stage, the time of a step, and a verdict with the limit and what to
change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from console import pluralize
from extension import list_plans
from formatting import render_cost, render_count, render_rows, render_seconds
from training.config.schema import CheckpointMode
from training.costs.hardware import GIB
from training.disk_space import render_disk
from training.distributed.topology import EXPERTS
from training.objectives.registry import find_auxiliary
from training.planner.advice import Variant
from training.planner.plan import Plan, StagePlan, compute_plan

COLUMNS = (
    "stage", "layers", "params", "GFLOP/token", "weights", "gradients", "optimizer", "activations", "recompute", "loss",
    "buffers", "step", "peak", "boundary",
)  # fmt: skip


def render_plan(
    plan: Plan,
    total_steps: int | None,
    *,
    note: str = "",
    earlier: Mapping[str, float] = MappingProxyType({}),
    passthrough: int = 0,
    width: int | None = None,
    advice: Sequence[Variant] = (),
    longest: int | None = None,
) -> str:
    """Return the report of a plan, without a newline at the end. total_steps: those that the run trains. note: on
    them. earlier: as in `render_run`. passthrough: bytes that the run copies unchanged. width: of the tables, as in
    `render_rows`. advice, longest: as in `render_verdict`."""
    config, hardware = plan.run.config, plan.run.hardware
    return "\n".join(
        [
            f"{plan.layout.describe()}; {_describe_micro_batches(plan)} a step, {_describe_samples(plan)}",
            f"{plan.layout.world_size} x {hardware.name}, {plan.memory_limit / GIB:.1f} GiB usable on each, "
            f"{config.precision.value}, zero_stage={config.zero_stage}, "
            f"offload_optimizer={config.offload_optimizer.value}, "
            f"activation_checkpoint_interval={config.activation_checkpoint_interval} "
            f"({config.activation_checkpoint_mode.value})",
            "",
            *render_table(plan, width),
            "",
            *_render_step(plan),
            *render_run(plan, total_steps, earlier),
            *([note] if note else []),
            f"on disk: {render_disk(replace(plan.checkpoint, passthrough=passthrough), config, total_steps)}",
            "",
            *render_verdict(plan, advice, width, longest),
        ]
    )


def _describe_micro_batches(plan: Plan) -> str:
    number = plan.layout.gradient_accumulation_steps
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"


def _describe_samples(plan: Plan) -> str:
    length = plan.run.tokens_per_sample
    if length == plan.longest_sample:
        return f"{length} tokens a sample"
    return f"{length} tokens a sample on average, memory for the longest, of {plan.longest_sample}"


def list_figures(plan: Plan) -> dict[str, Any]:
    """Return the plan as values, by stage, to compare runs with. Bytes and seconds."""
    names = ("step_seconds", "tokens_per_second", "mfu", "imbalance", "memory_limit")
    stages = {
        f"stage{stage.stage_id}": {
            "layers": stage.layers,
            "parameters": stage.num_parameters,
            "memory": {**asdict(stage.memory), "peak": stage.memory.peak},
            "forward_seconds": stage.cost.forward_seconds,
            "backward_seconds": stage.cost.backward_seconds,
        }
        for stage in plan.stages
    }
    run = {name: getattr(plan, name) for name in names}
    return {"layout": plan.layout.describe(), "bubble": plan.idle, **run, **stages}


def render_table(plan: Plan, width: int | None = None) -> list[str]:
    """Return the lines of the table of stages, in GiB and TFLOP, and its notes. width: as in `render_rows`."""
    notes = [
        "memory in GiB on one GPU; loss and recompute never at once; step: the optimizer step's own, "
        "when activations are gone"
    ]
    if any(cost.is_estimated for cost in plan.costs):
        notes.append(
            "activations are estimated from matrix sizes where a layer chooses by its data (experts) "
            "and cannot be traced"
        )
    return [*render_rows(COLUMNS, list(map(_row, plan.stages)), width), *notes]


def _row(stage: StagePlan) -> tuple[str, ...]:
    memory, cost = stage.memory, stage.cost
    boundary = sum(chunk.boundary_bytes for chunk in stage.chunks)
    kinds = (
        memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.recomputation, memory.loss,
        memory.buffers, memory.step, memory.peak,
    )  # fmt: skip
    return (
        str(stage.stage_id),
        stage.layers,
        render_count(stage.num_parameters),
        f"{cost.forward_flops / 1e9:.2f}+{cost.backward_flops / 1e9:.2f}",
        *(f"{size / GIB:.2f}" for size in kinds),
        f"{boundary / 2**20:.1f} MiB" if boundary else "-",
    )


def _render_step(plan: Plan) -> list[str]:
    """Return lines on a step: the pipeline's bubble, what its time is made of, and tokens per second."""
    layout, hardware = plan.layout, plan.run.hardware
    num_ranks, tensor = min(layout.world_size, hardware.cards_per_node), layout.tensor_parallel_size
    experts, rows = layout.topology.num_expert_shares, plan.sent_in_passes.get(EXPERTS, 0)
    return [
        f"bubble {plan.schedule.bubble_share:.1%} = {plan.schedule.bubble_formula}; "
        f"stages uneven by {plan.imbalance:.1%}; a stage waits {plan.idle:.1%} of the pipeline's time",
        f"step {render_seconds(plan.step_seconds)} = pipeline {render_seconds(plan.pipeline_seconds)} "
        f"+ gradients and weights between replicas {render_seconds(plan.reduce_seconds)} "
        f"+ optimizer {render_seconds(plan.optimizer_seconds)}",
        *[f"the {tensor} ranks that share layers sum activations for {_share_of_sums(plan):.1%} of a step"]
        * (tensor > 1),
        *_render_sequences(plan),
        *_render_selections(plan),
        *[f"the {experts} ranks that divide experts each send {rows / GIB:.2f} GiB of rows a step"] * (experts > 1),
        f"{plan.tokens_per_second:,.0f} tokens/s with samples of {plan.run.tokens_per_sample} tokens, "
        f"{plan.tokens_per_second / layout.world_size:,.0f} per GPU; "
        f"MFU {plan.mfu:.1%}; while computing, a GPU is assumed to reach {hardware.efficiency:.0%} of its peak",
        f"host memory {plan.host_bytes / GIB:,.0f} GiB a node of {num_ranks} rank{'s' * (num_ranks > 1)}, "
        f"of {hardware.host_memory:,.0f}",
    ]


def _render_selections(plan: Plan) -> list[str]:
    """The time of a step in which keys are selected, and the bytes of a layer's selection."""
    made = [cost.selection for cost in plan.costs if cost.selection is not None]
    if not made:
        return []
    share = plan.layout.gradient_accumulation_steps * max(stage.cost.selection_seconds for stage in plan.stages)
    names = ("score_bytes", "selected_bytes", "mask_bytes")
    scores, selected, masks = (max(getattr(cost, name) for cost in made) / GIB for name in names)
    return [
        f"indexers select keys for {share / plan.step_seconds:.1%} of a step; a layer takes {scores:.2f} GiB for the "
        f"scores of a chunk of queries, {selected:.2f} for what it selects of a micro-batch, {masks:.2f} for its masks"
    ]


def _render_sequences(plan: Plan) -> list[str]:
    """The bytes that ranks that share sequences send, by mode, and the time that the mode adds to a micro-batch."""
    modes, hardware = plan.sequence_modes, plan.run.hardware
    if not modes:
        return []
    described = [
        f"{mode.mode}{' (this run)' * mode.is_chosen} {mode.sent_bytes / GIB:.2f} GiB, adding "
        f"{render_seconds(mode.seconds_within)} within a node ({hardware.intra_node_bandwidth:g} GB/s) or "
        f"{render_seconds(mode.seconds_between)} between nodes ({hardware.inter_node_bandwidth:g} GB/s)"
        for mode in modes
    ]
    within, between = min(modes, key=lambda m: m.seconds_within), min(modes, key=lambda m: m.seconds_between)
    return [
        f"the {plan.layout.context_parallel_size} ranks that share sequences each send a micro-batch: "
        f"{'; '.join(described)}",
        *[f"the faster context_parallel_mode: {within.mode} within a node, {between.mode} between nodes"]
        * (len(modes) > 1),
    ]


def _share_of_sums(plan: Plan) -> float:
    sending = max(stage.cost.sending_seconds for stage in plan.stages)
    return plan.layout.gradient_accumulation_steps * sending / plan.step_seconds


def render_run(plan: Plan, total_steps: int | None, earlier: Mapping[str, float] = MappingProxyType({})) -> list[str]:
    """Return a line on the whole run: steps, tokens, time, and its price where that of a GPU is known; says so where
    `total_steps` is not known. earlier: the seconds of each pass over the data before training, by its name."""
    rate = f" at {plan.run.hardware.price_per_hour:g} per GPU and hour" if plan.run.hardware.price_per_hour else ""
    if total_steps is None:
        price = plan.price(1e9 / plan.tokens_per_second)
        unknown = "whole run: not known; give max_steps, or a train_file, with a tokenizer where its samples are packed"
        return [unknown if price is None else f"{unknown}; 1B tokens cost {render_cost(price)}{rate}"]
    seconds = total_steps * plan.step_seconds + sum(earlier.values())
    price = plan.price(seconds)
    parts = " and ".join(f"{render_seconds(each)} {name}" for name, each in earlier.items())
    bound = "at most" if plan.run.tokens_per_sample == plan.longest_sample else "about"
    line = (
        f"whole run: {pluralize(total_steps, 'step')}, {bound} "
        f"{render_count(total_steps * plan.tokens_per_step)} tokens, {render_seconds(seconds)}"
        f"{f' ({parts} before training)' * bool(earlier)}"
    )
    return [line if price is None else f"{line}, {render_cost(price)}{rate}"]


def render_verdict(
    plan: Plan, advice: Sequence[Variant] = (), width: int | None = None, longest: int | None = None
) -> list[str]:
    """Return lines that say whether the plan fits, what limits it, and what to change. advice: what changes bring, or,
    where it does not fit, those that make it fit; empty where none does, or where that is not known. longest: the
    largest `max_seq_length` that fits; None where none does, or where that is not known."""
    fullest = plan.fullest
    memory, stage = fullest.memory, fullest.stage_id
    moment, kind = describe_peak(plan)
    used = f"stage {stage} needs {memory.peak / GIB:.1f} of {plan.memory_limit / GIB:.1f} GiB, {moment}"
    if plan.fits:
        lines = [f"FITS: {used}, {-plan.missing_memory / GIB:.1f} GiB to spare", _name_limit(plan)]
        heading = "what one change brings, as predicted:"
    else:
        lines = []
        if plan.missing_memory > 0:
            lines.append(f"DOES NOT FIT: {used}, {plan.missing_memory / GIB:.1f} GiB too much; most of it is {kind}")
        if plan.missing_host_memory > 0:
            lines.append(
                f"DOES NOT FIT the host: a node needs {plan.host_bytes / GIB:,.0f} GiB, "
                f"{plan.missing_host_memory / GIB:,.0f} too much; more nodes share it"
            )
        heading = "it would fit with one of these, as predicted:"
        if not advice:
            others = "".join(f"; or let plan={name} look" for name in list_plans())
            lines.append(f"change: more num_stages or a larger world_size{others}")
    if longest is not None:
        lines.append(f"longest sequences that fit, all else as it is: max_seq_length={longest}")
    return [*lines, *(["", heading, "", *render_variants(plan, advice, width)] if advice else [])]


def render_variants(plan: Plan, variants: Sequence[Variant], width: int | None = None) -> list[str]:
    """Return the lines of a table: the run as it is, and each variant of it. width: as in `render_rows`."""
    rows = [
        (
            f"{overrides}{'' if each.fits else ' (does not fit)'}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.fullest.memory.peak / GIB:.1f}",
            f"{each.host_bytes / GIB:,.0f}",
        )
        for overrides, each in (("this run", plan), *variants)
    ]
    return render_rows(("", "tokens/s", "peak GiB", "host GiB"), rows, width)


def describe_peak(plan: Plan) -> tuple[str, str]:
    """Return the moment in which the fullest GPU is so, and the largest kind of memory then."""
    memory, auxiliary = plan.fullest.memory, find_auxiliary(plan.run.config)
    kinds = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "buffers": memory.buffers,
    }
    if memory.backward_peak >= memory.peak:
        moment = "in the backward pass"
        kinds |= {
            "activations": memory.activations,
            "recomputed activations": memory.recomputation,
            "logits and loss": memory.loss,
        }
    elif auxiliary is not None and memory.first_pass > memory.step:
        moment = f"in the {auxiliary.name}'s pass"
        kinds |= {f"the {auxiliary.name}'s pass": memory.first_pass}
    else:
        moment = "at the optimizer step"
        kinds |= {"the optimizer step's copies of gradients": memory.step}
    return moment, max(kinds, key=lambda kind: kinds[kind])


def _time_excess(plan: Plan) -> float:
    """The seconds of a step by which attention exceeds the GPU's fastest kernels, on the stage with most of them."""
    fastest = replace(plan.run, hardware=replace(plan.run.hardware, flash_attention_2=1.0))
    bounds = [*(chunk.first_layer for chunk in plan.chunks), len(plan.costs)]
    pairs = zip(plan.busy_seconds, compute_plan(plan.costs, bounds, fastest).busy_seconds, strict=True)
    return max(seconds - least for seconds, least in pairs)


def _name_limit(plan: Plan) -> str:
    """The largest cost in time apart from the work itself, and what reduces it."""
    step, num_stages, micro_batches = plan.step_seconds, len(plan.stages), plan.layout.gradient_accumulation_steps
    waiting = plan.idle * plan.pipeline_seconds / step
    uneven = plan.imbalance / (1 + plan.imbalance) * plan.pipeline_seconds / step
    again = micro_batches * sum(stage.cost.recomputed_seconds for stage in plan.stages)
    excess = _time_excess(plan) / step
    optimizer, exchange, sums = plan.optimizer_seconds / step, plan.reduce_seconds / step, _share_of_sums(plan)
    less = "activation_checkpoint_mode=selective saves most of it, activation_checkpoint_interval=0 all of it"
    if plan.run.config.activation_checkpoint_mode is CheckpointMode.selective:
        less = "activation_checkpoint_interval=0 saves it"
    also = "" if plan.layout.num_chunks > 1 else ", schedule=interleaved"
    shares = {
        f"recomputation takes {again / sum(plan.busy_seconds):.0%} of the work; {less}, where activations fit": again
        / (num_stages * step),
        f"waiting takes {waiting:.0%} of a step; more micro-batches (a larger global_batch_size){also} or "
        "fewer num_stages lessen it": waiting - uneven,
        f"uneven stages take {uneven:.0%} of a step; another partition_method or num_stages lessens it": uneven,
        f"the optimizer takes {optimizer:.0%} of a step; a larger global_batch_size, or more replicas, "
        "lessens it": optimizer,
        f"the ranks that share layers sum activations for {sums:.0%} of a step; a smaller tensor_parallel_size "
        "lessens it": sums,
        f"replicas exchange gradients for {exchange:.0%} of a step; a larger global_batch_size lessens it": exchange,
        f"FlashAttention-2's kernels, torch's only ones for packed rows and rings, take {excess:.0%} of a step longer "
        "than the GPU's fastest; flash_kernels=fa3 (on H100 and H200, with its package), or data.packing=false without "
        "a ring, saves it": excess,
    }
    return f"what limits speed: {max(shares, key=lambda text: shares[text])}"
