"""The pass in which a model scores the data once, before training: a reference model, or one that an extension reads.

It goes through the pipeline, each row once. The main rank writes the values next to the tokens
(`data/storage/scores.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from batch import Side, Targets
from console import progress
from data.components import describe_code, is_ours
from data.loading.columns import NUMBERS
from data.loading.loader import LoaderOptions, ScoringLoader
from data.storage.scores import Scores, ScoresWriter, write_scores
from errors import UserError
from models.weights.fingerprint import fingerprint_weights
from models.weights.source import WeightSource
from training.config.schema import RunConfig
from training.distributed.process import broadcast_from_main
from training.distributed.ranks import Ranks, find_ending, raise_together
from training.engine.engine import Engine
from training.objectives.objective import Scorer
from training.objectives.registry import describe_forward
from training.pipeline.preparation import Kernels

T = TypeVar("T")
_VERSION = 5  # raise it when the same model gives other values, or their files change
_FIRST_KERNELS = 5  # fields of `Kernels` that every name has; what was stored before a later one has it at its default
_CHUNK = 16  # micro-batches per stage: enough that filling and draining the pipeline is negligible


def compute_model_id(
    source: WeightSource, config: RunConfig, kernels: Kernels, special: Sequence[str], ranks: Ranks
) -> str:
    """Return a hash of the weights, by content, and of all that decides what they make of tokens. All ranks call it;
    the main rank reads the files.

    kernels: with which it computes. special: the layers that are held quantized, and the parameters that stay in fp32
    in a model of 16 bits. Raises UserError.
    """

    def compute() -> str:
        forward = sorted(describe_forward(config).items())
        rows = source.config.vocab_size  # the softmax is over all, and those that are added are in no file
        state = (_VERSION, fingerprint_weights(source), rows, _list_kernels(kernels), forward, list(special))
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    return broadcast_from_main(compute, ranks)


def describe_maker(maker: object) -> dict[str, Any]:
    """Return the code that makes scores, JSON values: an objective's, or that of a modifier with an auxiliary model;
    empty for those of this project, whose `_VERSION` says when they make others."""
    return {} if is_ours(maker) else {"code": describe_code(maker)}


def _list_kernels(kernels: Kernels) -> tuple[Any, ...]:
    """Return the values of the first fields, and of later ones up to the last that is not at its default."""
    values, usual = astuple(kernels), [field.default for field in fields(kernels)]
    while len(values) > _FIRST_KERNELS and values[-1] == usual[len(values) - 1]:
        values = values[:-1]
    return values


def find_missing(
    datasets: Mapping[str, Path], find: Callable[[str, Path], Scores], ranks: Ranks
) -> tuple[dict[str, Scores], dict[str, Scores]]:
    """Return the scores of each key of the data, and those that no earlier run has left, of several keys with the same
    data for one. All ranks call it; the main rank reads what is there.

    datasets: key -> tokenized folder. find: returns the scores of a key, as `find_scores` does.
    """
    found = broadcast_from_main(lambda: {key: find(key, path) for key, path in datasets.items()}, ranks)
    keys = {scores.folder: key for key, scores in found.items()}
    whole = broadcast_from_main(lambda: [folder for folder in keys if found[keys[folder]].is_whole()], ranks)
    return found, {key: found[key] for folder, key in keys.items() if folder not in whole}


def share(scores: Scores, path: Path, key: str, ranks: Ranks, model_key: str = "") -> Scores:
    """Return the scores of a key as this rank reads them. A host that does not see those of the main rank gets a copy
    of small ones in its own tokenized folder, `path`. All ranks call it. model_key: what names the
    model. Raises UserError for others."""
    is_seen = scores.is_whole(compares_bytes=scores.is_small)
    if not scores.is_small:
        error = UserError(
            f"{model_key}: {scores.folder} was written by the main rank, and this host does not see it; put "
            "data.cache_dir on a file system that all hosts share"
        )
        raise_together(None if is_seen else error)
        return scores
    own = scores if is_seen else replace(scores, folder=path / scores.folder.name)
    needed = [False] * ranks.world_size
    dist.all_gather_object(needed, not own.is_whole())
    if any(needed):
        values = broadcast_from_main(scores.load, ranks)
        copies = needed[ranks.rank] and ranks.local_rank == 0
        write_together(lambda: write_scores(own, key, values) if copies else None, f"scores of {key}", own.folder)
    return own


def score(
    engine: Engine, path: Path, scores: Scores, options: LoaderOptions, scorer: Scorer, key: str, ranks: Ranks
) -> None:
    """Score the rows of a tokenized folder that are not done. All ranks call it. options: as its ranks read the data.
    key: of the data. Raises UserError where the disk has no room, or a value is not finite."""
    what = f"{scorer.what} of {key}"
    if text := scorer.begin(scores):
        ranks.say(f"{what}: {text}")
    writer = write_together(
        lambda: ScoresWriter(scores, key, scorer.values, scorer.fewer) if ranks.is_main else None, what, scores.folder
    )
    done = broadcast_from_main(lambda: writer.rows_done if writer is not None else 0, ranks)
    if done:
        ranks.say(f"{what}: {done:,} {scorer.unit} are done, the pass continues there")
    seen = [each for each in options.columns if each.column.side is Side.first_stage]
    options = replace(options, row_plan=scores.plan, columns=(NUMBERS[scores.per], *scorer.columns, *seen))
    loader = ScoringLoader(path, options, _CHUNK * engine.layout.num_stages, done)
    kept = _KeptValues(scorer)
    total = sum(map(loader.count_rows, range(len(loader))))
    with progress(what, total, scorer.unit, shown=ranks.is_main) as bar:
        for number in range(len(loader)):
            batches, rows = loader.chunk(number)
            engine.forward_only(batches, len(rows), kept)
            error, found = None, kept.take()
            for numbers, *values in _gather(found if engine.module.reports_loss else [], scores, engine.device):
                if writer is not None:
                    error = error or _find_wrong(numbers, values, key, scorer)
                    writer.write(numbers, values)
            raise_together(error)
            num_rows = loader.count_rows(number)
            write_together(partial(writer.advance, num_rows) if writer else lambda: None, what, scores.folder)
            bar.advance(num_rows)
    write_together(lambda: writer.finish(scorer.note(writer.values)) if writer else None, what, scores.folder)
    if ranks.is_main:
        ranks.say(f"{what}: done, {scorer.describe(scores)}")


class _KeptValues:
    """Keeps what a model measures of micro-batches, each with its numbers, until `take`."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._kept: list[tuple[Tensor, ...]] = []

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Targets) -> Tensor:
        self._kept.append((targets.columns["numbers"], *self._scorer.measure(outputs, targets)))
        return outputs[0].new_zeros(())

    def take(self) -> list[tuple[Tensor, ...]]:
        kept, self._kept = self._kept, []
        return kept


