"""Times layers of each kind, forward and backward over a micro-batch, an optimizer step, and an exchange between ranks.

FLOPs over a peak do not describe a CPU: its rate depends on shapes and dtype, and its ranks share caches and the
bandwidth of one memory. So all ranks of a process group measure together, each with a few layers of random weights:
those of a run, or, for a plan, as many processes as ranks will share the machine. B micro-batch, T sequence, D hidden.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from batch import Targets
from data.collator import shift_labels
from models.adapters.build import build_adapter
from models.adapters.freeze import choose_trained
from models.architecture.lookup import build_layers
from models.architecture.widths import find_input_width
from models.heads.table import find_head
from models.layers.decoder import PipelineDecoderLayer
from models.losses.cross_entropy import build_loss
from training.config.precision import DTYPES
from training.config.schema import Precision, RunConfig
from training.cost_terms.cost_term import count_distinct
from training.cost_terms.optimizer_step import count_update_bytes
from training.costs.cost import LayerCost
from training.costs.hardware import GB, Machine, list_stated
from training.distributed.topology import Layout
from training.engine.gradient_sums import add_gradient
from training.resolution.resolve import ResolvedRun

ROUNDS = 5
REDUCED = 2**22  # elements of an exchange between replicas
TIMED, FEWEST = 2**23, 2**14  # elements of the layers of a kind that are timed, and of the optimizer step


@dataclass(frozen=True)
class Task:
    """The work that the ranks measure."""

    config: RunConfig  # of the run; its `max_seq_length` is the length of the rows
    architecture: PretrainedConfig
    attention: str  # the kernel, which a config that is sent to another process loses
    layout: Layout
    # Indices of layers that cost the same, as many as run one after the other, so that weights and activations leave
    # the caches as they do in a stage
    kinds: list[list[int]]
    updated: int  # elements of an optimizer step
    time_budget: float  # seconds per kind of layer; two rounds run even if they take longer


@dataclass(frozen=True)
class LayerTimes:
    """The measurements of one rank."""

    pass_seconds: list[tuple[float, float]]  # of a micro-batch through one layer, forward and backward, by kind
    memory_bandwidth: float  # bytes/s
    exchange_bandwidth: float | None  # bytes/s; None for a single rank


def list_kinds(costs: Sequence[LayerCost]) -> list[list[int]]:
    """Return the indices of the layers of each kind, which are those that cost the same."""
    indices: dict[LayerCost, list[int]] = {}
    for index, cost in enumerate(costs):
        indices.setdefault(cost, []).append(index)
    return list(indices.values())


def build_task(run: ResolvedRun, seq_length: int, time_budget: float = float("inf")) -> Task:
    """Return the task of timing a run's layers with rows of `seq_length` tokens. time_budget: seconds for all kinds."""
    sizes = [max(1, cost.parameters.held) for cost in run.costs]
    kinds = [indices[: max(1, TIMED // sizes[indices[0]])] for indices in list_kinds(run.costs)]
    trained = count_distinct("whole_trained", run.costs) // run.layout.world_size
    return Task(
        config=replace(run.config, max_seq_length=seq_length),
        architecture=run.architecture,
        attention=run.architecture._attn_implementation,
        layout=run.layout,
        kinds=kinds,
        updated=max(FEWEST, min(TIMED, trained)),
        time_budget=time_budget / len(kinds),
    )


def measure(task: Task) -> LayerTimes:
    """Measure the task on this rank. All ranks of the default process group call it; the random state is unchanged."""
    task.architecture._attn_implementation = task.attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LayerTimes(
            pass_seconds=[_time_kind(task, indices) for indices in task.kinds],
            memory_bandwidth=count_update_bytes(8, Precision.fp32) * task.updated / _time_update(task.updated),
            exchange_bandwidth=_measure_exchange(task) if dist.get_world_size() > 1 else None,
        )


def profile_layers(run: ResolvedRun, machine: Machine) -> tuple[list[LayerCost], Machine]:
    """Return the costs of the run's layers with the seconds that they take here, and `machine` with the bandwidths that
    were measured. Takes 10 to 20 seconds, and the memory of a few layers per process."""
    available, world_size = sorted(os.sched_getaffinity(0)), run.layout.world_size
    size = min(world_size, len(available))
    share = len(available) // size
    cores = [available[rank * share : (rank + 1) * share] for rank in range(size)]
    # Threads of torch do not survive a fork; the server has none
    context, task = multiprocessing.get_context("forkserver"), build_task(run, run.config.max_seq_length)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as pool:
        seen = list(pool.map(partial(_measure_at_once, task, cores, f"{folder}/store"), range(size)))
    return apply_times(seen, run, machine, oversubscription=max(1.0, world_size / len(available)))


def _measure_at_once(task: Task, cores: Sequence[Sequence[int]], store: str, rank: int) -> LayerTimes:
    """Measure in one of as many processes as `cores` has entries, all at the same time."""
    os.sched_setaffinity(0, cores[rank])
    torch.set_num_threads(len(cores[rank]))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(cores))
    seen = measure(task)
    dist.barrier()
    dist.destroy_process_group()
    return seen


def apply_times(
    seen: Sequence[LayerTimes], run: ResolvedRun, machine: Machine, oversubscription: float = 1.0
) -> tuple[list[LayerCost], Machine]:
    """Return the costs of the run's layers with the measured seconds, and `machine` with the measured bandwidths, but
    for those that the config states.

    seen: by each rank. oversubscription: ranks of the run per core that was measured; times grow by this factor.
    """
    timed, tokens = list(run.costs), run.layout.micro_batch_size * run.config.max_seq_length
    for kind, indices in enumerate(list_kinds(run.costs)):
        forward, backward = (
            statistics.mean(rank.pass_seconds[kind][way] for rank in seen) * oversubscription / tokens for way in (0, 1)
        )
        for index in indices:
            timed[index] = replace(timed[index], work=replace(timed[index].work, pass_seconds=(forward, backward)))
    bandwidths = {"memory_bandwidth": statistics.mean(rank.memory_bandwidth for rank in seen)}
    if exchanged := seen[0].exchange_bandwidth:
        bandwidths |= dict.fromkeys(("intra_node_bandwidth", "inter_node_bandwidth"), exchanged)
    stated = list_stated(run.config.hardware)
    measured: dict[str, Any] = {
        name: rate / oversubscription / GB for name, rate in bandwidths.items() if name not in stated
    }
    return timed, replace(machine, **measured)


def _time_kind(task: Task, indices: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of a micro-batch through one layer, forward and backward, including what the engine does with
    the gradients."""
    run_forward, trained = _build_chain(task, indices)
    seconds, wanted = list[tuple[float, float]](), 1 + ROUNDS  # the first warms up
    # Two micro-batches are in flight, as in most stages, so that memory is not always the one that was freed last.
    output = run_forward()
    gradient = None if output.ndim == 0 else torch.randn_like(output) * 1e-3
    while len(seconds) < wanted:
        dist.barrier()
        start = time.perf_counter()
        following = run_forward()
        middle = time.perf_counter()
        if output.requires_grad:
            output.backward(gradient)
        output = following
        seconds.append((middle - start, time.perf_counter() - middle))
        if task.layout.gradient_accumulation_steps == 1:
            for parameter in trained:
                parameter.grad = None
        if len(seconds) == 1:
            wanted = 1 + _count_rounds(sum(seconds[0]), task.time_budget)
    forward, backward = (statistics.median(way) / len(indices) for way in zip(*seconds[1:]))
    return forward, backward


def _build_chain(task: Task, indices: Sequence[int]) -> tuple[Callable[[], torch.Tensor], list[nn.Parameter]]:
    """Return the forward pass of a micro-batch through layers, and what is trained of them. It returns the loss where
    the last of them is the model's."""
    config, architecture, dtype = task.config, task.architecture, DTYPES[task.config.precision]
    layers = build_layers(architecture)
    adapter = build_adapter(config.adapter, layers, seed=config.seed, base_name=config.model_name_or_path)
    chain = []
    for index in indices:
        layer, module = layers[index], layers[index].module_class(*layers[index].args).to(dtype)
        for parameter in module.parameters():  # what a class leaves empty may hold numbers that a CPU is slow with
            nn.init.normal_(parameter, std=0.02)
        choose_trained(module, index, layer, adapter, config.freeze)
        chain.append((layer, module.to(dtype)))
    trained = [parameter for _, module in chain for parameter in module.parameters() if parameter.requires_grad]
    if dtype is torch.bfloat16:  # the engine sums these gradients in fp32; autograd adds others itself
        for parameter in trained:
            total = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.register_post_accumulate_grad_hook(partial(add_gradient, total=total))
    first, shape = layers[indices[0]], (task.layout.micro_batch_size, config.max_seq_length)
    input_ids = torch.randint(architecture.vocab_size, shape)  # [B, T]
    position_ids = torch.arange(shape[1]).repeat(shape[0], 1)  # [B, T]
    segment_ids = torch.ones(shape, dtype=torch.int32)  # [B, T]
    targets = Targets.find(shift_labels(input_ids).repeat(first.num_blocks, 1), torch.tensor(float(input_ids.numel())))
    loss = _sum_scores if find_head(architecture) is not None else build_loss(architecture)
    width = find_input_width(layers, indices[0], architecture.hidden_size)
    hidden_states = torch.randn(first.num_blocks * shape[0], shape[1], width, dtype=dtype)  # [B, T, D]
    looks_up_further = not first.owns_weights and first.is_further  # takes the tokens, too

    def run_forward() -> torch.Tensor:
        received = input_ids if indices[0] == 0 else hidden_states.clone().requires_grad_()
        values: Any = (received, position_ids.clone(), segment_ids.clone(), *[input_ids] * looks_up_further)
        for layer, module in chain:
            if isinstance(module, PipelineDecoderLayer):
                values = module.complete_inputs(values)
            values = layer.forward_fn(module, values) if layer.forward_fn else module(values)
        output: torch.Tensor = loss(values, targets) if indices[-1] == len(layers) - 1 else values[0]
        return output

    return run_forward, trained


def _sum_scores(outputs: tuple[torch.Tensor, ...], targets: Targets) -> torch.Tensor:
    hidden_states, weight, *_ = outputs
    last = hidden_states[:, -1].float()
    return (last @ weight.float().T).sum() if weight.is_floating_point() else last.sum()  # without a head no matrix


def _count_rounds(seconds: float, time_budget: float) -> int:
    """Return how many rounds of `seconds` fit into `time_budget`, the same on all ranks: at least 1, at most ROUNDS."""
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return max(1, int(min(ROUNDS, time_budget / longest.item())))


def _time_update(updated: int) -> float:
    """Return the seconds of an optimizer step as `count_update_bytes` counts it, over `updated` elements in fp32."""
    parameter, master = torch.randn(updated), nn.Parameter(torch.randn(updated))
    master.grad = torch.randn(updated)
    optimizer = torch.optim.AdamW([master], fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_([master], 0.5)
        optimizer.step()
        parameter.copy_(master.detach())

    return _time(update)


def _measure_exchange(task: Task) -> float:
    """Return the bytes/s of a stage's output sent to the next stage, or of gradients on a ring of replicas."""
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[task.config.precision]
    if task.layout.num_stages == 1:
        gradients = torch.zeros(min(REDUCED, task.updated), dtype=dtype)
        return 2 * (size - 1) / size * gradients.nbytes / _time(lambda: dist.all_reduce(gradients))
    rows = task.layout.micro_batch_size * task.config.max_seq_length
    hidden_states = torch.zeros(rows, task.architecture.hidden_size, dtype=dtype)

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank < 2:
                dist.send(hidden_states, 1 - rank) if rank == sender else dist.recv(hidden_states, 1 - rank)

    return 2 * hidden_states.nbytes / _time(there_and_back)


def _time(work: Callable[[], object]) -> float:
    """Return the seconds of `work` while all processes do it at once: the median of ROUNDS."""
    seconds = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
