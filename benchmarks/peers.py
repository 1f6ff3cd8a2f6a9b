"""The peers of `benchmarks/pipeline.py`: each builder returns a function that takes one optimizer step of the
same work.

All of them run the same layers with the same loss in chunks, AdamW, and clipping by the global norm; the `Trainer` of
transformers (`trainer_peer.py`) has its own model and loss. In bf16 the pipelines of torch keep fp32 master weights and
sum gradients in fp32, as DeepSpeed's optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from batch import Targets
from benchmarks.workload import repeat_batch
from training.distributed.process import current_device

Step = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """The common inputs of the runners. setup: of this trainer, with the split that it chooses."""

    config: Any
    setup: Any

    @property
    def source(self) -> Any:
        return self.setup.source

    @property
    def layers(self) -> list[Any]:
        return self.setup.layers

    @property
    def layout(self) -> Any:
        return self.setup.layout

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.precision.value == "bf16" else torch.float32

    @property
    def micro_batches(self) -> int:
        return self.layout.gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        return current_device()

    def repeat(self) -> Iterator[Any]:
        shape = (self.layout.micro_batch_size, self.config.max_seq_length)
        return repeat_batch(*shape, self.source.config.vocab_size, str(self.device))

    def build(self, indices: Sequence[int]) -> list[nn.Module]:
        modules = []
        for index in indices:
            module = self.layers[index].module_class(*self.layers[index].args)
            module.load_state_dict(self.source.read_layer(index, self.layers[index]))
            modules.append(module.to(self.device, self.dtype))
        return modules


def build_copies(work: Work) -> Step:
    """The whole model on this rank, without a pipeline or an engine."""
    from models.losses.cross_entropy import causal_lm_loss

    modules = work.build(range(len(work.layers)))
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    batches = work.repeat()

    def step() -> None:
        for _ in range(work.micro_batches):
            batch = next(batches)
            activations: Any = batch.inputs.activations
            for module in modules:
                activations = module(activations)
            (causal_lm_loss(activations, batch.targets) / work.micro_batches).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_bare(work: Work, bounds: list[int] | None) -> Step:
    """DeepSpeed's own `PipelineModule`. bounds: None for its default split."""
    from deepspeed.pipe import PipelineModule

    class SplitModule(PipelineModule):
        def _partition_layers(self, method: str = "") -> None:
            if bounds is None:
                super()._partition_layers(method)
                return
            self.parts = bounds
            self._set_bounds(bounds[self.stage_id], bounds[self.stage_id + 1])

    return _start_engine(work, SplitModule)


def build_dualpipev(work: Work, bounds: list[int]) -> Step:
    """DeepSpeed's own `DualPipeVModule`: rank r holds the chunks r and 2 P - 1 - r. bounds: of 2 P chunks."""
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    class SplitModule(DualPipeVModule):
        def _partition_layers(self, method: str = "") -> None:
            self.num_stages *= 2
            self.parts, mirror = bounds, self.num_stages - 1 - self.stage_id
            self.phase_bounds = [(bounds[chunk], bounds[chunk + 1]) for chunk in (self.stage_id, mirror)]

    return _start_engine(work, SplitModule)


def _start_engine(work: Work, module_class: type) -> Step:
    import deepspeed

    from models.losses.cross_entropy import causal_lm_loss
    from training.pipeline.module import build_layer_specs

    def loss(outputs: Any, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return causal_lm_loss(outputs, Targets.find(*targets))

    module = module_class(build_layer_specs(work.layers), num_stages=work.layout.num_stages, loss_fn=loss)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.layout.micro_batch_size,
        "gradient_accumulation_steps": work.micro_batches,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": work.dtype is torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), config=config
    )
    halves = ((each.inputs.activations, (each.targets.ids, each.targets.denominator)) for each in work.repeat())
    return lambda: engine.train_batch(halves)


