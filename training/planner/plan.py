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
from training.cost_terms.cost_term import Chunk, Memory, PassCost, PlannedRun, Stage, count_distinct, list_stages
from training.costs.cost import LayerCost
from training.costs.hardware import GB, GIB, Machine
from training.costs.links import Sent, compute_sending_seconds, find_bandwidth
from training.costs.simulation import Pass, simulate
from training.disk_space import CheckpointSize, estimate_size
from training.distributed.topology import PIPE, Layout
from training.pipeline.schedule import Schedule
from training.resolution.resolve import ResolvedRun

_simulate = lru_cache(maxsize=64)(simulate)  # a search asks again with keys that change no pass


@dataclass(frozen=True)
class ChunkPlan:
    """Consecutive layers of a stage."""

    first_layer: int  # counted with the embedding
    last_layer: int  # the same, included
    cost: PassCost  # of a micro-batch
    boundary_bytes: int  # to the next chunk and back; 0 where that is on the same rank
    transfer_seconds: float  # to the next chunk, either way


@dataclass(frozen=True)
class StagePlan:
    """One stage."""

    stage_id: int
    chunks: list[ChunkPlan]  # as many as its schedule gives a rank
    num_parameters: int
    memory: Memory
    reduce_seconds: float  # of a step
    optimizer_seconds: float  # of a step

    @property
    def layers(self) -> str:
        """The ranges of layers as text: 0-4, or 0-2+7-9."""
        return "+".join(f"{chunk.first_layer}-{chunk.last_layer}" for chunk in self.chunks)

    @cached_property
    def cost(self) -> PassCost:
        """The cost of a micro-batch through all its chunks."""
        return sum((chunk.cost for chunk in self.chunks), start=PassCost())

    @property
    def pass_seconds(self) -> float:
        """Seconds of both passes of a micro-batch."""
        return self.cost.forward_seconds + self.cost.backward_seconds


