"""The plans of published runs: each row becomes a config of this project, and goes through the plan as `plan=true`
does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published_parts.frameworks import (
    adjust_costs,
    adjust_reduction,
    adjust_states,
    count_limit,
    count_measured,
    count_memory,
)
from benchmarks.published_parts.rows import MODEL_TYPES, SCHEDULES, PublishedRun, find_obstacle
from benchmarks.workload import compose_run
from errors import UserError
from models.adapters.options import AdapterName
from models.weights.config_file import parse_config
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import (
    AttnImplementation,
    ContextParallelMode,
    HardwareConfig,
    Precision,
    RunConfig,
    load_hardware,
)
from training.costs.hardware import Machine, complete_hardware
from training.plan_command.run import ModelFolder
from training.planner.plan import Plan, plan_resolved
from training.resolution.counts import LayerCounts
from training.resolution.resolve import ResolvedModel, resolve_layout, resolve_model
from training.resolution.target import Target

# GPUs of a board without a switch: NVIDIA's boards of four have a third of a GPU's links between each two ("HGX H100
# 4-GPU" in developer.nvidia.com/blog, "Introducing NVIDIA HGX H100")
DIRECT = 4
_LEAD, _TAIL = {"gpt2": 2}, 2  # layers before the decoder's, 1 elsewhere (embedding), and after it: norm and head


@dataclass(frozen=True)
class Planned:
    """A published run and its plan. memory_gib: the predicted peak, with what the row's system keeps; limit_gib: what
    its system has room for."""

    run: PublishedRun
    plan: Plan
    memory_gib: float
    limit_gib: float

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.plan.tokens_per_second / self.run.gpus

    @property
    def ratio(self) -> float:
        """Measured over predicted tokens/s."""
        assert self.run.tokens_per_s_per_gpu is not None
        return self.run.tokens_per_s_per_gpu / self.tokens_per_s_per_gpu

    @property
    def memory_ratio(self) -> float:
        """Predicted over measured memory, both of what was measured."""
        assert self.run.memory_gib is not None
        return count_measured(self.run, self.memory_gib) / self.run.memory_gib


def plan_run(run: PublishedRun) -> Planned:
    """Return the plan of a row that `find_obstacle` has nothing against. Raises UserError for what the project
    refuses."""
    machine = _describe_machine(run)
    keys = _describe_keys(run)
    model = _resolve_model(_describe_model(run), tuple(sorted(_shape_keys(run).items())))
    if run.split not in ("", "balanced") and keys.schedule != "zero_bubble":  # here it folds the pipeline
        keys = replace(keys, partition_method=_split(run, len(model.layers)))
    check_together(CheckedConfig(keys))
    resolved = resolve_layout(model, keys, Target(run.gpus, True, machine, fills=False, is_planned=True))
    costs = adjust_costs(run, resolved.costs, machine)
    # Megatron's recomputation, and torch's reentrant one, repeat every product
    costs = [replace(cost, work=replace(cost.work, unrepeated_flops=0.0)) for cost in costs]
    plan = adjust_states(run, plan_resolved(resolved, machine, costs))
    plan = adjust_reduction(run, plan, machine)
    return Planned(run, plan, count_memory(run, plan, costs), count_limit(run, machine))


def _describe_machine(run: PublishedRun) -> Machine:
    hardware = _load_hardware()[run.gpu]
    network = hardware.inter_node_bandwidth if run.network is None else run.network
    assert hardware.peak_flops is not None
    peaks = {**hardware.peak_flops, "bf16": hardware.peak_flops[run.precision]}
    stated = replace(
        hardware,
        cards_per_node=run.gpus_per_node,
        switched=run.gpus_per_node > DIRECT,
        inter_node_bandwidth=network,
        peak_flops=peaks,
        flash_attention_2=hardware.flash_attention_2 if run.attention == "flash2" else 1.0,
    )
    return complete_hardware(stated, _choose_precision(run), run.gpus)


def _choose_precision(run: PublishedRun) -> Precision:
    """fp16 is planned as bf16, whose products take as long and whose weights are as large: here it does not go together
    with tensor parallelism."""
    return Precision.fp32 if run.precision == "fp32" else Precision.bf16


@cache
def _load_hardware() -> dict[str, HardwareConfig]:
    return {hardware.name: hardware for hardware in load_hardware()}


@cache
def _base() -> RunConfig:
    config = compose_run("micro_batch_size=1", "gradient_accumulation_steps=1", "world_size=1", "plan=true")
    assert isinstance(config, RunConfig)
    return config


def _shape_keys(run: PublishedRun) -> dict[str, Any]:
    """The keys that change what layers cost, of one micro-batch."""
    is_ring = run.cp > 1 and run.family == "llama"  # Megatron's context parallelism is a ring
    return {
        "precision": _choose_precision(run),
        "tensor_parallel_size": run.tp,
        "sequence_parallel": bool(run.sequence_parallel),
        "context_parallel_size": run.cp,
        "context_parallel_mode": ContextParallelMode.ring if is_ring else ContextParallelMode.auto,
        "max_seq_length": run.seq,
        "attn_implementation": AttnImplementation.auto
        if run.attention.startswith("flash")
        else AttnImplementation.eager,
        "fuses": run.kernels != "eager",
        "task": run.task,
    }


def _describe_keys(run: PublishedRun) -> RunConfig:
    keys = _shape_keys(run)
    del keys["fuses"]
    adapter = replace(_base().adapter, name=AdapterName.lora) if keys.pop("task") == "lora" else _base().adapter
    schedule = SCHEDULES[run.schedule]
    pp = run.pp or 1
    limit = (2 if run.schedule == "zb_2p" else 1) * pp if schedule == "zero_bubble" else None
    return replace(
        _base(),
        **keys,
        zero_stage=max(run.zero, 1),  # without it: `adjust_states`
        adapter=adapter,
        world_size=run.gpus,
        num_stages=pp,
        micro_batch_size=run.micro_batch,
        gradient_accumulation_steps=None,
        global_batch_size=run.global_batch,
        schedule=schedule,
        schedule_memory_limit=limit,
        virtual_stages_per_rank=run.vp if schedule == "interleaved" else 2,
        activation_checkpoint_interval=int(run.recompute == "full"),
        partition_method="balanced",
    )


def _describe_model(run: PublishedRun) -> tuple[tuple[str, Any], ...]:
    """The fields of config.json."""
    fields = {
        "model_type": MODEL_TYPES[run.family],
        "vocab_size": run.vocab,
        "hidden_size": run.hidden,
        "intermediate_size": run.ffn,
        "num_hidden_layers": run.layers,
        "num_attention_heads": run.heads,
        "num_key_value_heads": run.kv_heads,
        "max_position_embeddings": run.seq,
        "tie_word_embeddings": bool(run.tied),
    }
    if run.family == "gpt":
        fields = {
            "model_type": "gpt2",
            "vocab_size": run.vocab,
            "n_embd": run.hidden,
            "n_inner": run.ffn,
            "n_layer": run.layers,
            "n_head": run.heads,
            "n_positions": run.seq,
            "activation_function": "gelu",
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": bool(run.tied),
        }
    return tuple(fields.items())


@cache
def _resolve_model(fields: tuple[tuple[str, Any], ...], shape: tuple[tuple[str, Any], ...]) -> ResolvedModel:
    """The resolved model, shared by all rows that differ in their layouts alone. The fused kernels of other systems
    move the bytes of compiled ones; `frameworks.py` has what they keep."""
    folder = Path("published")
    keys = dict(shape)
    fuses = keys.pop("fuses")
    adapter = replace(_base().adapter, name=AdapterName.lora) if keys.pop("task") == "lora" else _base().adapter
    sizes = keys["tensor_parallel_size"] * keys["context_parallel_size"]
    config = replace(_base(), **keys, adapter=adapter, world_size=sizes)
    described = ModelFolder(folder, parse_config(dict(fields), folder))
    model = resolve_model(config, described, Target(sizes, True, is_planned=True))
    counted = replace(config, compile=fuses)
    counts = LayerCounts(counted, model.architecture, model.adapter, model.parts, lambda: model.layers)
    return replace(model, counts=counts)


def _split(run: PublishedRun, num_layers: int) -> Any:
    """The layers of each chunk, in the order of the model: decoder layers as evenly as their source says, embedding
    with the first, norm and head with the last; filled: the last has what is left; uniform: layers of all kinds, the
    first chunks with one more; by_cost: as `_split_by_cost`."""
    assert run.layers is not None and run.pp is not None
    chunks = run.pp * (run.vp or 1 if run.schedule == "interleaved" else 1)
    if run.split == "uniform":
        each, rest = divmod(num_layers, chunks)
        return [each + (number < rest) for number in range(chunks)]
    if run.split == "by_cost":
        return _split_by_cost(run, num_layers, chunks)
    lead = num_layers - run.layers - _TAIL
    extra = 2 if run.split == "embedding_counts" else 0  # embedding and head count as a layer each
    each, rest = divmod(run.layers + extra, chunks)
    if rest and run.split != "filled":
        return "balanced"
    each += rest > 0
    sizes = [each] * (chunks - 1) + [run.layers + extra - each * (chunks - 1)]
    sizes[0] += lead - extra // 2
    sizes[-1] += _TAIL - extra // 2
    return sizes


def _split_by_cost(run: PublishedRun, num_layers: int, chunks: int) -> list[int]:
    """As github.com/huggingface/nanotron (models/base.py, `build_model`): a chunk ends with the layer after which the
    sum of costs, those of matrix products, exceeds its even share."""
    assert run.layers is not None and run.hidden is not None and run.ffn is not None and run.vocab is not None
    layer = 4 * run.hidden**2 + 3 * run.ffn * run.hidden
    costs = [0] * (num_layers - run.layers - _TAIL) + [layer] * run.layers + [0, run.vocab * run.hidden]
    sizes, total = [0] * chunks, 0
    number = 0
    for cost in costs:
        sizes[number] += 1
        total += cost
        number += total > sum(costs) * (number + 1) / chunks
    return sizes


def plan_all(runs: Sequence[PublishedRun]) -> tuple[list[Planned], dict[str, list[PublishedRun]]]:
    """Return the plans of all rows that can be planned, and the others by the reason."""
    planned: list[Planned] = []
    refused: dict[str, list[PublishedRun]] = {}
    for run in runs:
        reason = find_obstacle(run)
        if reason is None:
            try:
                planned.append(plan_run(run))
                continue
            except UserError as error:
                reason = f"refused: {error}"
        refused.setdefault(reason, []).append(run)
    return planned, refused
