"""Counts what the layers of a model cost: parameters, FLOPs and bytes (`training/costs/cost.py`). Each result is kept,
since a search of layouts asks for the same ones thousands of times.

To count a layer, it runs on the meta device. What it costs at other numbers of rows is on a line: the rows of a
micro-batch do not depend on each other, and weights cost the same for any number. So a search runs the layers at
two sizes and at `FAR`, and reads the sizes between off the line. A single row can be off it: what is copied of several
rows is sometimes a view of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, cached_property, partial
from typing import Any

from transformers import PretrainedConfig

from models.adapters.adapter import Adapter
from models.layers.layer import Layer
from models.parallel.shard import ContextParallel, ExpertParallel, LayerRanks, TensorParallel
from training.config.precision import DTYPES
from training.config.schema import RouterDtype, RunConfig
from training.costs.cost import LayerCost, MicroBatchShape, count_layers
from training.distributed.topology import Layout
from training.objectives.registry import count_rows
from training.pipeline.schedules import find_schedule
from training.resolution.architecture import packs_rows

FAR = 1024  # rows of the micro-batch that says whether costs are on a line


class LayerCounts:
    """The costs of the layers of one model. They hold for one choice of the keys that change a layer,
    such as precision, adapter, kernels, and the sizes of tensor, context and expert parallelism. They can be asked for
    at any number of stages, micro-batch size and sequence length."""

    def __init__(
        self,
        config: RunConfig,
        architecture: PretrainedConfig,
        adapter: Adapter | None,
        parts: ContextParallel,
        rebuild: Callable[[], Sequence[Layer]],
        fuses: bool = False,
    ) -> None:
        """config: the run's keys. architecture: the model's config, completed by these keys. adapter: the adapter that
        is put on the layers; None without one. parts: how ranks share each sequence (context parallelism); the costs
        are those of the first of these ranks. fuses: whether parts of the layers are fused kernels.

        rebuild: returns the layers as `shard_layers` makes them; it is called at most once. Costs are counted on the
        meta device, and counting moves the objects that several layers hold there too. So a run passes a function that
        builds its layers again. A plan, which loads no weights, may return them themselves.
        """
        self._config, self._architecture, self._adapter, self._parts = config, architecture, adapter, parts
        self._rebuild, self.fuses = rebuild, fuses
        self._count = cache(self._count_costs)
        self._kinds: list[int] = []  # by layer the first one of its kind, once they were counted
        # The costs of the layers that have run, by their rows; by sequence length and `splits_backward`
        self._runs: defaultdict[tuple[int, bool], dict[int, Sequence[LayerCost]]] = defaultdict(dict)

    @cached_property
    def _counted(self) -> Sequence[Layer]:
        """The layers that costs are counted on."""
        return self._rebuild()

    def count_costs(self, layout: Layout, seq_length: int) -> Sequence[LayerCost]:
        """Return the cost of each layer for one micro-batch of `layout`, in the order of the model.

        layout: only its micro-batch size and its schedule are read. seq_length: the tokens of each whole row, which
        ranks may share.
        """
        rows = layout.micro_batch_size * count_rows(self._config)
        return self._count(rows, seq_length, find_schedule(layout.schedule).splits_backward)

    def _count_costs(self, rows: int, seq_length: int, splits_backward: bool) -> Sequence[LayerCost]:
        """Return the cost of each layer. rows: rows of a micro-batch. seq_length: as in `count_costs`. splits_backward:
        whether the schedule defers the gradients of weights."""
        runs = self._runs[seq_length, splits_backward]
        smaller = sorted(size for size in runs if size < rows)[-2:]
        if len(smaller) == 2 and rows < FAR:
            if FAR not in runs:
                runs[FAR] = self._run_layers(FAR, seq_length, splits_backward)
            line = partial(interpolate, smaller, [runs[size] for size in smaller])
            # A peak is the largest of several sums, so costs bend upwards at most: where a far size is on the line
            # through two others, all between are
            if line(FAR) == runs[FAR]:
                return line(rows)
        runs[rows] = self._run_layers(rows, seq_length, splits_backward)
        return runs[rows]

    def _run_layers(self, rows: int, seq_length: int, splits_backward: bool) -> Sequence[LayerCost]:
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
            splits_backward=splits_backward,
            compiles=config.compile,
            fuses=self.fuses,
            fp32_routers=config.moe.router_dtype is RouterDtype.fp32,
            alike=self._kinds,
        )


def interpolate(sizes: Sequence[int], costs: Sequence[Sequence[LayerCost]], rows: int) -> Sequence[LayerCost]:
    """Return the costs of a micro-batch of `rows` rows on the line through those of two sizes, in ascending order."""
    (low, high), (first, second) = sizes, costs
    pairs = list(zip(first, second, strict=True))
    found = {pair: _move(*pair, rows - low, high - low) for pair in dict.fromkeys(pairs)}
    return [found[pair] for pair in pairs]


def _move(low: Any, high: Any, distance: int, between: int) -> Any:
    """Return `low` with each integer moved `distance` along the line to `high`, which is `between` from it."""
    if is_dataclass(low):
        kind: Any = type(low)
        names = [each.name for each in fields(low)]
        parts = ((getattr(low, name), getattr(high, name)) for name in names)
        return kind(**{name: _move(*part, distance, between) for name, part in zip(names, parts)})
    if isinstance(low, tuple):
        return tuple(_move(*part, distance, between) for part in zip(low, high))
    return low + (high - low) * distance // between if type(low) is int else low
