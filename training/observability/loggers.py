"""Loggers in addition to `metrics.jsonl`: one page per run in Weights & Biases or TensorBoard. Main rank only.

A logger that fails is reported once and dropped. The run continues, and metrics.jsonl has every line.
"""

from __future__ import annotations

import json
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from console import say
from filesystem import write_atomically
from training.checkpoint.run_folder import RunFolder
from training.config.schema import LoggerConfig, LoggerName
from training.observability.metrics import Record, Reporter, split_stages

# "config", "environment", "plan", ... -> text or values: facts of the run that are known before its first step.
Facts = Mapping[str, Any]


def build_loggers(config: LoggerConfig, output_dir: Path, facts: Facts, first_step: int | None) -> list[Reporter]:
    """Build the logger of `logger=NAME`, if any. first_step: None for `evaluate_only`."""
    if config.name is LoggerName.wandb:
        return [IsolatedLogger("wandb", lambda: WandbLogger(config, output_dir, facts, trains=first_step is not None))]
    if config.name is LoggerName.tensorboard:
        return [IsolatedLogger("tensorboard", lambda: TensorBoardLogger(output_dir, facts, first_step))]
    return []


class IsolatedLogger:
    """A logger that cannot end a run: what it raises is printed, and it is dropped."""

    def __init__(self, name: str, build: Callable[[], Reporter]) -> None:
        self._name = name
        self._logger: Reporter | None = None
        self._logger = self._try(build)

    def report(self, record: Record) -> None:
        self._call("report", record)

    def advance(self, step: int) -> None:
        self._call("advance", step)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._logger is not None:
            self._try(partial(getattr(self._logger, method), *arguments))

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            traceback.print_exception(error, file=sys.stdout)  # the rank's log
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._drop(
                f"logger={self._name}: {reason}; nothing more is logged there. The run continues, with all of its "
                "figures in metrics.jsonl"
            )
            return None

    def _drop(self, message: str) -> None:
        self._logger = None
        say(message)


class WandbLogger:
    """A run in Weights & Biases. `logger.mode=offline` writes to `output_dir/wandb/` and needs no network. A resumed
    run keeps its id; an evaluation has its own page. The runs of a sweep form one group."""

    def __init__(self, config: LoggerConfig, output_dir: Path, facts: Facts, trains: bool) -> None:
        import wandb  # slow to import, and off unless asked for

        run_id, id_file = uuid.uuid4().hex[:12], RunFolder(output_dir).tracker_id
        if trains and id_file.exists():
            run_id = id_file.read_text()
        elif trains:
            write_atomically(id_file, run_id)
        self._run = wandb.init(
            project=config.project, name=config.run_name or output_dir.name, mode=config.mode.value,
            dir=str(output_dir), config=dict(facts), id=run_id, resume="allow",
            job_type="train" if trains else "evaluate",
        )  # fmt: skip
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
