"""The length and the start of a run: the numbers on which all ranks must agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

import console
from data.loading.step_totals import bound_documents
from data.options import MeanOver
from data.order import GlobalOrder
from data.storage.rows import Rows, count_rows
from data.storage.tokenized import load_summary
from errors import UserError
from extension import list_own_names
from models.adapters.options import AdapterName, starts_from_base
from models.layers.documents import DocumentBounds
from models.storage.manifest import find_wrong_size
from models.weights.config_file import load_config
from training.checkpoint.best import Best, has_lost_patience
from training.checkpoint.resume import check_resumable
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import Identity, TrainerState, read_state
from training.checkpoint.timeline import CONTINUES, find_last_step, find_own
from training.config.changed_keys import list_changed_keys
from training.config.criterion import Criterion
from training.config.schema import RunConfig
from training.config.sources import list_evaluations
from training.distributed.topology import Layout
from training.inputs.datasets import (
    build_row_plan,
    describe_data,
    describe_stream,
    hash_evaluations,
    open_stream,
    recall_data,
)
from training.inputs.stream import StreamStart, compare_shards, resume_stream
from training.objectives.registry import describe_objective, get_objective
from training.optim.optimizer import describe_optimizer, describe_updates, recall_updates


@dataclasses.dataclass(frozen=True)
class EvalSize:
    """The size of an evaluation file. rows: in the unit of `micro_batch_size`. targets: tokens that carry loss. terms:
    the number of terms that its loss is a mean over. documents: bounds of its micro-batches; None when a user-defined
    collator sets positions."""

    rows: int
    targets: int
    terms: int
    documents: DocumentBounds | None = None


@dataclasses.dataclass(frozen=True)
class StepBudget:
    """The length of a run, computed on rank 0 from the data and broadcast.

    total_steps: the length of the learning rate schedule. last_step: the end of this run, which is earlier with
        `stop_after_steps`. evaluations: by the names of the evaluation files.
    stream: of a run that streams its training data.
    finished: a message that the run to resume has nothing left to do; empty when it has steps left.
    starts_elsewhere: whether the checkpoint that the run resumes from is in another folder than its own.
    """

    num_samples: int
    total_steps: int
    last_step: int
    evaluations: Mapping[str, EvalSize] = dataclasses.field(default_factory=dict)
    finished: str = ""
    stream: StreamStart | None = None
    starts_elsewhere: bool = False


_SHARED = "all steps of a folder have one config.json"


def compute_step_budget(
    config: RunConfig,
    layout: Layout,
    datasets: dict[str, Path],
    resume_from: Path | None,
    vocab_size: int,
    identity: Mapping[str, Identity] = MappingProxyType({}),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[StepBudget, TrainerState]:
    """Return the budget and the initial state of the run. datasets: key of the files -> tokenized folder.
    vocab_size: rows of the embedding that this run trains. identity: of the models and the tokenizer that this run
    reads. tokenizer: needed where training data are streamed.

    Raises UserError for a checkpoint that does not match the config, and when no step is left.
    """
    stream, num_samples = open_stream(config), 0
    if stream is not None:
        assert config.max_steps is not None and tokenizer is not None
        total_steps, data = config.max_steps, describe_stream(config, tokenizer)
    else:
        num_samples = count_rows(datasets["train_file"], build_row_plan(config, "train_file"))
        total_steps = count_total_steps(config, num_samples, layout.global_batch_size)
        data = describe_data(config, datasets["train_file"])
    start = TrainerState(
        step=0,
        num_tokens=0,
        num_stages=layout.num_stages,
        dp_size=layout.dp_size,
        global_batch_size=layout.global_batch_size,
        micro_batch_size=layout.micro_batch_size,
        num_samples=num_samples,
        total_steps=total_steps,
        seed=config.seed,
        precision=config.precision.value,
        optimizer=describe_optimizer(config),
        data=data | describe_objective(config) | describe_updates(config) | _describe_adapter(config),
        evaluated_on=hash_evaluations(config, datasets),
        identity=dict(identity),
        stream={} if stream is None else stream.to_json(),
        extensions=list_own_names(),
    )
    if resume_from is not None:
        saved = read_state(resume_from)
        start = _resume(start, saved, resume_from, config, stream, vocab_size)
        if stream is not None:
            known = saved.data if saved.format >= 7 else data | saved.data
            is_alike = saved.seed == config.seed and all(known.get(name) == value for name, value in data.items())
            stream = resume_stream(saved.stream, stream, start.step, console.say, is_alike)
    folder = RunFolder(config.output_dir)
    last_step = find_last_step(folder, config, start.step, total_steps)
    is_elsewhere = resume_from is not None and find_own(folder, resume_from) is None
    _check_steps_left(config, start, resume_from)
    evaluations, finished = measure_evaluations(config, layout, datasets), find_finished(config, start)
    return StepBudget(num_samples, total_steps, last_step, evaluations, finished, stream, is_elsewhere), start


def count_total_steps(config: RunConfig, num_samples: int, global_batch_size: int) -> int:
    """Return the steps of the learning rate schedule of a run that streams nothing. num_samples: the rows of
    `train_file`, or the groups of rows that stay together. Raises UserError where they are fewer than a global
    batch."""
    unit = "packed rows" if config.data.packing else get_objective(config).unit
    steps_per_epoch = GlobalOrder(num_samples, global_batch_size, config.seed, unit).steps_per_epoch
    return config.max_steps or max(1, round(config.num_train_epochs * steps_per_epoch))


def _describe_adapter(config: RunConfig) -> dict[str, str]:
    """Return the start of an adapter that is a part of the base weights: no other run reads its files rightly."""
    adapter = config.adapter
    if adapter.name is AdapterName.none or adapter.name_or_path or not starts_from_base(adapter.init_lora_weights):
        return {}
    return {"adapter.init_lora_weights": str(adapter.init_lora_weights)}


def _resume(
    start: TrainerState,
    saved: TrainerState,
    resume_from: Path,
    config: RunConfig,
    stream: StreamStart | None,
    vocab_size: int,
) -> TrainerState:
    """Return `start` advanced to the step of the checkpoint, whose state `saved` is."""
    is_own = find_own(RunFolder(config.output_dir), resume_from) is not None
    if is_own:
        _check_positions(saved, start, resume_from)
    before, after = ({}, {}) if stream is None or not saved.stream else compare_shards(saved.stream, stream)
    differences = check_resumable(
        dataclasses.replace(saved, data=recall_data(recall_updates(saved.data, start.data), start.data) | before),
        dataclasses.replace(start, data=start.data | after),
        resume_from,
        config.resume_allow_changes,
    )
    if is_own:  # after what names the keys by which rows were added
        _check_rows(resume_from, config.trust_remote_code, vocab_size)
    for difference in differences:
        console.say(f"resume: {difference}")
    if changed := list_changed_keys(resume_from.parent.parent / "config.yaml", config):
        console.say(f"resume: keys that have changed since the last start: {'; '.join(changed)}")
    comparable = saved.evaluated_on in ("", start.evaluated_on)
    if saved.best is not None and not comparable:
        console.say("resume: the evaluation files are others than before; the search for the best starts again")
    elif (saved.best is not None or saved.evaluation) and not _has_same_loss(saved, start, config):
        comparable = False
        if saved.best is not None:
            console.say("resume: the loss is another than before; the search for the best starts again")
    return dataclasses.replace(
        start,
        step=saved.step,
        num_tokens=saved.num_tokens,
        evaluation=saved.evaluation if comparable else {},
        best=_recall_best(saved, config, resume_from) if comparable else None,
        identity=saved.identity | start.identity,  # what only the first run has read stays on record
    )


def _has_same_loss(saved: TrainerState, start: TrainerState, config: RunConfig) -> bool:
    """Return whether evaluations of the checkpoint's run have the loss of this run."""
    before = recall_updates(saved.data, start.data)
    if saved.format < 7:  # which lacks some
        before = start.data | before
    return not before.keys() - start.data.keys() and all(
        before.get(name) == value for name, value in describe_objective(config).items()
    )


