"""Times layers of each kind, forward and backward over a micro-batch, an optimizer step, and an exchange between ranks.

FLOPs over a peak do not describe a CPU: its rate depends on shapes and dtype, and its ranks share caches and the
bandwidth of one memory. So all ranks of a process group measure together, each with a few layers of random weights. B
micro-batch, T sequence, D hidden.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from batch import Targets
from data.collator import shift_labels
from models.adapters.adapter import Adapter
from models.adapters.build import build_adapter
from models.adapters.freeze import choose_trained
from models.architecture.lookup import build_layers
from models.architecture.widths import find_input_width
from models.heads.table import find_head
from models.layers.layer import Layer
from models.losses.cross_entropy import build_loss
from training.config.precision import DTYPES
from training.config.schema import Precision, RunConfig
from training.cost_terms.optimizer_step import count_update_bytes
from training.costs.cost import LayerCost
from training.costs.hardware import GB, Machine
from training.distributed.topology import Layout
from training.engine.gradient_sums import add_gradient

CHAIN = 4  # layers that run one after the other, so that weights and activations leave the caches as they do in a stage
ROUNDS = 5
UPDATED, REDUCED = 2**23, 2**22  # elements


@dataclass(frozen=True)
class Task:
    """The work that the ranks measure. config: of the run; its `max_seq_length` is the length of the rows.

    kinds: indices of layers that cost the same, as many as are to run. attention: the kernel. updated: elements of an
    optimizer step. time_budget: seconds per kind of layer; two rounds run even if they take longer.
    """

    config: RunConfig
    architecture: PretrainedConfig
    attention: str
    kinds: list[list[int]]
    micro_batch_size: int
    exchanges_hidden: bool  # stages do; replicas reduce gradients
    sums_gradients: bool  # of several micro-batches
    updated: int = UPDATED
    time_budget: float = float("inf")


@dataclass(frozen=True)
class LayerTimes:
    """The measurements of one rank. pass_seconds: of a micro-batch through one layer, forward and backward, by kind.
    Bandwidths are in bytes/s; that between ranks is None for a single rank."""

    pass_seconds: list[tuple[float, float]]
    memory_bandwidth: float
    exchange_bandwidth: float | None


def list_kinds(costs: Sequence[LayerCost]) -> list[list[int]]:
    """Return the indices of the layers of each kind, which are those that cost the same."""
    indices: dict[LayerCost, list[int]] = {}
    for index, cost in enumerate(costs):
        indices.setdefault(cost, []).append(index)
    return list(indices.values())


def build_task(
    config: RunConfig,
    architecture: PretrainedConfig,
    layout: Layout,
    kinds: Sequence[Sequence[int]],
    chain: int = CHAIN,
) -> Task:
    """Return the task of timing a run's layers. kinds: from `list_kinds`. chain: at most so many layers of a kind run
    one after the other."""
    return Task(
        config=config,
        architecture=architecture,
        attention=architecture._attn_implementation,
        kinds=[list(indices[:chain]) for indices in kinds],
        micro_batch_size=layout.micro_batch_size,
        exchanges_hidden=layout.num_stages > 1,
        sums_gradients=layout.gradient_accumulation_steps > 1,
    )


def measure(task: Task) -> LayerTimes:
    """Measure the task on this rank. All ranks of the default process group call it; the random state is unchanged."""
    dtype = DTYPES[task.config.precision]
    architecture = copy.deepcopy(task.architecture)
    architecture._attn_implementation = task.attention  # which a config that is sent to another process loses
    task = replace(task, architecture=architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LayerTimes(
            pass_seconds=[_time_kind(task, indices, dtype) for indices in task.kinds],
            memory_bandwidth=count_update_bytes(8, Precision.fp32) * task.updated / _time_update(task.updated),
            exchange_bandwidth=_measure_exchange(task, dtype) if dist.get_world_size() > 1 else None,
        )


def apply_times(
    seen: Sequence[LayerTimes],
    costs: Sequence[LayerCost],
    hardware: Machine,
    stated: set[str],
    *,
    tokens: int,
    oversubscription: float = 1.0,
) -> tuple[list[LayerCost], Machine]:
    """Return `costs` with the measured seconds of the layers, and `hardware` with the measured bandwidths.

    seen: by each rank. stated: fields of `hardware` that stay. tokens: of a micro-batch. oversubscription: ranks of the
    run per core that was measured; times grow by this factor.
    """
    timed = list(costs)
    for kind, indices in enumerate(list_kinds(costs)):
        forward, backward = (
            statistics.mean(rank.pass_seconds[kind][way] for rank in seen) * oversubscription / tokens for way in (0, 1)
        )
        for index in indices:
            timed[index] = replace(costs[index], work=replace(costs[index].work, pass_seconds=(forward, backward)))
    measured: dict[str, Any] = {
        "memory_bandwidth": statistics.mean(rank.memory_bandwidth for rank in seen) / oversubscription / GB
    }
    if seen[0].exchange_bandwidth is not None:
        exchanged = seen[0].exchange_bandwidth / oversubscription / GB
        measured |= {"intra_node_bandwidth": exchanged, "inter_node_bandwidth": exchanged}
    return timed, replace(hardware, **{name: value for name, value in measured.items() if name not in stated})


def _sum_scores(outputs: tuple[torch.Tensor, ...], targets: Targets) -> torch.Tensor:
    hidden_states, weight, *_ = outputs
    last = hidden_states[:, -1].float()
    return (last @ weight.float().T).sum() if weight.is_floating_point() else last.sum()  # without a head no matrix


def _time_kind(task: Task, indices: Sequence[int], dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of a micro-batch through one layer, forward and backward, including what the engine does with
    the gradients."""
    layers = build_layers(task.architecture)
    adapter = build_adapter(
        task.config.adapter, layers, seed=task.config.seed, base_name=task.config.model_name_or_path
    )
    built = partial(_build, dtype=dtype, adapter=adapter, freeze=task.config.freeze)
    chain = [(layers[index], built(layers[index], index)) for index in indices]
    shape = (task.micro_batch_size, task.config.max_seq_length)
    input_ids = torch.randint(task.architecture.vocab_size, shape)  # [B, T]
    position_ids = torch.arange(shape[1]).repeat(shape[0], 1)  # [B, T]
    segment_ids = torch.ones(shape, dtype=torch.int32)  # [B, T]
    loss = _sum_scores if find_head(task.architecture) is not None else build_loss(task.architecture)
    blocks = layers[indices[0]].num_blocks
    targets = Targets.find(shift_labels(input_ids).repeat(blocks, 1), torch.tensor(float(input_ids.numel())))
    is_first, is_last = indices[0] == 0, indices[-1] == len(layers) - 1
    trained = [parameter for _, module in chain for parameter in module.parameters() if parameter.requires_grad]
    if dtype is torch.bfloat16:
        _sum_in_fp32(trained)
    width = find_input_width(layers, indices[0], task.architecture.hidden_size)
    hidden_states = torch.randn(blocks * shape[0], shape[1], width, dtype=dtype)  # [B, T, D]
    grad_outputs = torch.randn_like(hidden_states) * 1e-3
    seconds: list[tuple[float, float]] = []
    # Two micro-batches are in flight, as in most stages, so that memory is not always the one that was freed last.
    waiting = []
    wanted = 1 + ROUNDS  # the first warms up
    while len(seconds) < wanted:
        received = input_ids if is_first else hidden_states.clone().requires_grad_()
        values: Any = (received, position_ids.clone(), segment_ids.clone())
        if not chain[0][0].owns_weights and chain[0][0].is_further:  # a lookup of further tokens
            values = (*values, input_ids)
        dist.barrier()
        start = time.perf_counter()
        for layer, module in chain:
            values = layer.forward_fn(module, values) if layer.forward_fn else module(values)
        waiting.append(loss(values, targets) if is_last else values[0])
        middle = time.perf_counter()
        if len(waiting) < 2:
            continue
        output = waiting.pop(0)
        if output.shape != grad_outputs.shape and not is_last:
            grad_outputs = torch.randn_like(output) * 1e-3
        if output.requires_grad:
            output.backward(None if is_last else grad_outputs)
        del output
        seconds.append((middle - start, time.perf_counter() - middle))
        for parameter in () if task.sums_gradients else trained:
            parameter.grad = None
        if len(seconds) == 1:
            wanted = 1 + _count_rounds(sum(seconds[0]), task.time_budget)
    forward, backward = (statistics.median(way) / len(chain) for way in zip(*seconds[1:]))
    return forward, backward


