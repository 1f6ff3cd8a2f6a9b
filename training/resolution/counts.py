"""Costs and weights of a model's layers, each counted once: a search of layouts asks thousands of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

from transformers import PretrainedConfig

from models.adapters.adapter import Adapter
from models.layers.layer import Layer
from models.parallel.shard import ContextParallel, ExpertParallel, LayerRanks, TensorParallel
from training.config.precision import DTYPES
from training.config.schema import FusedKernels, RunConfig
from training.costs.cost import LayerCost, Passes, count_layers
from training.costs.micro_batch import MicroBatchShape
from training.distributed.topology import Layout
from training.objectives.registry import get_objective
from training.pipeline.partition import weigh_layers
from training.pipeline.schedules import find_schedule
from training.resolution.architecture import packs_rows


class LayerCounts:
    """Costs and weights of the layers of one model, under the keys that shape them: precision, adapter, tensor,
    context and expert parallelism."""

    def __init__(
        self,
        config: RunConfig,
        architecture: PretrainedConfig,
        layers: Sequence[Layer],
        adapter: Adapter | None,
        parts: ContextParallel,
        rebuild: Callable[[], Sequence[Layer]],
    ) -> None:
        """layers: as `shard_layers` makes them. adapter: put on them. parts: of sequences, of no rank in particular.
        rebuild: returns the same layers to be counted, which moves what they share to the meta device."""
        self._config, self._architecture, self._adapter, self._parts = config, architecture, adapter, parts
        self._layers, self._rebuild = layers, rebuild
        self.weigh_layers = cache(self._weigh_layers)
        self._count = cache(self._count_costs)

    @cached_property
    def _counted(self) -> Sequence[Layer]:
        return self._rebuild()

    def count_costs(self, layout: Layout, seq_length: int) -> Sequence[LayerCost]:
        """Return the cost of each layer for one micro-batch of the layout, its rows `seq_length` tokens long."""
        rows = layout.micro_batch_size * get_objective(self._config).group_size(self._config.data)
        return self._count(rows, seq_length, find_schedule(layout.schedule).splits_backward)

    def _count_costs(self, rows: int, seq_length: int, splits_backward: bool) -> Sequence[LayerCost]:
        config = self._config
        return count_layers(
            self._counted,
            self._architecture,
            MicroBatchShape(rows, seq_length, DTYPES[config.precision], is_packed=packs_rows(config)),
            adapter=self._adapter,
            freeze=config.freeze,
            ranks=LayerRanks(
                TensorParallel(size=config.tensor_parallel_size, splits_sequence=config.sequence_parallel),
                self._parts,
                ExpertParallel(size=config.expert_parallel_size, imbalance=config.moe.imbalance),
            ),
            passes=Passes(splits_backward, fuses=config.compile or config.fused_kernels is FusedKernels.auto),
        )

    def _weigh_layers(self, method: Any) -> tuple[int, ...]:
        """Return the weight of each layer by `partition_method`. Raises UserError as `weigh_layers` does."""
        return tuple(weigh_layers(self._layers, method))
