"""The reference model of preference optimization: its log-probability of each answer, computed once by the pipeline
itself, before training.

The reference is the model at `model_name_or_path`. A run that starts there computes with its own weights, a LoRA run
with its adapter switched off. A run that resumes finds the file of the run that it continues; where that is missing, or
was computed by other weights, it loads the reference's weights, computes the file, and reloads its own. So no rank ever
holds two models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from console import progress
from data.loading.loader import LoaderOptions, ScoringLoader
from data.storage.reference import is_whole, reference_path, save_reference
from data.storage.rows import RowPlan
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from models.adapters.adapter import adapter_off
from models.weights.fingerprint import fingerprint_weights
from models.weights.source import WeightSource
from training.config.schema import RunConfig
from training.distributed.process import broadcast_from_main
from training.distributed.ranks import Ranks, raise_together
from training.engine.engine import Engine
from training.objectives.dpo import RowScore
from training.objectives.registry import describe_forward
from training.pipeline.module import Kernels, StageModule
from training.scoring.writing import write_together

_VERSION = 4  # raise it when the same model gives other log-probabilities, or their file changes
_CHUNK = 16  # micro-batches per stage: enough that filling and draining the pipeline is negligible


def compute_model_id(
    reference: WeightSource, config: RunConfig, kernels: Kernels, quantized: Sequence[str], ranks: Ranks
) -> str:
    """Return a hash of the weights, by content, and of all that decides what they make of tokens. All ranks call it;
    the main rank reads the files.

    kernels: with which it computes. quantized: the layers in 4 bits. Raises UserError.
    """

    def compute() -> str:
        forward = sorted(describe_forward(config).items())
        state = (_VERSION, fingerprint_weights(reference), astuple(kernels), forward, list(quantized))
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    return broadcast_from_main(compute, ranks)


def prepare_reference(
    engine: Engine,
    model_id: str,
    datasets: Mapping[str, Path],
    *,
    options: LoaderOptions,
    reference: WeightSource,
    own: WeightSource,
    architecture: PretrainedConfig,
    ranks: Ranks,
) -> dict[str, Path]:
    """Return config key -> file of the reference's log-probabilities, computed where it is missing.

    All ranks call it; those that hold the loss can read the files. model_id: of the reference, see `compute_model_id`.
    datasets: config key -> tokenized folder. options: those of the training loader. own: the source of the module's
    weights, which may be the reference. architecture: that of both. Raises UserError where a log-probability is not
    finite, or the disk has no room.
    """
    files = {key: reference_path(path, model_id) for key, path in datasets.items()}
    module = engine.module
    missing = torch.zeros(len(files), device=engine.device)
    if module.has_loss:
        found = [is_whole(file, len(TokenizedDataset(datasets[key], False, False))) for key, file in files.items()]
        missing += torch.tensor(found, device=engine.device).logical_not()
    dist.all_reduce(missing)
    # Grouped by folder: both keys may name the same data. Hosts may find their files in different folders.
    to_compute = {datasets[key]: key for key, is_missing in zip(files, missing.tolist()) if is_missing}
    if not to_compute:
        ranks.say(f"reference log-probabilities: found next to the tokens ({model_id})")
        return files
    with _as_reference(module, reference, own):
        for path, key in to_compute.items():
            what = f"reference log-probabilities of {key}"
            log_probabilities = _score(engine, path, options, architecture, what=what, ranks=ranks)
            save = (
                partial(save_reference, files[key], log_probabilities, ranks.rank) if module.has_loss else lambda: None
            )
            write_together(save, what, files[key])  # which waits for all: each may read what another has written
    return files


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


def _score(
    engine: Engine, path: Path, options: LoaderOptions, architecture: PretrainedConfig, *, what: str, ranks: Ranks
) -> np.ndarray:
    """Return the log-probability of each sample's targets, float64 [N], on every rank."""
    per_sample = replace(
        options,
        row_plan=RowPlan(options.max_seq_length),
        micro_batch_size=options.micro_batch_size * options.group_size,
        columns=(),
    )
    dataset = TokenizedDataset(path, False, False)
    loader = ScoringLoader(path, per_sample, _CHUNK * engine.layout.num_stages)
    found = torch.zeros(len(dataset), dtype=torch.float64, device=engine.device)
    score = RowScore(architecture, engine.module.parallel)
    with progress(what, len(dataset), "answers", shown=ranks.is_main) as bar:
        for number in range(len(loader)):
            batches, rows = loader.chunk(number)
            for ids, output in zip(rows, engine.forward_only(batches, len(rows), score)):
                if engine.module.reports_loss:
                    found[torch.from_numpy(ids).to(found.device)] = output[: len(ids)]
            bar.advance(sum(map(len, rows)))
    dist.all_reduce(found)
    ranks.say(f"{what}: done, {len(dataset):,} answers")
    _check_finite(found, what, options.group_size)
    return found.cpu().numpy()


def _check_finite(log_probabilities: torch.Tensor, what: str, group_size: int) -> None:
    wrong = (~log_probabilities.isfinite()).nonzero()
    error = None
    if len(wrong):
        pair, answer = divmod(int(wrong[0]), group_size)
        named = f"the {('chosen', 'rejected')[answer]} answer of pair" if group_size == 2 else "sample"
        error = UserError(
            f"{what}: that of {named} {pair} (counted from 0) is "
            f"{log_probabilities[wrong[0]].item()}; look at the weights"
        )
    raise_together(error)
