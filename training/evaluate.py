"""`evaluate_only=true`: any checkpoint and any file through the pipeline, with neither an optimizer nor a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from filesystem import write_atomically
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import step_of
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
    """Prints the figures, and writes them to `output_dir/evaluation.json`. All ranks call it, in a process group.

    source, resume_from: where the weights come from; the training checkpoint that it is, if it is one.
    reporters: get them too, as of the checkpoint's step; none on all ranks but the main one.
    """
    result = evaluations.run()
    ranks.say(f"{source} on {config.eval_file}: {describe_evaluation(result)}")
    if ranks.is_main:
        described = {"model": str(source), "eval_file": config.eval_file, **result}
        write_atomically(folder.path / "evaluation.json", json.dumps(described, indent=2) + "\n")
    for reporter in reporters:
        reporter.report({"step": step_of(resume_from) if resume_from else 0, **result})
        reporter.close()
