"""The loaders of this rank's stage, from the config of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from data.encoders.kinds import find_kind
from data.loading import loader as loaders
from data.loading.columns import WHOLE_IDS, ReadColumn, list_scored_columns
from data.loading.stream_loader import StreamLoader
from data.storage.scores import Scores
from data.worker_processes import start_server
from extension import load_part
from models.parallel.shard import find_length_multiple
from training.config.schema import RunConfig
from training.config.sources import list_evaluations
from training.distributed.process import current_device
from training.distributed.ranks import Ranks
from training.distributed.topology import Layout
from training.inputs.custom import build_collator
from training.inputs.datasets import build_order, build_row_plan, build_stream_plan
from training.inputs.step_budget import EvalSize, StepBudget
from training.inputs.stream import StreamStart
from training.objectives.objective import PassOver
from training.objectives.registry import get_objective
from training.pipeline.module import StageModule
from training.scoring.first_pass import RunFirstPass


@dataclasses.dataclass(frozen=True)
class RankData:
    """The tokenized files of a run, and the rank that reads its part of them.

    datasets: key of the files -> tokenized folder. scores: the same key, or `name_companion` of it -> what a model has
    scored of them.
    """

    datasets: Mapping[str, Path]
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    ranks: Ranks
    scores: Mapping[str, Scores] = dataclasses.field(default_factory=dict)

    def add_scores(self, scores: Mapping[str, Scores]) -> Self:
        """Return a copy with further scores."""
        return dataclasses.replace(self, scores={**self.scores, **scores})


@dataclasses.dataclass(frozen=True)
class Loaders:
    """The loaders of this rank's stage. evaluation: by the names of the evaluation files. first_pass: what reads their
    `first`; None where there is none."""

    train: Any
    evaluation: Mapping[str, Any]
    first_pass: RunFirstPass | None = None


Options = Callable[[str], loaders.LoaderOptions]
"""Returns how this rank reads the files of a key."""


def build_options(
    config: RunConfig, module: StageModule, data: RankData, key: str = "train_file"
) -> loaders.LoaderOptions:
    """Return the options with which this rank's stage reads `train_file` or an evaluation file."""
    layout, tokenizer = data.layout, data.tokenizer
    return loaders.LoaderOptions(
        reads_inputs=module.has_first_layer,
        reads_labels=module.has_loss,
        dp_rank=layout.dp_rank(data.ranks.rank),
        dp_size=layout.dp_size,
        chunks=module.ranks.sequence_part.chunks,
        num_chunks=module.ranks.sequence_part.num_chunks,
        length_multiple=find_length_multiple(module.ranks.sequence_part, config.sequence_parallel_size),
        micro_batch_size=layout.micro_batch_size,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        pad_to=config.data.pad_to,
        row_plan=build_row_plan(config, key),
        row_targets=get_objective(config).row_targets,
        mean_over=get_objective(config).mean_over,
        num_workers=config.num_workers,
        collator=build_collator(config.data, config.num_workers),
        pin_memory=current_device().type == "cuda",
        num_further=module.num_further,
        columns=tuple(_list_columns(config, module, data, key)),
    )


def _list_columns(config: RunConfig, module: StageModule, data: RankData, key: str) -> Iterator[ReadColumn]:
    """Yield the columns that this rank's stage reads. key: of the files, as in `RankData.scores`."""
    yield from get_objective(config).columns
    if module.has_first_layer and (columns := find_kind(config.data.name).columns):
        yield from load_part(columns)(config.data, data.tokenizer)
    if module.num_further:
        yield WHOLE_IDS
    if module.has_loss and key in data.scores:
        yield from list_scored_columns(data.scores[key])


def build_loaders(
    config: RunConfig,
    module: StageModule,
    data: RankData,
    budget: StepBudget,
    auxiliary_options: Options | None = None,
) -> Loaders:
    """Build the training and evaluation loaders of this rank's stage; placeholders on a stage that reads nothing.

    auxiliary_options: how a frozen model that is in memory reads the files before each step.
    """
    layout, options = data.layout, build_options(config, module, data)
    if options.num_workers and not options.reads_nothing:
        start_server()
    if budget.stream is not None:
        train: Any = _build_stream_loader(config, options, data, budget, budget.stream)
        return Loaders(train, build_eval_loaders(config, module, data, budget.evaluations, auxiliary_options))
    path = data.datasets["train_file"]
    order = build_order(config, path, budget.num_samples, layout.global_batch_size)
    train_loader = loaders.build_train_loader(path, options, order, layout.gradient_accumulation_steps)
    if (first := _choose_first(config, module, data, "train_file", options, auxiliary_options)) is not None:
        train_loader.first = loaders.build_train_loader(*first, order, layout.gradient_accumulation_steps)
    return Loaders(train_loader, build_eval_loaders(config, module, data, budget.evaluations, auxiliary_options))


def _build_stream_loader(
    config: RunConfig, options: loaders.LoaderOptions, data: RankData, budget: StepBudget, start: StreamStart
) -> StreamLoader | loaders.PlaceholderLoader:
    if options.reads_nothing:
        return loaders.PlaceholderLoader(budget.total_steps)
    return StreamLoader(
        build_stream_plan(config, start, data.tokenizer),
        start.cursor,
        options,
        first_step=start.first_step,
        num_steps=budget.total_steps,
        global_batch_size=data.layout.global_batch_size,
        gradient_accumulation_steps=data.layout.gradient_accumulation_steps,
    )


def build_eval_loaders(
    config: RunConfig,
    module: StageModule,
    data: RankData,
    sizes: Mapping[str, EvalSize],
    auxiliary_options: Options | None = None,
) -> dict[str, Any]:
    """Build the evaluation loaders only, by the names of their files; see `build_loaders`. sizes: by the same names."""
    built = {}
    for name, key in list_evaluations(config).items():
        if name in sizes:
            options = build_options(config, module, data, key)
            built[name] = loaders.build_eval_loader(data.datasets[key], options, sizes[name].rows)
            if (first := _choose_first(config, module, data, key, options, auxiliary_options)) is not None:
                built[name].first = loaders.build_eval_loader(*first, sizes[name].rows)
    return built


def _choose_first(
    config: RunConfig,
    module: StageModule,
    data: RankData,
    key: str,
    options: loaders.LoaderOptions,
    auxiliary_options: Options | None,
) -> tuple[Path, loaders.LoaderOptions] | None:
    """Return what the pass before a step or an evaluation reads: the same samples, as the model or an auxiliary one
    reads them, or those of the objective's own making; None where there is no such pass."""
    path, objective = data.datasets[key], get_objective(config)
    pass_over = objective.pass_over(config)
    if pass_over is None:
        return None
    if pass_over is PassOver.auxiliary:
        assert auxiliary_options is not None
        return path, auxiliary_options(key)
    if pass_over is PassOver.samples:
        return path, options
    columns = tuple(_list_columns(config, module, data, name_companion(key, objective.companion)))
    return path / objective.companion, dataclasses.replace(options, columns=columns)


def name_companion(key: str, companion: str) -> str:
    """Return the name of the samples of `Objective.companion` for a key's files."""
    return f"{key}, {companion}"


def list_scored(config: RunConfig, datasets: Mapping[str, Path]) -> dict[str, Path]:
    """Return the folders that a reference model has to score: key, or `name_companion` of it -> tokenized folder."""
    companion = get_objective(config).companion
    if not companion:
        return dict(datasets)
    return {**datasets, **{name_companion(key, companion): path / companion for key, path in datasets.items()}}