def _check_positions(saved: TrainerState, start: TrainerState, resume_from: Path) -> None:
    """Raise UserError where a run that continues in its own folder has other positions than the steps there: all have
    one config.json, by which the earlier ones would be read too."""
    was, now = (state.data.get("rope_parameters", "none") for state in (saved, start))
    if was != now:
        raise UserError(
            f"resume: rope_parameters was {was}, is {now}, and {_SHARED}; give the same, or go on elsewhere: "
            f"resume={resume_from} resume_allow_changes=true output_dir=ANOTHER"
        )


def _check_rows(resume_from: Path, trust_remote_code: bool, vocab_size: int) -> None:
    """Raise UserError where a run that continues in its own folder has another number of rows than its config.json. It
    cannot go on elsewhere either: most optimizers have no state of the added rows."""
    rows = load_config(resume_from.parent, trust_remote_code)[0].vocab_size
    if rows != vocab_size:
        raise UserError(
            f"resume: vocab_size was {rows}, is {vocab_size}, and {_SHARED}; give the same tokens, or start a new run "
            f"elsewhere: model_name_or_path={resume_from} output_dir=ANOTHER"
        )


def _recall_best(saved: TrainerState, config: RunConfig, resume_from: Path) -> Best | None:
    """Return the best evaluation of the run so far; None when the criterion has changed, or when the best checkpoint is
    to be loaded at the end and is not a complete one of this run. The start itself may be in another folder: the run
    saves it in its own."""
    best, folder = saved.best, RunFolder(config.output_dir)
    if best is None or best.criterion != Criterion.of(config):
        return None
    if not config.load_best_model_at_end or best.step == saved.step:
        return best
    step_dir = folder.find_checkpoint(best.step)
    if find_own(folder, resume_from) is None or find_wrong_size(step_dir) is not None:
        console.say(
            f"resume: the best checkpoint, {step_dir}, is missing or incomplete; the search for the best starts again"
        )
        return None
    return best


