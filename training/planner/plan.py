"""The plan of a run: the memory of each stage and the time of a step. Pure functions of layer costs, a layout and a
machine.

The memory and time of a stage are sums over the table of cost terms (`training/cost_terms/`); here stages are combined
into a step. Sources and assumptions: docs/plan.md. P stages, V chunks of layers a stage, M micro-batches of one replica
in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from training.cost_terms import table
from training.cost_terms.context_parallel import ModeCost, compare_modes
from training.cost_terms.cost_term import Chunk, Memory, PlannedRun, Stage, list_stages
from training.costs.cost import LayerCost
from training.costs.hardware import GB, GIB, Machine
from training.costs.links import Sent, compute_sending_seconds, find_bandwidth
from training.costs.simulation import Pass, simulate
from training.distributed.topology import PIPE, Layout
from training.pipeline.schedule import Schedule
from training.pipeline.schedules import build_schedule
from training.planner.disk import CheckpointSize, estimate_size
from training.resolution.resolve import ResolvedRun


@dataclass(frozen=True)
class ChunkPlan:
    """Consecutive layers of a stage. FLOPs of a token; bytes and seconds of a micro-batch.

    first_layer, last_layer: counted with the embedding, both included. backward_flops: with what is recomputed.
    sum_seconds: of the two passes, those in which the ranks that share layers sum activations. boundary_bytes: to the
    next chunk, forward and backward together; sent: by a rank in both passes, to those that share its layers or
    sequences; transfer_seconds: either way. deferred_seconds: of the backward pass, those that the schedule can put
    off; recomputed_seconds: those in which layers run forward again. excess_seconds: of both passes, those that the
    GPU's fastest attention kernels would save. Nothing is sent to a chunk of the same rank.
    """

    first_layer: int
    last_layer: int
    forward_flops: float
    backward_flops: float
    forward_seconds: float
    backward_seconds: float
    deferred_seconds: float
    recomputed_seconds: float
    excess_seconds: float
    sum_seconds: float
    boundary_bytes: int
    sent: Sent
    transfer_seconds: float


@dataclass(frozen=True)
class StagePlan:
    """One stage. chunks: as many as its schedule gives a rank. Figures of passes are those of all its chunks together;
    reduce_seconds and optimizer_seconds are of a step."""

    stage_id: int
    chunks: list[ChunkPlan]
    num_parameters: int
    memory: Memory
    reduce_seconds: float
    optimizer_seconds: float

    @property
    def layers(self) -> str:
        """The ranges of layers as text: 0-4, or 0-2+7-9."""
        return "+".join(f"{chunk.first_layer}-{chunk.last_layer}" for chunk in self.chunks)

    @property
    def forward_flops(self) -> float:
        return sum(chunk.forward_flops for chunk in self.chunks)

    @property
    def backward_flops(self) -> float:
        return sum(chunk.backward_flops for chunk in self.chunks)

    @property
    def forward_seconds(self) -> float:
        return sum(chunk.forward_seconds for chunk in self.chunks)

    @property
    def backward_seconds(self) -> float:
        return sum(chunk.backward_seconds for chunk in self.chunks)

    @property
    def recomputed_seconds(self) -> float:
        return sum(chunk.recomputed_seconds for chunk in self.chunks)

    @property
    def excess_seconds(self) -> float:
        return sum(chunk.excess_seconds for chunk in self.chunks)

    @property
    def sum_seconds(self) -> float:
        return sum(chunk.sum_seconds for chunk in self.chunks)


@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a run, in bytes and seconds.

    tokens_per_step: of samples, with their padding, that are as long as those that times are for. longest_sample: the
    tokens of the samples that memory is for. sequence_modes: of the stage that sends most; none where each rank has
    whole sequences. model_flops: of a token, as `compute_model_flops` counts them. peak_flops: FLOP/s of all ranks. The
    step is simulated when it is first asked for: a search asks for that of few.
    """

    layout: Layout
    stages: list[StagePlan]
    reduce_seconds: float
    optimizer_seconds: float
    tokens_per_step: int
    longest_sample: int
    model_flops: float
    peak_flops: float
    cards_per_node: int
    memory_limit: float  # bytes of a GPU that can be used
    host_limit: float
    has_estimates: bool
    checkpoint: CheckpointSize
    sequence_modes: list[ModeCost]

    @property
    def schedule(self) -> Schedule:
        return build_schedule(self.layout)

    @cached_property
    def chunks(self) -> list[ChunkPlan]:
        """Those of all stages, in the order of the model."""
        return sorted((chunk for stage in self.stages for chunk in stage.chunks), key=lambda chunk: chunk.first_layer)

    @property
    def transfer_seconds(self) -> list[float]:
        """Seconds from each chunk to the next, either way [P x V - 1]."""
        return [chunk.transfer_seconds for chunk in self.chunks[:-1]]

    @cached_property
    def passes(self) -> list[Pass]:
        """The passes of the simulated step."""
        forward, backward, deferred = (
            tuple(getattr(chunk, name) for chunk in self.chunks)
            for name in ("forward_seconds", "backward_seconds", "deferred_seconds")
        )
        return _simulate(self.schedule, forward, backward, tuple(self.transfer_seconds), deferred)

    @cached_property
    def pipeline_seconds(self) -> float:
        return max(each.stop for each in self.passes)

    @property
    def busy_seconds(self) -> list[float]:
        """Seconds that each stage computes."""
        num_micro_batches = self.layout.gradient_accumulation_steps
        return [num_micro_batches * (stage.forward_seconds + stage.backward_seconds) for stage in self.stages]

    @property
    def idle(self) -> float:
        """The share of a stage's time that the simulated step waits, on average, uneven stages counted."""
        return 1 - sum(self.busy_seconds) / (len(self.stages) * self.pipeline_seconds)

    @property
    def imbalance(self) -> float:
        """By how much the slowest stage exceeds the mean."""
        return max(self.busy_seconds) / (sum(self.busy_seconds) / len(self.stages)) - 1

    @property
    def bubble(self) -> float:
        """The share of a step that a stage would wait if all were even."""
        return self.schedule.bubble_share

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.reduce_seconds + self.optimizer_seconds

    @property
    def tokens_per_sample(self) -> int:
        return self.tokens_per_step // self.layout.global_batch_size

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    def compute_cost(self, num_tokens: float, price_per_hour: float) -> float:
        """Return the price of training on so many tokens, in the unit of `price_per_hour`, which is that of a GPU."""
        return self.price_seconds(num_tokens / self.tokens_per_second, price_per_hour)

    def price_seconds(self, seconds: float, price_per_hour: float) -> float:
        """Return the price of all GPUs for so many seconds, in the unit of `price_per_hour`, which is that of a GPU."""
        return seconds / 3600 * self.layout.world_size * price_per_hour

    def time_forward(self, num_samples: int) -> float:
        """Return the seconds of one forward pass over samples, in the micro-batches of a step: with the mismatched
        answers of each, where an objective's step reads those too."""
        micro_batches = -(-num_samples // (self.layout.micro_batch_size * self.layout.dp_size))
        slowest = max(stage.forward_seconds for stage in self.stages)
        return (micro_batches + self.layout.num_stages - 1) * slowest

    @property
    def mfu(self) -> float:
        return self.model_flops * self.tokens_per_second / self.peak_flops

    @property
    def fullest(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.memory.peak)

    @property
    def sent_in_passes(self) -> Sent:
        """Bytes sent in a step by a rank of the stage that sends most."""
        sent_by_stage = [sum((chunk.sent for chunk in stage.chunks), start=Sent()) for stage in self.stages]
        most = max(sent_by_stage, key=lambda sent: sum(sent.values()))
        return Sent({axis: nbytes * self.layout.gradient_accumulation_steps for axis, nbytes in most.items()})

    @property
    def missing_memory(self) -> float:
        """Bytes by which the fullest GPU exceeds its memory; negative when it fits."""
        return self.fullest.memory.peak - self.memory_limit

    @cached_property
    def host_bytes(self) -> int:
        """Bytes of the host's memory on the fullest node."""
        return compute_host_bytes([stage.memory.host for stage in self.stages], self.layout, self.cards_per_node)

    @property
    def missing_host_memory(self) -> float:
        return self.host_bytes - self.host_limit

    def has_host_room(self, kind: str) -> bool:
        """Return whether every host has room for a kind of memory (a field of `Memory`) that its GPUs have now, twice:
        tensors on their way are there too, and pinned memory takes the next power of two."""
        needed = [stage.memory.host + 2 * getattr(stage.memory, kind) for stage in self.stages]
        return compute_host_bytes(needed, self.layout, self.cards_per_node) <= self.host_limit

    @property
    def fits(self) -> bool:
        return self.missing_memory <= 0 and self.missing_host_memory <= 0


def plan_resolved(
    run: ResolvedRun,
    machine: Machine,
    costs: Sequence[LayerCost] | None = None,
    teacher: ResolvedRun | None = None,
) -> Plan:
    """Return the plan of a resolved run on `machine`. costs: of its layers, where they were timed; else as counted.
    teacher: one that is in memory next to it."""
    planned = PlannedRun(
        run.config, run.layout, run.architecture.vocab_size, machine, list_resolved_stages(teacher, machine)
    )
    return compute_plan(costs or run.costs, run.bounds, planned)


def list_resolved_stages(run: ResolvedRun | None, machine: Machine) -> list[Stage]:
    """Return the stages of a resolved run; none for None."""
    if run is None:
        return []
    return list_stages(PlannedRun(run.config, run.layout, run.architecture.vocab_size, machine), run.costs, run.bounds)


def compute_plan(costs: Sequence[LayerCost], bounds: Sequence[int], run: PlannedRun) -> Plan:
    """Return the plan of layers at a layout. costs: of one micro-batch, `run.tokens`. bounds: of P x V chunks."""
    layout, hardware = run.layout, run.hardware
    held_by = list_stages(run, costs, bounds)
    stages = [_plan_stage(stage) for stage in held_by]
    return Plan(
        layout=layout,
        stages=stages,
        reduce_seconds=max(stage.reduce_seconds for stage in stages),
        optimizer_seconds=max(stage.optimizer_seconds for stage in stages),
        tokens_per_step=layout.global_batch_size * run.tokens_per_sample,
        longest_sample=run.tokens_per_sample,
        model_flops=compute_model_flops(costs, run.config.max_seq_length),
        peak_flops=hardware.peak_flops[run.config.precision.value] * layout.world_size,
        cards_per_node=hardware.cards_per_node,
        memory_limit=hardware.usable_bytes,
        host_limit=hardware.host_memory * GIB,
        has_estimates=any(cost.is_estimated for cost in costs),
        checkpoint=estimate_size(
            run.config,
            sum(cost.parameters.whole for cost in list_owners(costs)),
            sum(cost.parameters.whole_trained for cost in list_owners(costs)),
            sum(cost.parameters.starts for cost in costs),
        ),
        sequence_modes=max(map(compare_modes, held_by), key=lambda modes: sum(mode.sent_bytes for mode in modes)),
    )


@lru_cache(maxsize=64)  # a search asks again with keys that change no pass, such as where the optimizer is
def _simulate(
    schedule: Schedule,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfers: tuple[float, ...],
    deferred: tuple[float, ...],
) -> list[Pass]:
    return simulate(schedule, forward, backward, transfers, deferred)


def _plan_stage(stage: Stage) -> StagePlan:
    cost, run = table.sum_step_cost(stage), stage.run
    chunks = [_plan_chunk(chunk) for chunk in stage.chunks]
    sending = compute_sending_seconds(cost.reduce_sent, run.layout, stage.stage_id, run.hardware)
    if run.config.shards_weights:  # the next layers' weights are gathered while a layer runs
        each = sum(chunk.forward_seconds + chunk.backward_seconds for chunk in chunks)
        sending = max(0.0, sending - run.layout.gradient_accumulation_steps * each)
    return StagePlan(
        stage_id=stage.stage_id,
        chunks=chunks,
        num_parameters=stage.num_parameters,
        memory=table.sum_memory(stage),
        reduce_seconds=cost.reduce_seconds + sending,
        optimizer_seconds=cost.optimizer_seconds,
    )


def _plan_chunk(chunk: Chunk) -> ChunkPlan:
    cost = table.sum_pass_cost(chunk)
    layout, hardware = chunk.run.layout, chunk.run.hardware
    schedule = build_schedule(layout)
    to = schedule.find_stage(min(chunk.number + 1, schedule.last_chunk))
    is_sent = to != chunk.stage_id
    # The link of two neighbours is named by the first of them; that from the last stage to the first by the last.
    link = find_bandwidth(PIPE, layout, to if to == chunk.stage_id - 1 else chunk.stage_id, hardware) * GB
    return ChunkPlan(
        first_layer=chunk.indices.start,
        last_layer=chunk.indices.stop - 1,
        forward_flops=cost.forward_flops,
        backward_flops=cost.backward_flops,
        forward_seconds=cost.forward_seconds + cost.forward_sending,
        backward_seconds=cost.backward_seconds + cost.backward_sending,
        deferred_seconds=cost.deferred_seconds,
        recomputed_seconds=cost.recomputed_seconds,
        excess_seconds=cost.excess_seconds,
        sum_seconds=cost.forward_sending + cost.backward_sending,
        sent=cost.sent,
        boundary_bytes=cost.boundary_bytes if is_sent else 0,
        transfer_seconds=cost.boundary_bytes / 2 / link if is_sent else 0.0,
    )


def compute_model_flops(costs: Sequence[LayerCost], seq_length: float) -> float:
    """Return the FLOPs of a token by the convention of MFU (PaLM, 2204.02311, appendix B): 6 N + 6 T x attention width.

    N counts each parameter that a token uses once, the embedding too; attention is counted in full, without the causal
    half, and recomputation is not. A frozen parameter counts 4: its gradient, the third product, is not part of the
    training. Below the first layer that is trained nothing runs backward, so there each counts 2, and attention a
    third.
    """
    counts = [cost.parameters for cost in costs]
    first = next((index for index, each in enumerate(counts) if each.active > each.frozen), len(costs))
    factors = {index: 2 * cost.parameters.active for index, cost in enumerate(costs[:first])}
    factors |= {index: 6 * each.active - 2 * each.frozen for index, each in enumerate(counts) if index >= first}
    owned = {cost.tied_key or index: factors[index] for index, cost in enumerate(costs)}
    widths = sum((2 if index < first else 6) * cost.work.attention_width for index, cost in enumerate(costs))
    return sum(owned.values()) + seq_length * widths


def list_owners(costs: Sequence[LayerCost]) -> list[LayerCost]:
    """Return the costs of all layers, but of those that share weights only one."""
    return list({cost.tied_key or index: cost for index, cost in enumerate(costs)}.values())


def compute_host_bytes(bytes_of_stage: Sequence[int], layout: Layout, cards_per_node: int) -> int:
    """Return the host memory of the fullest node in bytes; ranks fill the nodes in order."""
    nodes = [
        range(first, min(first + cards_per_node, layout.world_size))
        for first in range(0, layout.world_size, cards_per_node)
    ]
    return max(sum(bytes_of_stage[layout.stage_id(rank)] for rank in ranks) for ranks in nodes)
