"""Loggers in addition to `metrics.jsonl`: one page per run in Weights & Biases or TensorBoard. Main rank only."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console import say
from errors import UserError
from filesystem import write_atomically
from training.checkpoint.run_folder import RunFolder
from training.config.schema import LoggerConfig, LoggerName
from training.observability.metrics import Record, Reporter, split_stages

# "config", "environment", "plan", ... -> text or values: facts of the run that are known before its first step.
Facts = Mapping[str, Any]


def build_loggers(
    config: LoggerConfig, output_dir: Path, facts: Facts, first_step: int | None, starts_over: bool = False
) -> list[Reporter]:
    """Build the logger of `logger=NAME`, if any. Raises UserError when the logger cannot be started.

    first_step: None for `evaluate_only`. starts_over: whether this is a new run in the folder of an earlier one, whose
    id at a tracker is deleted.
    """
    if config.name is LoggerName.wandb:
        return [WandbLogger(config, output_dir, facts, trains=first_step is not None, starts_over=starts_over)]
    if starts_over:
        RunFolder(output_dir).tracker_id.unlink(missing_ok=True)
    if config.name is LoggerName.tensorboard:
        return [TensorBoardLogger(output_dir, facts, first_step)]
    return []


class WandbLogger:
    """A run in Weights & Biases. `logger.mode=offline` writes to `output_dir/wandb/` and needs no network. A resumed
    run keeps its id; an evaluation has its own page. The runs of a sweep form one group."""

    def __init__(self, config: LoggerConfig, output_dir: Path, facts: Facts, trains: bool, starts_over: bool) -> None:
        import wandb  # slow to import, and off unless asked for

        id_file = RunFolder(output_dir).tracker_id
        keeps_id = trains and not starts_over and id_file.exists()
        run_id = id_file.read_text() if keeps_id else uuid.uuid4().hex[:12]
        try:
            self._run = wandb.init(
                project=config.project, name=config.run_name or output_dir.name, mode=config.mode.value,
                dir=str(output_dir), config=dict(facts), id=run_id, resume="allow",
                job_type="train" if trains else "evaluate",
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise UserError(
                f"logger=wandb: {str(error).splitlines()[0]}; log in with `wandb login`, or set logger.mode=offline"
            ) from None
        if trains and not keeps_id:
            write_atomically(id_file, run_id)
        say(f"Weights & Biases: {self._run.url or f'offline; later: wandb sync {Path(self._run.dir).parent}'}")

    def report(self, record: Record) -> None:
        self._run.log({key: value for key, value in split_stages(record).items() if key != "step"}, step=record["step"])

    def advance(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class TensorBoardLogger:
    """Curves in `output_dir/tensorboard/`. A resumed run removes what was written after the step that it resumes
    from."""

    def __init__(self, output_dir: Path, facts: Facts, first_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and off unless asked for

        self._writer = SummaryWriter(
            str(output_dir / "tensorboard"), purge_step=None if first_step is None else first_step + 1
        )
        for name, fact in facts.items():
            self._writer.add_text(
                name, f"```\n{fact}\n```" if isinstance(fact, str) else f"```json\n{json.dumps(fact, indent=2)}\n```"
            )

    def report(self, record: Record) -> None:
        for key, value in split_stages(record).items():
            if key != "step":
                self._writer.add_scalar(key, value, record["step"])

    def advance(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