def _count_rounds(seconds: float, time_budget: float) -> int:
    """Return how many rounds of `seconds` fit into `time_budget`, the same on all ranks: at least 1, at most ROUNDS."""
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return max(1, min(ROUNDS, int(min(ROUNDS, time_budget / longest.item()))))


def _sum_in_fp32(trained: Sequence[nn.Parameter]) -> None:
    """Sum gradients of bf16 parameters in fp32, as the engine does; in fp32 autograd adds them itself."""
    sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained}

    def add(parameter: nn.Parameter) -> None:
        add_gradient(parameter, sums[parameter])

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(add)


def _build(
    layer: Layer, index: int, *, dtype: torch.dtype, adapter: Adapter | None, freeze: Sequence[str]
) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = layer.module_class(*layer.args)
        for parameter in module.parameters():  # what a class leaves empty may hold numbers that a CPU is slow with
            nn.init.normal_(parameter, std=0.02)
        choose_trained(module, index, layer, adapter, freeze)
    finally:
        torch.set_default_dtype(default)
    return module


def _time_update(updated: int) -> float:
    """Return the seconds of an optimizer step as `count_update_bytes` counts it, over `updated` elements in fp32."""
    parameter, gradient = torch.randn(updated), torch.randn(updated)
    master = nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([master], fused=True)

    master.grad = gradient

    def update() -> None:
        gradient.norm()
        gradient.mul_(0.5)
        optimizer.step()
        parameter.copy_(master.detach())

    return _time(update)


def _measure_exchange(task: Task, dtype: torch.dtype) -> float:
    """Return the bytes/s of a stage's output sent to the next stage, or of gradients on a ring of replicas."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if not task.exchanges_hidden:
        gradients = torch.zeros(min(REDUCED, task.updated), dtype=dtype)
        return 2 * (size - 1) / size * gradients.nbytes / _time(lambda: dist.all_reduce(gradients))
    hidden_states = torch.zeros(
        task.micro_batch_size, task.config.max_seq_length, task.architecture.hidden_size, dtype=dtype
    )

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