class _Chunk(nn.Module):
    """Consecutive layers for `torch.distributed.pipelining`. Only hidden states cross a boundary: the
    integers are made here."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        (rows, length), device = values.shape[:2], values.device
        segment_ids = torch.ones(rows, length, dtype=torch.int32, device=device)
        activations = values, torch.arange(length, device=device).repeat(rows, 1), segment_ids
        for layer in self.layers:
            activations = layer(activations)
        return activations[0]


def build_torch(work: Work, bounds: Sequence[int], folded: str | None = None) -> Step:
    """`torch.distributed.pipelining`: 1F1B with a chunk of layers a rank, interleaved 1F1B with several. folded: the
    name of a schedule in the shape of a V."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    from models.losses.cross_entropy import causal_lm_loss

    class SummingStage(PipelineStage):
        def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> None:
            super().backward_weight_one_chunk(*arguments, **named)
            update.sweep()

    rank, ranks, num_chunks = dist.get_rank(), dist.get_world_size(), len(bounds) - 1
    held = (rank, num_chunks - 1 - rank) if folded else range(rank, num_chunks, ranks)
    chunks = {i: _Chunk(work.build(range(bounds[i], bounds[i + 1]))) for i in held}
    stages = [SummingStage(chunk, i, num_chunks, work.device) for i, chunk in chunks.items()]
    batch = next(work.repeat())
    input_ids, labels = batch.inputs.input_ids, batch.targets.ids
    denominator = batch.targets.denominator * work.micro_batches

    def loss(hidden_states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = chunks[num_chunks - 1].layers[-1].weight
        if folded:  # it runs the loss' backward pass twice, which ours does not allow
            logits = nn.functional.linear(hidden_states, weight).flatten(0, 1)
            return nn.functional.cross_entropy(logits, target.flatten(), reduction="sum") / denominator
        return causal_lm_loss((hidden_states, weight), Targets.find(target, denominator))

    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if len(stages) == 1:
        schedule: Any = Schedule1F1B(stages[0], work.micro_batches, **options)
    elif folded:
        schedule = getattr(pipelining, folded)(stages, work.micro_batches, **options)
    else:
        schedule = ScheduleInterleaved1F1B(stages, work.micro_batches, **options)
    inputs = (input_ids.repeat(work.micro_batches, 1),) if rank == 0 else ()
    target = {"target": labels.repeat(work.micro_batches, 1)} if num_chunks - 1 in chunks else {}
    update = Update([parameter for chunk in chunks.values() for parameter in chunk.parameters()])

    def step() -> None:
        schedule.step(*inputs, **target, return_outputs=False)
        update()

    return step


class Update:
    """Clipping by the norm over all ranks, AdamW, and gradients set back; on fp32 masters of bf16 parameters, whose
    gradients are summed in fp32."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters, self._in_bf16 = parameters, parameters[0].dtype is torch.bfloat16
        self._masters = [
            nn.Parameter(parameter.detach().float()) if self._in_bf16 else parameter for parameter in parameters
        ]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, fused=True)
        if self._in_bf16:
            for master, parameter in zip(self._masters, parameters, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(sum_in_fp32, master))

    def sweep(self) -> None:
        """Sums what torch's split backward pass has assigned, which no hook sees."""
        if self._in_bf16:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                if parameter.grad is not None:
                    sum_in_fp32(master, parameter)

    @torch.no_grad()
    def __call__(self) -> None:
        import torch.distributed as dist

        square = nn.utils.get_total_norm([master.grad for master in self._masters]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self._masters, 1.0, square.sqrt())
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._in_bf16:
            torch._foreach_copy_([parameter.data for parameter in self._parameters], self._masters)


@torch.no_grad()
def sum_in_fp32(master: nn.Parameter, parameter: torch.Tensor) -> None:
    """Takes over the gradient of a micro-batch."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    master.grad.add_(parameter.grad)
    parameter.grad = None
