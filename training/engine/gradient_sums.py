"""The gradients of a step: summed over its micro-batches, reduced to the replica that owns them, handed to DeepSpeed's
optimizer.

At stage 1 a rank keeps the whole sums, and reduces a bucket of them in the last backward pass that adds to it, while
that pass still runs. At stage 2 it keeps only its own part: a bucket of each pass is reduced, added there, and freed.
`training/engine/reduce_buckets.py` plans the buckets. They follow from the layers and are reduced in a fixed order: all
replicas run the same collectives, although an expert may have got no token on some of them, and a parameter without a
gradient counts as zero. Where the layers of a pass also exchange data with ranks that read other tokens, buckets wait
for its end (`reduces_in_passes`). What two stages share is summed over both first, after the last pass.
The gradients of experts that ranks divide are summed over the ranks that have the same ones: what other ranks' rows add
to them is there already (`models/experts/exchange.py`).

Sums are fp32, in fp16 runs fp16. A gradient enters them through `GradientSums.add`, whatever computed it: called by a
hook on each parameter, as soon as autograd is done with it, so that a stage never holds a second set of gradients; by a
split backward pass, for what it deferred; and by a sweep after each pass, for a gradient that no hook has seen (one
that is assigned, as torch's split backward does: 2.13, torch/distributed/pipelining/_backward.py). Projections and
embeddings add to whole sums in fp32 themselves (`lend_sum`, `training/pipeline/weight_gradients.py`) before that.
Where sums have the dtype of gradients, the first one is copied to its sum, which then is the parameter's `.grad`:
autograd itself adds the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from models.parallel.exchanges import wait_for
from training.engine.deepspeed_internals import patch
from training.engine.reduce_buckets import Bucket, ParameterRange, ReduceSlice, locate, plan_buckets, plan_reductions
from training.engine.shard_groups import ShardGroups, average
from training.pipeline.module import StageModule
from training.pipeline.schedule import Unit, UnitKind

Parameter = torch.nn.Parameter
Sent = tuple[ReduceSlice, torch.Tensor, dist.Work | None]  # its elements; the work to wait for

# Elements whose squares are summed in fp32; those sums are added in fp64
_NORM_CHUNK = 2**20


def add_gradient(parameter: Parameter, total: torch.Tensor, is_first: bool = False) -> None:
    """Add the gradient of `parameter` to `total`, of its shape, and free it. is_first: `total` is overwritten.

    A GPU casts while it adds, and so needs no copy of the gradient in fp32; the result is the same to the bit.
    """
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if is_first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


class GradientSums:
    """The sums of gradients of one rank (`StepGradients`). parts: its part of each parameter group, flat."""

    def __init__(
        self,
        module: StageModule,
        optimizer: Any,
        passes: Sequence[Unit],
        *,
        shards: bool,
        reduce_dtype: torch.dtype,
        reduces_in_passes: bool = True,
        groups: ShardGroups | None = None,
    ) -> None:
        """Plan the buckets, register a hook on every trained parameter, and take the place of what the optimizer does
        with gradients.

        optimizer: DeepSpeed's `DeepSpeedZeroOptimizer`. passes: the backward passes of this rank in a step, in order.
        shards: keep only this rank's part. reduces_in_passes: reduce a bucket as soon as it is full, while the pass
        runs; False: at the end of the pass (`reduces_in_passes` says when that is needed). groups: None where gradients
        are partitioned over all replicas. Raises UserError when a patched name is missing.
        """
        self._module, self._optimizer, self._reduce_dtype = module, optimizer, reduce_dtype
        self._groups, self._group = groups, optimizer.dp_process_group
        self._size = dist.get_world_size(self._group)  # of which gradients are the mean, whatever they are summed over
        self._process_groups = list(dict.fromkeys(optimizer.real_dp_process_group))
        self._communicators = [self._process_groups.index(each) for each in optimizer.real_dp_process_group]
        self._ranks, self._sizes = (
            [find(each) for each in self._process_groups] for find in (dist.get_rank, dist.get_world_size)
        )
        self._shards = shards and self._size > 1
        self._reduces_in_passes = reduces_in_passes
        sum_dtype = torch.float16 if optimizer.bit16_groups[0][0].dtype is torch.float16 else torch.float32
        self._dtype, self._copies = sum_dtype, self._shards or reduce_dtype is not sum_dtype
        self._offsets = locate(optimizer.bit16_groups)
        self._part_sizes = [int(size) for size in optimizer.partition_size]
        trained = [parameter for group in optimizer.bit16_groups for parameter in group]
        self._tied = [(weight, group) for weight, group in module.get_tied_weights_and_groups()]
        self._allocate(trained)
        self._plan(passes)
        self._reached: set[int] = set()  # ids of parameters whose sum has a gradient of this step
        self._lent: set[int] = set()  # ids of parameters whose gradient of the running pass is in their sum
        self._number = 0  # of the next pass
        self._waiting: list[Bucket] = []  # of the running pass, not yet reduced; the next one last
        self._arrived: set[int] = set()  # ids of parameters whose gradient of the running pass is there
        self._sent: list[Sent] = []  # slices that are being reduced
        self._replace_deepspeeds()
        self._register_hooks(trained)

    def _register_hooks(self, trained: Sequence[Parameter]) -> None:
        """Call `add` for each gradient, by a weak reference: Python's garbage collection does not see circles through
        hooks, so parameters would keep this object, its buffers and process groups forever."""
        reference = weakref.ref(self)

        def add(parameter: Parameter) -> None:
            sums = reference()
            if sums is not None:
                sums.add(parameter)

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(add)

    def _allocate(self, trained: Sequence[Parameter]) -> None:
        """Allocate the sums, and find that of each parameter that has a whole one."""
        device = trained[0].device
        numbers = range(len(self._part_sizes))
        copies = [1 if self._shards else self._sizes[each] for each in self._communicators]
        sizes = [size * count for size, count in zip(self._part_sizes, copies, strict=True)]
        self._flat = [torch.zeros(size, dtype=self._dtype, device=device) for size in sizes]
        self.parts = self._flat
        if self._shards:
            summed = [weight for weight, _ in self._tied]
            totals = [torch.zeros(weight.shape, dtype=self._dtype, device=device) for weight in summed]
        else:
            self.parts = [
                self._flat[each].narrow(0, self._find_start(each), self._part_sizes[each]) for each in numbers
            ]
            summed = list(trained)
            totals = [
                self._flat[group].narrow(0, start, weight.numel()).view(weight.shape)
                for weight in trained
                for group, start in [self._offsets[id(weight)]]
            ]
        self._totals = {id(weight): (weight, total) for weight, total in zip(summed, totals, strict=True)}

    def _plan(self, passes: Sequence[Unit]) -> None:
        tied = {id(weight) for weight, _ in self._tied}

        def plan(parameters: Iterable[Parameter]) -> list[Bucket]:
            if self._size == 1:
                return []
            limit = self._optimizer.reduce_bucket_size
            return plan_buckets(
                parameters,
                self._offsets,
                self._part_sizes,
                limit,
                by_group=not self._shards,
                communicators=self._communicators,
            )

        def plan_pass(parameters: Iterable[Parameter]) -> list[Bucket]:
            return plan(each for each in parameters if id(each) in self._offsets and id(each) not in tied)

        self._buckets = plan_reductions(self._module, passes, once=not self._shards, plan=plan_pass)
        self._last_buckets = plan(weight for weight, _ in self._tied)

    def _replace_deepspeeds(self) -> None:
        """Leave DeepSpeed's optimizer the update alone. Its hooks, which it registers where its state is on the host,
        would reduce gradients a second time; its search for values that are not finite, before it takes the norm, would
        read them a second time and wait for the device once more."""
        for hook in self._optimizer._grad_acc_hooks:
            hook.remove()
        patch(self._optimizer, "check_grad_overflow", True)
        patch(self._optimizer, "check_overflow", self._check_norm)
        patch(self._optimizer, "scaled_global_norm", lambda: self._norm)
        self._counted = [
            chunk
            for number, parameters in enumerate(self._optimizer.params_in_partition)
            for parameter in parameters
            if self._counts(parameter)
            for chunk in self._view(parameter, number).split(_NORM_CHUNK)
        ]

    def _counts(self, parameter: Parameter) -> bool:
        """Returns whether this rank counts a parameter in the norm: other stages and tensor-parallel ranks may have
        the same one."""
        is_copy = getattr(parameter, "ds_pipe_replicated", False)
        return not is_copy and (self._module.ranks.parallel.rank == 0 or getattr(parameter, "model_parallel", False))

    def start_step(self) -> None:
        self._number = 0
        self._reached.clear()
        if self._shards:
            for part in self.parts:
                part.zero_()

    def backward(self, loss: torch.Tensor) -> None:
        self._optimizer.scale_if_loss(loss).backward()

    def start_pass(self) -> None:
        self._waiting = self._buckets[self._number][::-1]
        self._number += 1
        self._arrived.clear()
        self._lent.clear()
        self._find_missing()

    @torch.no_grad()
    def lend_sum(self, parameter: Parameter) -> torch.Tensor | None:
        """Return the sum of a parameter, for the caller to add its gradient of this pass to and then call `add`. None
        where there is no whole sum, or one that is `.grad` itself."""
        if id(parameter) not in self._totals or self._totals[id(parameter)][1].dtype is parameter.dtype:
            return None
        self._lent.add(id(parameter))
        return self._find_total(parameter)

    @torch.no_grad()
    def add(self, parameter: Parameter) -> None:
        """Add `parameter.grad`, which is complete for this pass unless it was added to the sum that was lent, and
        reduce the buckets that are full."""
        if parameter.grad is None and id(parameter) not in self._lent:
            return  # autograd calls hooks of parameters that an operation gave no gradient, too
        if id(parameter) in self._totals and parameter.grad is not None:
            self._add_to_total(parameter)
        self._arrived.add(id(parameter))
        self._missing.discard(id(parameter))
        while self._reduces_in_passes and self._waiting and not self._missing:
            self._reduce(self._waiting.pop())
            self._find_missing()

    def _add_to_total(self, parameter: Parameter) -> None:
        _, total = self._totals[id(parameter)]
        if parameter.grad is total:
            return  # autograd has added it
        add_gradient(parameter, total, is_first=id(parameter) not in self._reached)
        self._reached.add(id(parameter))
        if total.dtype is parameter.dtype:
            parameter.grad = total

    def _find_missing(self) -> None:
        bucket = self._waiting[-1].parameters if self._waiting else ()
        self._missing = {id(parameter) for parameter in bucket} - self._arrived

    @torch.no_grad()
    def finish_pass(self) -> None:
        """Add what no hook has seen, reduce the remaining buckets, and wait for those that are to be freed."""
        for parameter, total in self._totals.values():
            if parameter.grad is not None and parameter.grad is not total:
                self._add_to_total(parameter)
        while self._waiting:
            self._reduce(self._waiting.pop())
        if self._shards:
            self._finish_sent()

    @torch.no_grad()
    def share_tied(self) -> None:
        for weight, group in self._tied:
            dist.all_reduce(self._find_total(weight), group=group)

    def _find_total(self, parameter: Parameter) -> torch.Tensor:
        """The sum of a parameter, zero where this step has no gradient of it."""
        _, total = self._totals[id(parameter)]
        if id(parameter) not in self._reached:
            total.zero_()
            self._reached.add(id(parameter))
        return total

    @torch.no_grad()
    def reduce(self) -> None:
        for bucket in self._last_buckets:
            self._reduce(bucket)
        self._finish_sent()
        for parameter, _ in self._totals.values():
            self._find_total(parameter)
            parameter.grad = None
        if self._groups is not None:
            for part in self.parts:
                average(part, self._groups.replicas, self._reduce_dtype)
        for number, part in enumerate(self.parts):
            if self._optimizer.cpu_offload:
                # The update reads it on the host. Before that `_compute_norm` waits for its own copy to the host, which
                # follows this one on the same stream
                self._optimizer.single_partition_of_fp32_groups[number].grad.copy_(part, non_blocking=True)
            else:
                self._optimizer.averaged_gradients[number] = SimpleNamespace(flat_partition=part)

    def _find_start(self, group: int) -> int:
        """The first element of this rank's part of a group."""
        return self._ranks[self._communicators[group]] * self._part_sizes[group]

    def _view(self, parameter: Parameter, group: int) -> torch.Tensor:
        """The elements of a parameter in this rank's part of a group, flat."""
        start = self._offsets[id(parameter)].start - self._find_start(group)
        stop = min(start + parameter.numel(), self._part_sizes[group])
        return self.parts[group].narrow(0, max(start, 0), stop - max(start, 0))

    def _check_norm(self, **_: Any) -> None:
        """Take the norm, and have the optimizer skip its step where that is not finite."""
        self._norm = self._compute_norm()
        self._optimizer.overflow = not self._norm.isfinite()

    @torch.no_grad()
    def _compute_norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient, times the loss scale (fp16): a scalar of the host, which waits for
        it."""
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        if self._counted:
            norms = torch._foreach_norm([chunk.float() for chunk in self._counted])
            total += torch.stack(norms).double().square().sum()
        dist.all_reduce(total, group=self._group)
        dist.all_reduce(total, group=self._module.mpu().get_model_parallel_group())
        return total.sqrt().float().cpu()

    def _reduce(self, bucket: Bucket) -> None:
        """Start to reduce the gradients of a bucket. One that is a copy was reduced while the next one was filled; what
        is reduced in place is waited for at the end of the step."""
        if self._copies:
            self._finish_sent()
        self._sent += [self._send(each) for each in bucket.slices]
        if self._shards:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _send(self, reduced: ReduceSlice) -> Sent:
        gradients = self._collect(reduced)
        if self._sizes[reduced.communicator] == 1:
            return reduced, gradients, None
        group = self._process_groups[reduced.communicator]
        return reduced, gradients, dist.reduce(gradients, group=group, group_dst=reduced.owner, async_op=True)

    def _collect(self, reduced: ReduceSlice) -> torch.Tensor:
        """The gradients of a slice, concatenated, in the reduce dtype. One piece that has the dtype is not copied."""
        sources = [self._find_source(each) for each in reduced.ranges]
        dtype = self._reduce_dtype if self._sizes[reduced.communicator] > 1 else self._dtype
        if len(reduced.runs) == 1 and not self._copies:
            (group, start, length), owner = reduced.runs[0], reduced.owner
            return self._flat[group].narrow(0, owner * self._part_sizes[group] + start, length)
        if len(sources) == 1 and sources[0] is not None:
            return sources[0].to(dtype)
        lengths = [each.length for each in reduced.ranges]
        gradients = torch.empty(sum(lengths), dtype=dtype, device=self._flat[0].device)
        for source, target in zip(sources, gradients.split(lengths), strict=True):
            if source is None:
                target.zero_()
            else:
                target.copy_(source)
        return gradients

    def _find_source(self, elements: ParameterRange) -> torch.Tensor | None:
        """Return what is reduced of a parameter, flat: its sum, or at stage 2 its gradient of the pass, where it has
        one."""
        parameter, first, length = elements
        whole = self._find_total(parameter) if id(parameter) in self._totals else parameter.grad
        return None if whole is None else whole.reshape(-1).narrow(0, first, length)

    def _finish_sent(self) -> None:
        """Wait for what is being reduced, and take over what this rank owns of it."""
        for reduced, gradients, work in self._sent:
            wait_for([] if work is None else [work])
            if reduced.owner == self._ranks[reduced.communicator]:
                self._take(reduced, gradients)
        self._sent = []

    def _take(self, reduced: ReduceSlice, gradients: torch.Tensor) -> None:
        lengths = [length for _, _, length in reduced.runs]
        for (group, start, length), received in zip(reduced.runs, gradients.split(lengths), strict=True):
            target = self.parts[group].narrow(0, start, length)
            if self._shards:
                target.add_(received, alpha=1 / self._size)
                continue
            if target.dtype is torch.float16:
                target.copy_(received.float().div_(self._size))  # the sum may be beyond fp16, where the mean is not
                continue
            if target.data_ptr() != received.data_ptr():
                target.copy_(received)
            target.div_(self._size)


def list_backward(units: Iterable[Unit]) -> list[Unit]:
    """Return the passes that compute gradients, in order."""
    return [unit for unit in units if unit.kind is not UnitKind.forward]