def find_finished(config: RunConfig, start: TrainerState) -> str:
    """Return a message when the run has finished before, else an empty string. A run that died between its last save
    and the end of its export has not finished: it still exports."""
    stopped_early = has_lost_patience(start.best, config.early_stopping_patience)
    folder = RunFolder(config.output_dir)
    completed = folder.read_completed()
    if completed.get("step", 0) > start.step and (not config.save_final or folder.export.exists()):
        return _find_finished_further(config, start, completed)
    if completed.get("step") != start.step:
        return ""
    if start.step < start.total_steps and not stopped_early:
        return ""
    more = "early_stopping_patience" if stopped_early else "max_steps or num_train_epochs"
    return (
        f"{config.output_dir} has finished: step {start.step} of {start.total_steps}, exported; nothing is left to do. "
        f"To train on, raise {more}"
    )


def _find_finished_further(config: RunConfig, start: TrainerState, completed: Mapping[str, Any]) -> str:
    """Return the same message for a run that ended at a later step than that of its newest checkpoint, known from
    completed.json only: it saved nothing at its end, or its checkpoints were removed afterwards.

    A scheduler or a supervisor restarts a run with `resume=auto` or `latest`; a run that names a checkpoint, or does
    not resume, is meant to train the steps after it."""
    if config.resume not in CONTINUES:
        return ""
    last, ended_by = completed["step"], completed.get("ended_by")
    stopped_early = ended_by == "early stopping" and config.early_stopping_patience is not None
    why = "its checkpoint is not there" if config.save_final else "not saved (save_final=false)"
    if last < start.total_steps and not stopped_early:
        console.say(
            f"resume: the previous run ended at step {last} ({ended_by}), {why}; training continues from step "
            f"{start.step}"
        )
        return ""
    folder = RunFolder(config.output_dir)
    afresh = "give overwrite_output_dir=true" if folder.export.exists() else "omit resume"
    again = f"give resume={folder.find_checkpoint(start.step)}" if start.step else afresh
    return (
        f"{config.output_dir} has finished: step {last} of {start.total_steps}, {why}; nothing is left to do. To train "
        f"from step {start.step} again, {again}"
    )


def _check_steps_left(config: RunConfig, start: TrainerState, resume_from: Path | None) -> None:
    if start.step > start.total_steps:
        raise UserError(
            f"resume: {resume_from} is at step {start.step} of {start.total_steps}, no step is left; raise max_steps"
        )
    named: list[tuple[str, list[int]]] = [("export_steps", config.export_steps)]
    named += [(key, [getattr(config, key) or 0]) for key in ("profile_step", "profile_trace")]
    named += [("skip_data_intervals", interval) for interval in config.skip_data_intervals]
    for key, steps in named:
        if beyond := [step for step in steps if step > start.total_steps]:
            raise UserError(
                f"{key}: there is no step {beyond[0]}, the run has {start.total_steps}; give steps of the run, or omit "
                "the key"
            )


def measure_evaluations(config: RunConfig, layout: Layout, datasets: Mapping[str, Path]) -> dict[str, EvalSize]:
    """Return the size of each evaluation file, by its name."""
    keys = list_evaluations(config)
    return {name: _measure_evaluation(config, layout, key, datasets[key]) for name, key in keys.items()}


def _measure_evaluation(config: RunConfig, layout: Layout, key: str, path: Path) -> EvalSize:
    plan, objective = build_row_plan(config, key), get_objective(config)
    rows, targets = Rows(path, plan, False, False), load_summary(path).num_targets
    counts = rows.piece_counts(np.arange(len(rows)))
    documents = None
    if config.data.collator is None:
        most = bound_documents(counts, layout.micro_batch_size * plan.rows_per_group)
        documents = DocumentBounds(most, config.max_seq_length)
    samples = int(counts.sum(dtype=np.int64)) // plan.group_size
    terms = samples if objective.mean_over is MeanOver.samples else targets
    return EvalSize(len(rows) // plan.rows_per_group, targets, terms, documents)