def _gather(found: Sequence[tuple[Tensor, ...]], scores: Scores, device: torch.device) -> Iterator[list[np.ndarray]]:
    """Yield the numbers and values of all ranks, rank after rank. All ranks exhaust it. found: of this rank."""
    none = [torch.empty(0, dtype=torch.int64, device=device)]
    none += [torch.empty(0, *column.shape, dtype=column.dtype, device=device) for column in scores.columns]
    own = [torch.cat(parts) for parts in zip(none, *found)]
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(own[0])], device=device))
    for source, count in enumerate(torch.cat(counts).tolist()):
        if count:
            parts = own if source == dist.get_rank() else [part.new_empty(count, *part.shape[1:]) for part in own]
            # To all ranks, over their common connection: one from each to the main rank would take memory of its GPU.
            for part in parts:
                dist.broadcast(part, source)
            yield [part.cpu().numpy() for part in parts]


def _find_wrong(numbers: np.ndarray, values: Sequence[np.ndarray], key: str, scorer: Scorer) -> UserError | None:
    """Return the error of the lowest number that has a value which is not finite; None without one."""
    for column in values:
        wrong = np.flatnonzero(~np.isfinite(column.reshape(len(column), -1)).all(axis=1))
        if len(wrong):
            first = wrong[numbers[wrong].argmin()]
            return scorer.refuse(key, int(numbers[first]), column[first])
    return None


def write_together(write: Callable[[], T], what: str, where: Path) -> T:
    """Return what `write` returns. All ranks call it, and it ends all of them where one could not write: a rank that
    ended alone would leave the others in their next collective.

    what: begins the message. where: named by it if the error names no file. Raises UserError.
    """
    written: list[T] = []
    error = None
    try:
        written.append(write())
    except UserError as mistake:
        error = mistake
    except OSError as mistake:
        error = UserError(
            f"{what}: {mistake.filename or where} cannot be written: {mistake.strerror or mistake}; make room, or "
            "choose another folder with data.cache_dir",
            find_ending(mistake),
        )
    raise_together(error)
    return written[0]
