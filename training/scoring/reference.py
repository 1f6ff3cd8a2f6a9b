"""The reference model of preference optimization: its log-probability of each answer, computed once by the pipeline
itself, before training.

The reference is the model at `model_name_or_path`. A run that starts there computes with its own weights, a LoRA run
with its adapter switched off. A run that resumes finds what the run that it continues has left; where that is missing,
or was computed by other weights, it loads the reference's weights, scores the data, and reloads its own. So no rank
ever holds two models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from batch import Column
from data.loading.loader import LoaderOptions
from data.storage.rows import RowPlan
from data.storage.scores import Scores, find_scores
from errors import UserError
from models.adapters.adapter import adapter_off
from models.weights.source import WeightSource
from training.distributed.ranks import Ranks
from training.engine.engine import Engine
from training.objectives.dpo import RowScore
from training.pipeline.module import StageModule
from training.scoring.scored import Scorer, find_missing, score, share

_WHAT = "reference log-probabilities"


def prepare_reference(
    engine: Engine,
    model_id: str,
    datasets: Mapping[str, Path],
    *,
    columns: tuple[Column, ...],
    options: LoaderOptions,
    reference: WeightSource,
    own: WeightSource,
    architecture: PretrainedConfig,
    ranks: Ranks,
) -> dict[str, Scores]:
    """Return config key -> the reference's log-probabilities, computed where they are missing.

    All ranks call it. model_id: of the reference, see `compute_model_id`. datasets: config key -> tokenized folder.
    columns: those of the objective. options: those of the training loader. own: the source of the module's weights,
    which may be the reference. architecture: that of both. Raises UserError where a log-probability is not finite, or
    the disk has no room.
    """
    plan, size, module = RowPlan(options.max_seq_length), options.group_size, engine.module
    found, missing = find_missing(
        datasets, lambda _, path: find_scores("reference", path, plan, columns, model_id), ranks
    )
    if not missing:
        ranks.say(f"{_WHAT}: found next to the tokens ({model_id})")
    else:
        measure = RowScore(architecture, module.parallel, module.sequence_part)
        scorer = Scorer(f"{_WHAT} of", "answers", measure, partial(_refuse, size))
        options = replace(options, micro_batch_size=options.micro_batch_size * size)
        with _as_reference(module, reference, own):
            for key in missing:
                score(engine, datasets[key], found[key], options, key=key, scorer=scorer, ranks=ranks)
                ranks.say(f"{_WHAT} of {key}: done, {found[key].num_values:,} answers")
    return share(found, datasets, ranks)


@contextmanager
def _as_reference(module: StageModule, reference: WeightSource, own: WeightSource) -> Iterator[None]:
    """Make the stage compute as the reference model does."""
    if module.adapter is not None:
        with adapter_off(module):
            yield
    elif own is reference:
        yield
    else:
        module.copy_weights(reference)
        yield
        module.copy_weights(own)


def _refuse(group_size: int, key: str, number: int, value: np.ndarray) -> UserError:
    record, answer = divmod(number, group_size)
    named = f"the {('chosen', 'rejected')[answer]} answer of pair" if group_size == 2 else "sample"
    return UserError(f"{_WHAT} of {key}: that of {named} {record} (counted from 0) is {value}; look at the weights")
