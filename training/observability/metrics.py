"""Reports of a run while it trains: `metrics.jsonl`, `events.jsonl` and a progress bar; training/observability/
run_page.py and loggers.py have the other reporters. Main rank only.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from console import Progress, is_terminal, say
from filesystem import write_atomically
from masking import mask
from training.config.schema import RunConfig
from training.inputs.skipped_data import count_trained
from training.objectives.registry import get_objective

# Field -> number, a list of one number per stage (or layer), or None, such as the gradient norm when all steps were
# skipped.
Record = dict[str, Any]
_BY_LAYER = ("router_other_choices",)  # lists of one number per layer, None for a dense one
PER_SECOND = ("tokens_per_second", "mfu", "bubble", "imbalance")  # whose mean is over time: of others, over steps


@dataclass(frozen=True)
class Event:
    """Something that happened after `step` optimizer steps.

    kind: resumed, abandoned, save, skipped, warning, picture or end. text: one line; of a picture its file in
    output_dir. time: seconds since the epoch.
    """

    step: int
    kind: str
    text: str
    time: float = field(default_factory=time.time)


class Reporter:
    """A receiver of the records and events of a run. A subclass overrides what it needs; the run has a list of them."""

    def report(self, record: Record) -> None:
        """Take a line of metrics.jsonl."""

    def note(self, event: Event) -> None:
        """Take an event."""

    def advance(self, step: int) -> None:
        """Take note that `step` optimizer steps are done."""

    def close(self) -> None:
        """Finish. Nothing is reported afterwards."""


class _LinesFile(Reporter):
    """A file of JSON lines, each with its step."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Truncate an existing file to the lines of the first `first_step` steps, then append. A run from step 0 keeps
        nothing."""
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if first_step and _step_of(line) <= first_step]
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._file = open(path, "a", buffering=1)

    def _write(self, line: Record) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


class MetricsFile(_LinesFile):
    """`metrics.jsonl`, one line per report."""

    def report(self, record: Record) -> None:
        self._write(record)


class EventsFile(_LinesFile):
    """`events.jsonl`, one line per event, without secrets."""

    def note(self, event: Event) -> None:
        self._write(mask(asdict(event)))


def _step_of(line: str) -> float:
    """Return the step of a line; infinite for one that is incomplete because its run died."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


class ProgressBar(Reporter):
    """The progress bar of a run on a terminal; plain lines elsewhere."""

    def __init__(self, config: RunConfig, first_step: int, total_steps: int) -> None:
        self._config, self._total = config, total_steps
        self._bar = Progress("step", total_steps, done=first_step, stays=True) if is_terminal() else None

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.reach(step)

    def report(self, record: Record) -> None:
        if "eval_loss" in record:
            say(f"step {record['step']}: {describe_evaluation(record, self._config)}")
            return
        # The load of experts is noise in a run that does not balance it.
        routed = _describe_routers(record) if self._config.moe.shapes_routers else []
        metrics = [*_list_shown(record, "", self._config), *routed]
        if self._bar is not None:
            rates = f"lr {record['learning_rate']:.2e}", f"{record['tokens_per_second']:,.0f} tokens/s"
            self._bar.note(", ".join([f"loss {record['loss']:.4f}", *rates, *metrics]))
        else:
            steps_left = count_trained(record["step"], self._total, self._config.skip_data_intervals)
            shown = "".join(f"{each}  " for each in metrics)
            say(
                f"step {record['step']}/{self._total}  loss {record['loss']:.4f}  {shown}{_describe_norm(record)}  "
                f"lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
                f"{_duration(steps_left * record['step_time'])} left"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.end()


def split_stages(record: Record) -> Record:
    """Return the record without None values, its lists split into one figure per stage: `stage0/wait_time`, ... ; or
    per layer: `layer0/router_other_choices`, ..."""
    split: Record = {}
    for key, value in record.items():
        unit = "layer" if key in _BY_LAYER else "stage"
        listed = isinstance(value, list)
        figures = {f"{unit}{number}/{key}": each for number, each in enumerate(value)} if listed else {key: value}
        split |= {name: figure for name, figure in figures.items() if figure is not None}
    return split


def _describe_norm(record: Record) -> str:
    norm, skipped = record["grad_norm"], record.get("skipped_steps", 0)
    scaled = f", loss scale {record['loss_scale']:g}" if "loss_scale" in record else ""
    return f"grad_norm {'-' if norm is None else f'{norm:.3f}'}" + (f" ({skipped} skipped{scaled})" if skipped else "")


def _list_shown(record: Record, prefix: str, config: RunConfig) -> list[str]:
    """Return the metrics that the run's objective shows, in words. prefix: of their names in the record."""
    found = ((text, record.get(prefix + name)) for name, text in get_objective(config).shown)
    return [text.format(value) for text, value in found if value is not None]


def _describe_routers(record: Record) -> list[str]:
    losses = [f"router {name} {record[key]:.4f}" for name in ("aux", "z") if (key := f"router_{name}_loss") in record]
    if "expert_load_max" not in record:
        return losses
    return [*losses, f"expert load {record['expert_load_min']:.2f} to {record['expert_load_max']:.2f}"]


def describe_evaluation(record: Record, config: RunConfig) -> str:
    """Return an evaluation in words: the loss, what the objective shows, and the perplexity of a cross entropy of
    tokens; then the same for each named file."""
    described = [f"{name}: {_describe_file(file, config)}" for name, file in _split_files(record).items()]
    return "; ".join([_describe_file(record, config), *described])


def _split_files(record: Record) -> dict[str, Record]:
    """Return the results of each named file under the keys of a single one; empty for a single one."""
    files: dict[str, Record] = {match[1]: {} for key in record if (match := re.fullmatch("eval_(.+)_tokens", key))}
    for key, value in record.items():
        name = max((name for name in files if key.startswith(f"eval_{name}_")), key=len, default=None)
        if name is not None:
            files[name][f"eval_{key.removeprefix(f'eval_{name}_')}"] = value
    return files


def _describe_file(record: Record, config: RunConfig) -> str:
    figures = [f"eval_loss {record['eval_loss']:.4f}", *_list_shown(record, "eval_", config)]
    if get_objective(config).predicts_tokens and config.loss is None:
        figures.append(f"perplexity {perplexity(record['eval_loss']):.2f}")
    if "eval_token_accuracy" in record:
        figures.append(f"token accuracy {record['eval_token_accuracy']:.1%}")
    return "  ".join(figures)


def perplexity(loss: float) -> float:
    """Return the exponential of a loss, finite for any finite loss."""
    return math.exp(min(loss, 700))  # exp overflows above


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
