"""The routers of a stage over the steps of a run: the scales of their losses, their metrics, and the bias that follows
the load of their experts.

All of it stays on the device: a report reads it, a step does not wait. L layers of this stage with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from data.loading.step_totals import StepTotals
from models.experts.gate import ChoiceCounter, Comparison, can_compare, check_router_dtype, find_forward
from models.experts.router import RoutedBlock, RouterMonitor, RouterOptions, find_block, fit_options
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer
from training.config.schema import MoEConfig, RouterDtype
from training.distributed.topology import PIPE, join_group
from training.pipeline.stage_ranks import StageRanks
from training.pipeline.weight_sharding import whole_parameters, whole_shape

AUX_LOSS, Z_LOSS = "router_aux_loss", "router_z_loss"
MOST_LOADED, LEAST_LOADED = "expert_load_max", "expert_load_min"
MOST_LOADED_RANK = "expert_rank_load_max"  # where ranks divide experts
OTHER_CHOICES = "router_other_choices"  # a list, by layer


def build_router_options(
    keys: MoEConfig, architecture: PretrainedConfig, layers: Sequence[Layer]
) -> RouterOptions | None:
    """Return the router options of a run, from its keys `moe`; None for a dense model. Raises UserError for a key that
    does not apply to the model."""
    if keys.router_dtype is RouterDtype.fp32:
        check_router_dtype(architecture, layers)
    options = RouterOptions(keys.aux_loss_coef, keys.z_loss_coef, keys.update_router_bias)
    return fit_options(options, architecture, layers)


class StageRouters:
    """All ranks have one, whether or not their stage has experts; all call each method, at the same steps."""

    def __init__(
        self,
        options: RouterOptions,
        layers: Sequence[PipelineDecoderLayer],
        ranks: StageRanks,
        *,
        device: torch.device,
        compares_choices: bool = False,
    ) -> None:
        """layers: of this stage, their weights loaded. compares_choices: whether tokens are counted, in some steps,
        that would choose other experts in the other precision."""
        self._options, self._topology = options, ranks.topology
        self._parallel, self._expert_parallel = ranks.parallel, ranks.expert_parallel
        self._group = join_group(ranks.topology, *ranks.topology.others(PIPE))  # the ranks that have these layers
        found = [(layer, block) for layer in layers if (block := find_block(layer, whole_shape)) is not None]
        self._blocks: list[RoutedBlock] = [block for _, block in found]
        num_experts = self._blocks[0].num_experts if self._blocks else 1
        self._counts = torch.zeros(len(found), num_experts, dtype=torch.int64, device=device)  # of the running step
        self._sums = torch.zeros(len(found), 2, dtype=torch.float64, device=device)
        self._factors = torch.zeros(2, device=device)
        for (layer, block), counts, sums in zip(found, self._counts, self._sums, strict=True):
            monitor = RouterMonitor(layer.context, options, counts=counts, sums=sums, factors=self._factors)
            block.router.register_forward_hook(monitor)
            if options.update_router_bias:
                block.widen_bias()
        self._comparison = self._build_comparison(found) if compares_choices else None
        self._start_interval()

    def start_step(self, totals: StepTotals | None, gradient_scale: float, compares: bool = False) -> None:
        """Set the factors of the losses. totals: of the step's global batch; losses that are on need them.
        gradient_scale: the divisor of a gradient between the backward pass and the optimizer. compares: whether to
        count the tokens that would choose other experts in the other precision.
        """
        self._totals = totals
        if self._comparison is not None:
            self._comparison.is_on = compares and totals is not None
        if self._options.has_losses:
            assert totals is not None, "the losses of routers are means over the documents and tokens of a global batch"
            means = (
                self._options.aux_loss_coef / totals.num_documents,
                self._options.z_loss_coef / totals.num_tokens,
            )
            # each rank of a tensor-parallel group has the whole of these losses, and their gradients are summed
            for factor, mean in zip(self._factors, means, strict=True):
                factor.fill_(mean * gradient_scale / self._parallel.size)

    def _build_comparison(self, found: Sequence[tuple[PipelineDecoderLayer, RoutedBlock]]) -> Comparison:
        """Have the routers count in their forward passes. All ranks call it."""
        comparison = Comparison()
        numbers = self._counts.new_tensor([layer.number_in_model for layer, _ in found])
        last = torch.cat([numbers, numbers.new_tensor([-1])]).max()
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        self._layer_numbers, self._num_layers = numbers, int(last) + 1
        self._compared = torch.zeros(len(found), dtype=torch.int64, device=numbers.device)  # of the running step
        for (layer, block), count in zip(found, self._compared, strict=True):
            forward = find_forward(block.router)
            if forward is not None and can_compare(block.router):
                forward.choices = ChoiceCounter(layer.context, comparison, count)
        return comparison

    def finish_step(self, was_taken: bool) -> None:
        """Add the step's counts to the interval, and move the biases; neither where the weights were not updated."""
        if self._options.update_router_bias:
            loads = self._sum_over_stage(self._counts.clone())
            if was_taken:
                self._move_biases(loads)
        if was_taken:
            self._interval_counts += self._counts
            self._interval_sums += self._sums
            if self._totals is not None:
                self._num_documents += self._totals.num_documents
                self._num_tokens += self._totals.num_tokens
        if self._comparison is not None:
            if was_taken and self._comparison.is_on:
                assert self._totals is not None
                self._interval_compared += self._compared
                self._num_compared += self._totals.num_tokens
            self._compared.zero_()
        self._counts.zero_()
        self._sums.zero_()

    def _sum_over_stage(self, counts: torch.Tensor) -> torch.Tensor:
        """In place, over the ranks that have these layers: replicas, and those that share them, which count alike."""
        if self._blocks:
            dist.all_reduce(counts, group=self._group)
        return counts

    @torch.no_grad()
    def _move_biases(self, loads: torch.Tensor) -> None:
        """The bias of an expert with less than an even load rises by the speed, of one with more it falls (2408.15664).
        loads: int64 [L, E], of all ranks of the stage, so alike on each of them."""
        signs = (loads.sum(dim=1, keepdim=True) - loads * loads.shape[1]).sign()
        for block, sign in zip(self._blocks, signs, strict=True):
            assert block.bias is not None
            with whole_parameters([block.bias], changes=True):  # of some families it is one
                block.bias.add_((sign * self._options.update_router_bias).view_as(block.bias))

    def finish_interval(self) -> dict[str, float | list[float | None]]:
        """Return name -> value over the steps since the last call; empty where there were none."""
        other_choices = self._share_other_choices()
        num_documents, num_tokens, extremes = self._num_documents, self._num_tokens, self._find_extremes()
        # of a replica's tensor-parallel ranks each has the sums of all layers; so has the number of layers
        sums = torch.cat([self._interval_sums.sum(dim=0), extremes.new_full((1,), len(self._blocks))])
        dist.all_reduce(sums)
        self._start_interval()
        if not num_tokens:
            return {}
        aux, z, num_layers = sums.tolist()
        num_layers /= self._topology.size(*self._topology.weight_replica_axes)
        most, least, most_loaded_rank = extremes.tolist()
        losses = {AUX_LOSS: aux / num_layers / num_documents} if self._options.aux_loss_coef else {}
        losses |= {Z_LOSS: z / num_layers / num_tokens} if self._options.z_loss_coef else {}
        rank_load = {MOST_LOADED_RANK: most_loaded_rank} if self._expert_parallel.size > 1 else {}
        return {**losses, MOST_LOADED: most, LEAST_LOADED: -least, **rank_load, **other_choices}

    def _share_other_choices(self) -> dict[str, list[float | None]]:
        """By layer, the share of the tokens of the compared steps that would go to other experts; None for a layer that
        does not count. Empty where no step was compared, which all ranks know alike."""
        if self._comparison is None or not self._num_compared:
            return {}
        counts = torch.zeros(2, self._num_layers, dtype=torch.float64, device=self._counts.device)
        counting = [bool((forward := find_forward(block.router)) and forward.choices) for block in self._blocks]
        counts[0, self._layer_numbers] = self._interval_compared.double()
        counts[1, self._layer_numbers] = counts.new_tensor(counting)
        dist.all_reduce(counts)
        # of a replica's tensor-parallel ranks each has counted all of its tokens
        num_tokens = self._num_compared / self._topology.size(*self._topology.weight_replica_axes)
        shares = [count / ranks / num_tokens if ranks else None for count, ranks in zip(*counts.tolist(), strict=True)]
        return {OTHER_CHOICES: shares} if any(share is not None for share in shares) else {}

    def _find_extremes(self) -> torch.Tensor:
        """Return float64 [3], of the experts of all stages: the highest load, the lowest times -1, and the highest of a
        rank's experts together. An expert group computes its own tokens, so its ranks are compared with each other."""
        extremes = self._interval_sums.new_full((3,), -torch.inf)
        if self._blocks:
            of_group = self._interval_counts.clone()
            if self._expert_parallel.size > 1:
                dist.all_reduce(of_group, group=self._expert_parallel.group)
            rank_loads = _find_loads(of_group).unflatten(1, (self._expert_parallel.size, -1)).mean(dim=2)
            loads = _find_loads(self._sum_over_stage(self._interval_counts))
            extremes = torch.stack([loads.max(), -loads.min(), rank_loads.max()])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        return extremes

    def _start_interval(self) -> None:
        self._interval_counts, self._interval_sums = torch.zeros_like(self._counts), torch.zeros_like(self._sums)
        self._num_documents = self._num_tokens = 0
        if self._comparison is not None:
            self._interval_compared, self._num_compared = torch.zeros_like(self._compared), 0


def _find_loads(counts: torch.Tensor) -> torch.Tensor:
    """Return the tokens of each expert as a multiple of an even share of its layer's, float64 [L, E]."""
    return counts.double() / counts.double().mean(dim=1, keepdim=True)
