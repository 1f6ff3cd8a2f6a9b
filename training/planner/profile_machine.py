"""This machine, tried out for a plan: layers of each kind run for real, in as many processes at once as ranks will
share it.

FLOPs over a peak tell little of a CPU: its rate depends on shapes and dtype, norms and softmax take their part, and the
ranks share caches and the bandwidth of one memory. So up to CHAIN layers of each kind are built with random weights and
timed, a micro-batch forward and back, beside an optimizer step and an exchange between two ranks. B micro-batch, T
sequence, D hidden.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from data.collator import shift_labels
from models.adapters import Adapter
from models.architecture import build_layers
from models.layer import Layer
from models.losses.cross_entropy import build_loss
from training.config.precision import DTYPES
from training.config.schema import OptimizerName, Precision, RunConfig
from training.engine.gradient_sums import add_gradient
from training.pipeline.trainable import build_adapter, choose_trained
from training.planner.cost import LayerCost
from training.planner.hardware import Machine
from training.planner.levers.lever import PlannedRun
from training.planner.levers.optimizer_step import count_update_bytes

CHAIN = 4  # layers that run one after the other, so that weights and activations leave the caches as they do in a stage
ROUNDS = 5
UPDATED, REDUCED = 2**23, 2**22  # elements


@dataclass(frozen=True)
class MachineProfile:
    """What one process saw. pass_seconds: of a micro-batch through one layer, forward and backward, by kind. Bandwidths
    in bytes/s; that between ranks is None where there is one."""

    pass_seconds: list[tuple[float, float]]
    memory_bandwidth: float
    exchange_bandwidth: float | None


@dataclass(frozen=True)
class _Task:
    config: RunConfig
    architecture: PretrainedConfig
    attention: str
    kinds: list[list[int]]  # indices of layers that cost the same
    micro_batch_size: int
    exchanges_hidden: bool  # stages do; replicas reduce gradients
    sums_gradients: bool  # of several micro-batches
    cores: list[list[int]]  # of each process


def profile_layers(
    run: PlannedRun, architecture: PretrainedConfig, costs: Sequence[LayerCost]
) -> tuple[list[LayerCost], Machine]:
    """`costs` with the seconds that layers take here, and `run.hardware` with the bandwidths that were seen.

    costs: as `count_layers` returns them, equal layers the same object. Takes 10 to 20 seconds, and memory of CHAIN
    layers a process.
    """
    config, layout = run.config, run.layout
    indices: dict[int, list[int]] = {}
    for index, cost in enumerate(costs):
        indices.setdefault(id(cost), []).append(index)
    kinds = list(indices.values())
    cores = sorted(os.sched_getaffinity(0))
    size = min(layout.world_size, len(cores))
    share = len(cores) // size
    task = _Task(
        config, architecture, architecture._attn_implementation, [of_kind[:CHAIN] for of_kind in kinds],
        layout.micro_batch_size, layout.num_stages > 1, layout.gradient_accumulation_steps > 1,
        [cores[rank * share : (rank + 1) * share] for rank in range(size)],
    )  # fmt: skip
    seen = _run_at_once(task, size)
    turns = max(1.0, layout.world_size / len(cores))  # more ranks than cores take turns
    tokens = layout.micro_batch_size * config.max_seq_length
    timed = list(costs)
    for kind, of_kind in enumerate(kinds):
        forward, backward = (
            statistics.mean(rank.pass_seconds[kind][way] for rank in seen) * turns / tokens for way in (0, 1)
        )
        for index in of_kind:
            timed[index] = replace(costs[index], pass_seconds=(forward, backward))
    measured: dict[str, Any] = {
        "memory_bandwidth": statistics.mean(rank.memory_bandwidth for rank in seen) / turns / 1e9
    }
    if seen[0].exchange_bandwidth is not None:
        exchanged = seen[0].exchange_bandwidth / turns / 1e9
        measured |= {"intra_node_bandwidth": exchanged, "inter_node_bandwidth": exchanged}
    stated = {name for name, value in vars(config.hardware).items() if value is not None}
    return timed, replace(run.hardware, **{name: value for name, value in measured.items() if name not in stated})


def _run_at_once(task: _Task, size: int) -> list[MachineProfile]:
    # threads of torch do not survive a fork; the server has none
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(size):
            end, other_end = context.Pipe(duplex=False)
            shared = {"store": f"{folder}/store", "task": task, "answer": other_end}
            process = context.Process(target=_work, args=(rank, size), kwargs=shared, daemon=True)
            process.start()
            other_end.close()  # so that a process that dies ends the wait for its answer
            processes.append(process)
            ends.append(end)
        seen = [end.recv() for end in ends]
        for process in processes:
            process.join()
    return seen


def _work(rank: int, size: int, *, store: str, task: _Task, answer: Connection) -> None:
    os.sched_setaffinity(0, task.cores[rank])
    torch.set_num_threads(len(task.cores[rank]))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    dtype = DTYPES[task.config.precision]
    answer.send(
        MachineProfile(
            pass_seconds=[_time_kind(task, indices, dtype) for indices in task.kinds],
            memory_bandwidth=count_update_bytes(OptimizerName.adamw, Precision.fp32) * UPDATED / _time_update(),
            exchange_bandwidth=_measure_exchange(task, rank, size, dtype) if size > 1 else None,
        )
    )
    dist.barrier()
    dist.destroy_process_group()


def _time_kind(task: _Task, indices: Sequence[int], dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of a micro-batch through one layer, forward and back, what the engine does with the gradients
    included."""
    task.architecture._attn_implementation = task.attention
    layers = build_layers(task.architecture)
    adapter = build_adapter(task.config, layers)
    built = partial(_build, dtype=dtype, adapter=adapter, freeze=task.config.freeze)
    chain = [(layers[index], built(layers[index], index)) for index in indices]
    shape = (task.micro_batch_size, task.config.max_seq_length)
    input_ids = torch.randint(task.architecture.vocab_size, shape)  # [B, T]
    position_ids = torch.arange(shape[1]).repeat(shape[0], 1)  # [B, T]
    segment_ids = torch.ones(shape, dtype=torch.int32)  # [B, T]
    loss, targets = build_loss(task.architecture), (shift_labels(input_ids), torch.tensor(float(input_ids.numel())))
    is_first, is_last = indices[0] == 0, indices[-1] == len(layers) - 1
    trained = [parameter for _, module in chain for parameter in module.parameters() if parameter.requires_grad]
    if dtype is torch.bfloat16:
        _sum_in_fp32(trained)
    hidden_states = torch.randn(*shape, task.architecture.hidden_size, dtype=dtype)  # [B, T, D]
    of_outputs = torch.randn_like(hidden_states) * 1e-3
    seconds: list[tuple[float, float]] = []
    # Two micro-batches are in flight, as in most stages, so that memory is not always the one that was freed last.
    waiting = []
    for _ in range(2 + ROUNDS):
        received = input_ids if is_first else hidden_states.clone().requires_grad_()
        values: Any = (received, position_ids.clone(), segment_ids.clone())
        dist.barrier()
        start = time.perf_counter()
        for layer, module in chain:
            values = layer.forward_fn(module, values) if layer.forward_fn else module(values)
        waiting.append(loss(values, targets) if is_last else values[0])
        middle = time.perf_counter()
        if len(waiting) < 2:
            continue
        output = waiting.pop(0)
        if output.requires_grad:
            output.backward(None if is_last else of_outputs)
        del output
        seconds.append((middle - start, time.perf_counter() - middle))
        for parameter in () if task.sums_gradients else trained:
            parameter.grad = None
    forward, backward = (statistics.median(way) / len(chain) for way in zip(*seconds[1:]))  # the first warms up
    return forward, backward


def _sum_in_fp32(trained: Sequence[nn.Parameter]) -> None:
    """As the engine sums the gradients of micro-batches in bf16; in fp32 autograd adds to those before."""
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
    finally:
        torch.set_default_dtype(default)
    choose_trained(module, index, layer, adapter, freeze)
    return module


def _time_update() -> float:
    """Seconds of an optimizer step as `compute_optimizer_seconds` counts it, over UPDATED elements in fp32."""
    parameter, gradient = torch.randn(UPDATED), torch.randn(UPDATED)
    master = nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([master], fused=True)

    def update() -> None:
        gradient.double().norm()
        master.grad = gradient.clone()
        master.grad.mul_(0.5)
        optimizer.step()
        parameter.copy_(master.detach())

    return _time(update)


def _measure_exchange(task: _Task, rank: int, size: int, dtype: torch.dtype) -> float:
    """Bytes/s: of a stage's output on its way to the next, or of gradients on a ring of replicas."""
    if not task.exchanges_hidden:
        gradients = torch.zeros(REDUCED, dtype=dtype)
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
    """Seconds of `work`, all processes at it at once: the median of ROUNDS."""
    seconds = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
