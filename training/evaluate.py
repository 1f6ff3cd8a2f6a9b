"""`evaluate_only=true`: the evaluation of any checkpoint on any file, through the pipeline and without an optimizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from filesystem import write_atomically
from masking import mask
from models.storage.steps import step_of
from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig
from training.distributed.ranks import Ranks
from training.evaluations import Evaluations
from training.observability.metrics import Reporter, describe_evaluation


def evaluate_checkpoint(
    config: RunConfig,
    evaluations: Evaluations,
    *,
    source: Path,
    resume_from: Path | None,
    folder: RunFolder,
    ranks: Ranks,
    reporters: Sequence[Reporter],
) -> None:
    """Evaluate, print the record, and write it to `output_dir/evaluation.json`. All ranks call it, in a process group.

    source: the folder of the weights, or of the adapter on them. resume_from: the training checkpoint, if the weights
    are from one. reporters: they get the record too, at the checkpoint's step; empty on all ranks but the main one.
    """
    result = evaluations.run()
    eval_file = config.eval_file or "held out of train_file"
    ranks.say(f"{source} on {eval_file}: {describe_evaluation(result, config)}")
    if ranks.is_main:
        described = {"model": str(source), "eval_file": eval_file, **result}
        write_atomically(folder.path / "evaluation.json", json.dumps(mask(described), indent=2) + "\n")
    for reporter in reporters:
        reporter.report({"step": step_of(resume_from) if resume_from else 0, **result})
        reporter.close()