@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a run, in bytes and seconds. The step is simulated when it is first asked for: a
    search asks for that of few."""

    run: PlannedRun  # times are for samples of its length
    costs: Sequence[LayerCost]  # of each layer, for one micro-batch
    stages: list[StagePlan]
    sequence_modes: list[ModeCost]  # of the stage that sends most; empty where each rank has whole sequences
    longest_sample: int  # tokens of the samples that memory is for

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def schedule(self) -> Schedule:
        return self.run.schedule

    @cached_property
    def chunks(self) -> list[ChunkPlan]:
        """Those of all stages, in the order of the model."""
        return sorted((chunk for stage in self.stages for chunk in stage.chunks), key=lambda chunk: chunk.first_layer)

    @property
    def transfer_seconds(self) -> tuple[float, ...]:
        """Seconds from each chunk to the next, either way [P x V - 1]."""
        return tuple(chunk.transfer_seconds for chunk in self.chunks[:-1])

    @cached_property
    def passes(self) -> list[Pass]:
        """The passes of the simulated step."""
        forward, backward, deferred = (
            tuple(getattr(chunk.cost, f"{name}_seconds") for chunk in self.chunks)
            for name in ("forward", "backward", "deferred")
        )
        return _simulate(self.schedule, forward, backward, self.transfer_seconds, deferred)

    @cached_property
    def pipeline_seconds(self) -> float:
        return max(each.stop for each in self.passes)

    @property
    def reduce_seconds(self) -> float:
        return max(stage.reduce_seconds for stage in self.stages)

    @property
    def optimizer_seconds(self) -> float:
        return max(stage.optimizer_seconds for stage in self.stages)

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.reduce_seconds + self.optimizer_seconds

    @property
    def busy_seconds(self) -> list[float]:
        """Seconds that each stage computes."""
        return [self.layout.gradient_accumulation_steps * stage.pass_seconds for stage in self.stages]

    @property
    def idle(self) -> float:
        """The share of a stage's time that the simulated step waits, on average, uneven stages counted."""
        return 1 - sum(self.busy_seconds) / (len(self.stages) * self.pipeline_seconds)

    @property
    def imbalance(self) -> float:
        """By how much the slowest stage exceeds the mean."""
        return max(self.busy_seconds) / (sum(self.busy_seconds) / len(self.stages)) - 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all samples, with their padding."""
        return self.layout.global_batch_size * self.run.tokens_per_sample

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def peak_flops(self) -> float:
        """FLOP/s of all ranks."""
        return self.run.hardware.peak_flops[self.run.config.precision.value] * self.layout.world_size

    @property
    def mfu(self) -> float:
        flops = compute_model_flops(self.costs, self.run.config.max_seq_length)
        return flops * self.tokens_per_second / self.peak_flops

    def price(self, seconds: float) -> float | None:
        """Return the price of all GPUs for so many seconds, in the unit of `hardware.price_per_hour`; None without."""
        price_per_hour = self.run.hardware.price_per_hour
        return None if price_per_hour is None else seconds / 3600 * self.layout.world_size * price_per_hour

    def time_forward(self, num_samples: int) -> float:
        """Return the seconds of one forward pass over samples, in the micro-batches of a step: and of those
        of an objective's own making (`Objective.companion`), where its step reads those too."""
        micro_batches = -(-num_samples // (self.layout.micro_batch_size * self.layout.dp_size))
        slowest = max(stage.cost.forward_seconds for stage in self.stages)
        return (micro_batches + self.layout.num_stages - 1) * slowest

    def count(self, kind: str) -> int:
        """Return the sum of a field of `Parameters` over the model; a module that layers share counts once."""
        return count_distinct(kind, self.costs)

    @property
    def checkpoint(self) -> CheckpointSize:
        starts = sum(cost.parameters.starts for cost in self.costs)
        return estimate_size(self.run.config, self.count("whole"), self.count("whole_trained"), starts)

    @property
    def fullest(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.memory.peak)

    @property
    def sent_in_passes(self) -> Sent:
        """Bytes sent in a step by a rank of the stage that sends most."""
        most = max((stage.cost.sent for stage in self.stages), key=lambda sent: sum(sent.values()))
        return Sent({axis: nbytes * self.layout.gradient_accumulation_steps for axis, nbytes in most.items()})

    @property
    def memory_limit(self) -> float:
        """Bytes of a GPU that can be used."""
        return self.run.hardware.usable_bytes

    @property
    def missing_memory(self) -> float:
        """Bytes by which the fullest GPU exceeds its memory; negative when it fits."""
        return self.fullest.memory.peak - self.memory_limit

    @cached_property
    def host_bytes(self) -> int:
        """Bytes of the host's memory on the fullest node; ranks fill the nodes in order."""
        ranks, per_node = range(self.layout.world_size), self.run.hardware.cards_per_node
        needed = [self.stages[self.layout.stage_id(rank)].memory.host for rank in ranks]
        return max(sum(needed[first : first + per_node]) for first in ranks[::per_node])

    @property
    def missing_host_memory(self) -> float:
        return self.host_bytes - self.run.hardware.host_memory * GIB

    @property
    def lack(self) -> float:
        """Bytes by which the run exceeds the memory of a GPU and of a host; 0 when it fits."""
        return max(self.missing_memory, 0) + max(self.missing_host_memory, 0)

    @property
    def fits(self) -> bool:
        return self.missing_memory <= 0 and self.missing_host_memory <= 0


def plan_resolved(
    run: ResolvedRun,
    machine: Machine,
    costs: Sequence[LayerCost] | None = None,
    auxiliary: ResolvedRun | None = None,
) -> Plan:
    """Return the plan of a resolved run on `machine`. costs: of its layers, where they were timed; else as counted.
    auxiliary: a frozen one that is in memory next to it."""
    in_memory = [] if auxiliary is None else list_resolved_stages(auxiliary, machine)
    planned = PlannedRun(run.config, run.layout, run.architecture.vocab_size, machine, in_memory)
    return compute_plan(costs or run.costs, run.bounds, planned)


def list_resolved_stages(run: ResolvedRun, machine: Machine) -> list[Stage]:
    """Return the stages of a resolved run."""
    return list_stages(PlannedRun(run.config, run.layout, run.architecture.vocab_size, machine), run.costs, run.bounds)


def compute_plan(costs: Sequence[LayerCost], bounds: Sequence[int], run: PlannedRun) -> Plan:
    """Return the plan of layers at a layout. costs: of one micro-batch, `run.tokens`. bounds: of P x V chunks."""
    stages = list_stages(run, costs, bounds)
    modes = max(map(compare_modes, stages), key=lambda modes: sum(mode.sent_bytes for mode in modes))
    return Plan(run, costs, list(map(_plan_stage, stages)), modes, run.tokens_per_sample)


def _plan_stage(stage: Stage) -> StagePlan:
    cost, run, chunks = table.sum_step_cost(stage), stage.run, list(map(_plan_chunk, stage.chunks))
    sending = compute_sending_seconds(cost.reduce_sent, run.layout, stage.stage_id, run.hardware)
    if run.config.shards_weights:  # the next layers' weights are gathered while a layer runs
        computing = sum(chunk.cost.forward_seconds + chunk.cost.backward_seconds for chunk in chunks)
        sending = max(0.0, sending - run.layout.gradient_accumulation_steps * computing)
    return StagePlan(
        stage_id=stage.stage_id,
        chunks=chunks,
        num_parameters=stage.num_parameters,
        memory=table.sum_memory(stage),
        reduce_seconds=cost.reduce_seconds + sending,
        optimizer_seconds=cost.optimizer_seconds,
    )


def _plan_chunk(chunk: Chunk) -> ChunkPlan:
    layout, schedule = chunk.run.layout, chunk.run.schedule
    to = schedule.find_stage(min(chunk.number + 1, schedule.last_chunk))
    # The link of two neighbours is named by the first of them; that from the last stage to the first by the last.
    from_stage = to if to == chunk.stage_id - 1 else chunk.stage_id
    link = find_bandwidth(PIPE, layout, from_stage, chunk.run.hardware) * GB
    crossing = 0 if to == chunk.stage_id else chunk.boundary_bytes
    cost = table.sum_pass_cost(chunk)
    return ChunkPlan(chunk.indices.start, chunk.indices.stop - 1, cost, crossing, crossing / 2 / link)


def compute_model_flops(costs: Sequence[LayerCost], seq_length: float) -> float:
    """Return the FLOPs of a token by the convention of MFU (PaLM, 2204.02311, appendix B): 6 N + 6 T x attention width.

    N counts each parameter that a token uses once, the embedding too; attention is counted in full, without the causal
    half, and recomputation is not. A frozen parameter counts 4: its gradient, the third product, is not part of the
    training. Below the first layer that is trained nothing runs backward, so there each counts 2, and attention a
    third.
    """
    counts = [cost.parameters for cost in costs]
    first = next((index for index, each in enumerate(counts) if each.active > each.frozen), len(costs))
    owned = {
        cost.tied_key or index: 2 * each.active if index < first else 6 * each.active - 2 * each.frozen
        for index, (cost, each) in enumerate(zip(costs, counts, strict=True))
    }
    widths = sum((2 if index < first else 6) * cost.work.attention_width for index, cost in enumerate(costs))
    return sum(owned.values()) + seq_length * widths
