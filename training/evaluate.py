"""`evaluate_only=true`: any checkpoint and any file through the pipeline, with neither an optimizer nor a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from filesystem import write_atomically
from models.losses.dpo import DPOLoss
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import step_of
from training.config.precision import DTYPES
from training.config.schema import RunConfig
from training.distributed.ranks import Ranks
from training.engine.pipeline_engine import evaluate, initialize_engine
from training.inputs.loaders import build_eval_loader, build_options
from training.inputs.step_budget import EvalSize
from training.objectives.dpo import Rewards
from training.objectives.reference_logprobs import prepare_reference
from training.objectives.user_loss import build_run_loss
from training.observability.metrics import Record, Reporter, describe_evaluation
from training.pipeline.module import StageModule, join_tensor_parallel
from training.setup import RunSetup


def evaluate_checkpoint(
    config: RunConfig,
    plan: RunSetup,
    datasets: dict[str, Path],
    size: EvalSize,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    ranks: Ranks,
    reporters: Sequence[Reporter],
) -> None:
    """Tells the figures, and writes them to `output_dir/evaluation.json`. All ranks call it, in a process group.

    reporters: they hear it too, as of the checkpoint's step; none on all ranks but the main one.
    """
    parallel = join_tensor_parallel(plan.layout, ranks.rank)
    loss = build_run_loss(config, plan.source.config, parallel)
    module = StageModule(
        plan.layers, plan.bounds, plan.source, DTYPES[config.precision], 0, loss=loss, compiles=config.compile, parallel=parallel,
        num_chunks=plan.layout.num_chunks,
    )  # fmt: skip
    engine = initialize_engine(module, config, plan.layout, trains=False)
    reference = {}
    if plan.reference is not None:
        options = build_options(config, plan.layout, module, tokenizer, ranks, "eval_file")
        reference = prepare_reference(engine, config, datasets, options, plan.reference, plan.source, ranks)
    loader = build_eval_loader(config, plan.layout, datasets, size, module, tokenizer, ranks, reference)
    rewards = Rewards(loss, engine.device) if isinstance(loss, DPOLoss) else None
    result: Record = {"eval_loss": evaluate(engine, loader.iterate(), len(loader), size.terms)}
    result |= rewards.finish_evaluation() if rewards is not None else {}
    result["eval_tokens"] = size.targets
    ranks.say(f"{plan.source.path} on {config.eval_file}: {describe_evaluation(result)}")
    if ranks.is_main:
        described = {"model": str(plan.source.path), "eval_file": config.eval_file, **result}
        write_atomically(folder.path / "evaluation.json", json.dumps(described, indent=2) + "\n")
    for reporter in reporters:
        reporter.report({"step": step_of(plan.resume_from) if plan.resume_from else 0, **result})
        reporter.close()
