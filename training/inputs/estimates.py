"""How many rows and steps a run will have, before its data are tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from transformers import PretrainedConfig

from data.encoders.kinds import find_kind
from data.options import LengthPolicy
from data.sources.records import resolve_sources
from data.sources.selection import Selection
from data.storage.disk import RowEstimate, estimate_rows
from errors import UserError
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.timeline import find_last_step
from training.config.schema import RunConfig
from training.config.sources import list_evaluations
from training.inputs.datasets import (
    build_encoding,
    build_row_plan,
    build_selection,
    complete_labels,
    has_tokenizer,
    list_entries,
    load_extended,
)
from training.inputs.skipped_data import count_trained
from training.inputs.step_budget import count_total_steps


def count_steps(config: RunConfig, total_steps: int | None) -> int | None:
    """Return the optimizer steps that a run from its beginning trains; None where `total_steps`, those of its learning
    rate schedule, are not known."""
    if total_steps is None:
        return None
    last_step = find_last_step(RunFolder(config.output_dir), config, 0, total_steps)
    return count_trained(0, last_step, config.skip_data_intervals)


def estimate_steps(config: RunConfig, global_batch_size: int, architecture: PretrainedConfig) -> tuple[int | None, str]:
    """Return the steps of the learning rate schedule: max_steps, or those of as many epochs of its rows; None where
    neither is known. With it a note where it is an estimate, or where the rows are too few; else an empty one."""
    if config.max_steps is not None:
        return config.max_steps, ""
    rows = estimate_num_rows(config, architecture)
    if rows is None:
        return None, ""
    try:
        steps = count_total_steps(config, rows.num_rows, global_batch_size)
    except UserError as error:
        return None, str(error)
    if rows.is_exact:
        return steps, ""
    companion = build_row_plan(config, "train_file").companion
    unknown = f", without the room that packed rows keep for {companion} samples: a run has more" if companion else ""
    return steps, f"steps: estimated from records of train_file{unknown}"


def estimate_scored(config: RunConfig, global_batch_size: int, architecture: PretrainedConfig) -> int | None:
    """Return the rows that a model scores once before training: those of `train_file`, as many as `max_steps` takes
    where they are not known, and those of evaluation files that are known; None where none are."""
    counted = (
        estimate_num_rows(config, architecture, key) for key in ("train_file", *list_evaluations(config).values())
    )
    trained, *evaluated = (None if rows is None else rows.num_rows for rows in counted)
    if trained is None and config.max_steps is not None:
        trained = config.max_steps * global_batch_size
    return None if trained is None else trained + sum(filter(None, evaluated))


def estimate_num_rows(config: RunConfig, architecture: PretrainedConfig, key: str = "train_file") -> RowEstimate | None:
    """Return the rows of the files of a key in the unit of `micro_batch_size`: their records where each is one, else as
    the first ones are tokenized and packed. None where they depend on tokens and there is no tokenizer."""
    selection, plan, folder = (
        build_selection(config.data, key),
        build_row_plan(config, key),
        str(find_model_folder(config)),
    )
    rows = None
    with suppress(UserError):  # of the data: the run reports it
        sources = [resolve_sources(entry, key) for entry in list_entries(config, key)]
        if plan.is_trivial and config.data.length_policy is LengthPolicy.truncate and selection.filter is None:
            per_record = find_kind(config.data.name).count_samples(config.data) // plan.group_size
            rows = _estimate_records(sources, selection, per_record)
            if selection.hold_out is None and rows is not None:
                return rows
        if has_tokenizer(config, folder):
            labelled = complete_labels(config, architecture)
            encoding = build_encoding(labelled, key, load_extended(labelled, folder))
            return estimate_rows(sources, encoding, plan, config.data.cache_dir)
    return rows


def _estimate_records(sources: Sequence[Sequence[str]], selection: Selection, per_record: int) -> RowEstimate | None:
    """Return the rows of the records that are taken of files of JSON lines; None for any other files. sources: the
    files of each entry. per_record: rows of a record: an answer of a pair is one where answers are liked or not."""
    if any(Path(source).suffix != ".jsonl" for entry in sources for source in entry):
        return None
    counts = (sum(map(_count_lines, entry)) for entry in sources)
    taken = sum(min(count, selection.max_records or count) for count in counts)
    return RowEstimate(per_record * round(selection.estimate_taken(taken)), selection.hold_out is None)


def _count_lines(source: str) -> int:
    with open(source, "rb") as lines:
        return sum(1 for line in lines if line.strip())


def find_model_folder(config: RunConfig) -> Path:
    """Return the folder that has the config and the tokenizer of the model, if it is there."""
    path = Path(config.model_name_or_path).expanduser()
    return path.parent if path.name.startswith("global_step") else path
