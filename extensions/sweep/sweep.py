"""`--multirun`: one run after another, one for each combination of the given values, and a table of their results.

    python trainer_base_ds_mp.py --multirun num_gpus=2 -cn llama_tiny_pp2 learning_rate=1e-4,3e-4

Hydra's own sweeps would start the runs inside the ranks of one launch, where a second engine is not possible.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from console import pluralize
from errors import UserError
from filesystem import hash_ends, write_atomically
from masking import mask, mask_text
from scripts.supervise import Supervisor
from training.cli.command_line import (
    SHARED_COMMAND,
    CheckNames,
    check_command_line,
    compose_command,
    parse_arguments,
)
from training.config.schema import AUTO, to_typed
from training.distributed.ranks import find_free_port
from training.entry import check_names

NUM_GPUS = "num_gpus"  # ranks of each launch: read only here
DATA_FILE = "sweep_data.json"  # in output_dir: `SweptRun.files` of the finished run
NAMES_FILES = (
    "train_file", "eval_file", "model_name_or_path", "tokenizer_name_or_path", "name_or_path", "teacher",
    "chat_template",
)  # fmt: skip  # keys whose values may be names in the working directory; others name a path with a `/` in it
NOT_READ = ("output_dir", "cache_dir", "resume")  # keys of what a run writes, or of how it starts
WEIGHTS = (".safetensors", ".bin", ".pt")
HOW_TO_START = ("resume", "overwrite_output_dir")  # keys that do not change what a finished run has made
MOST_READABLE = 150  # characters of a folder's name before its hash; a file system takes 255
Launch = Callable[[Sequence[str]], int]


class Interrupted(Exception):
    """A signal ends the sweep, and has ended the run that was under way."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep."""

    swept: tuple[str, ...]  # "learning_rate=1e-4"
    arguments: tuple[str, ...]  # the arguments of the training command
    output_dir: Path
    config: dict[str, Any] = field(default_factory=dict)  # of the run, as its config.yaml will have it

    @property
    def name(self) -> str:
        return mask_text(" ".join(self.swept)) or "(no values to choose from)"

    def read_completed(self) -> dict[str, Any] | None:
        """Return the content of `completed.json`; None when no run of this config has finished in the folder."""
        file = self.output_dir / "completed.json"
        if not file.is_file() or next(self.list_differences(), None) is not None:
            return None
        return json.loads(file.read_text())

    @cached_property
    def files(self) -> dict[str, str]:
        """Path -> what tells its content, of each file on this machine that the config names (records, models,
        tokenizers, templates, the code of components), when first asked for."""
        return {path: _describe_file(Path(path)) for path in sorted(set(_list_files(self.config)))}

    def note_files(self, files: Mapping[str, str]) -> None:
        """Write down which files a run of this job that has finished was trained on, as `files` describes them."""
        if (self.output_dir / "completed.json").is_file():
            write_atomically(self.output_dir / DATA_FILE, json.dumps({"files": files}, indent=2) + "\n")

    def list_differences(self) -> Iterator[str]:
        """Yield, in words, the keys whose values differ from those of the last run in the folder, if there was one."""
        file = self.output_dir / "config.yaml"
        before = mask(OmegaConf.to_container(OmegaConf.load(file))) if file.is_file() else {}
        assert isinstance(before, dict)
        after = _fill_in(self.config, before)
        for key in sorted({*before, *after} - set(HOW_TO_START)) if before else []:
            if before.get(key) != after.get(key):
                yield f"{key} was {before.get(key)}, is {after.get(key)}"
        noted = self.output_dir / DATA_FILE
        if noted.is_file():  # an earlier version did not write it
            trained_on = json.loads(noted.read_text())
            before, now = trained_on.get("files"), self.files
            if before is None:  # up to version 1.1, of records alone
                before, now = trained_on, {path: now[path] for path in trained_on if path in now}
            yield from (f"{path} has changed" for path, found in now.items() if before.get(path) != found)


def _fill_in(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with what a run chooses or finds itself, and its config.yaml then has, as in `before`: the
    recomputation of `auto`, and the labels of the data."""
    filled, data = dict(config), config.get("data") or {}
    if filled.get("activation_checkpoint_interval") == AUTO:
        keys = ("activation_checkpoint_interval", "activation_checkpoint_mode")
        filled |= {key: before[key] for key in keys if key in before}
    if "labels" in data and data["labels"] is None:
        filled["data"] = data | {"labels": (before.get("data") or {}).get("labels")}
    return filled


def run(script: Path, arguments: Sequence[str], config_name: str) -> int:
    """Run what `--multirun` asks for, one launcher after the other, as `Extension.flags` calls it. Return the exit
    code. Raises UserError inside a launch, and for a mistake in any of the runs before the first one starts."""
    if "RANK" in os.environ:
        raise UserError(
            "--multirun starts a launcher for each run, so start it without one: python trainer_base_ds_mp.py "
            "--multirun num_gpus=2 ..."
        )
    jobs, num_gpus = plan_sweep(arguments, script.parent / "conf", config_name, check_names)
    return run_sweep(jobs, num_gpus, build_launch(script, num_gpus, jobs[0].output_dir.parent))


def plan_sweep(
    arguments: Sequence[str], config_dir: Path, default_config: str, check_names: CheckNames | None = None
) -> tuple[list[SweptRun], int]:
    """Return the runs that a command line asks for, each with its own folder below `output_dir`, and the ranks of each.

    arguments, check_names: see `check_command_line`. Raises UserError for a mistake in any of the runs, before the
    first one starts.
    """
    options, _ = parse_arguments(arguments)
    kept = [argument for argument in arguments if not _is_multirun(argument) and argument not in options.overrides]
    given = [override for override in options.overrides if override.partition("=")[0] != NUM_GPUS]
    num_gpus = _read_num_gpus(options.overrides)
    # Each run is checked below; this check is for overrides that cannot be expanded, which would raise there.
    check_command_line([*kept, *(_first_value(override) for override in given)], config_dir, default_config)
    choices = [_expand(override) for override in given]
    jobs = []
    for overrides in itertools.product(*choices):
        swept = tuple(override for override, choice in zip(overrides, choices) if len(choice) > 1)
        check_command_line([*kept, *overrides], config_dir, default_config, check_names)
        composed = compose_command(options, overrides, config_dir, default_config)
        output_dir = Path(composed.output_dir) / _name_folder(swept)
        config = _list_values(composed) | {"output_dir": str(output_dir)}
        jobs.append(SweptRun(swept, (*kept, *overrides, f"output_dir={output_dir}"), output_dir, config))
    _check_folders(jobs)
    return jobs, num_gpus


def _is_multirun(argument: str) -> bool:
    """Return whether an argument is `--multirun`, its short form or a beginning of it, as argparse takes them."""
    return argument == "-m" or ("--multirun".startswith(argument) and len(argument) > 2)


def _name_folder(swept: Sequence[str]) -> str:
    """Return a folder name that needs no quotes on a command line: the swept values as far as they can be read, and a
    hash of them, since different values may read the same. Empty where nothing is swept."""
    if not swept:
        return ""
    readable = "__".join(re.sub(r"[^\w.+-]", "_", override.replace("=", "-", 1)) for override in swept)
    return f"{readable[:MOST_READABLE]}-{hashlib.sha256(repr(swept).encode()).hexdigest()[:8]}"


def _list_values(composed: DictConfig) -> dict[str, Any]:
    """Return the keys and values of a run as its config.yaml has them."""
    config = to_typed(composed, unread=[str(key) for key in composed if OmegaConf.is_missing(composed, str(key))])
    values = mask(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(config)))))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _check_folders(jobs: Sequence[SweptRun]) -> None:
    """Raise UserError when two jobs share a folder, or when a job's folder has the result of another config that the
    job would neither continue nor delete."""
    for job in jobs:
        if sum(other.output_dir == job.output_dir for other in jobs) > 1:
            raise UserError(f"--multirun: {job.name} is given twice; give each value once")
        goes_on = job.config["resume"] is not None or job.config["overwrite_output_dir"]
        if (job.output_dir / "completed.json").is_file() and not goes_on:
            for difference in job.list_differences():
                raise UserError(
                    f"--multirun: {job.output_dir} holds a finished run of another config ({difference}); give "
                    "another output_dir, or overwrite_output_dir=true to run it again"
                )


def _list_files(value: Any, key: str = "") -> Iterator[str]:
    """Yield the files on this machine that the values of a config name, those in folders included. key: of the value,
    or of the list or mapping that it is in."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from () if name in NOT_READ else _list_files(inner, name if name in NAMES_FILES else key)
        yield from _find_code(value.get("_target_"))
    elif isinstance(value, list):
        for inner in value:
            yield from _list_files(inner, key)
    elif isinstance(value, str) and (key in NAMES_FILES or os.sep in value):
        path = os.path.expanduser(value)
        matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        for match in matches or glob.glob(f"{glob.escape(path)}.*"):  # the latter: an indexed corpus
            found = Path(match).rglob("*") if os.path.isdir(match) else [Path(match)]
            yield from (str(file) for file in found if file.is_file())


def _find_code(target: Any) -> Iterator[str]:
    """Yield the file of a component's module."""
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(str(target).rpartition(".")[0]) if target else None
        if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
            yield spec.origin


def _describe_file(file: Path) -> str:
    """Return the size of a file and a hash: of weights every tensor counts, of others both ends."""
    content = hash_ends(file)
    if file.suffix in WEIGHTS:
        from models.weights.fingerprint import fingerprint_file  # imported on use: torch takes seconds

        with suppress(UserError):  # a damaged one, which its run refuses
            content = fingerprint_file(file)
    return f"{file.stat().st_size} {content}"


def _read_num_gpus(overrides: Sequence[str]) -> int:
    values = [override.partition("=")[2] for override in overrides if override.startswith(f"{NUM_GPUS}=")]
    if len(values) != 1 or not values[0].isdecimal() or int(values[0]) < 1:
        raise UserError(
            f"--multirun starts a launcher for each run: give the number of ranks with {NUM_GPUS}=N, such as "
            f"{NUM_GPUS}=2"
        )
    return int(values[0])


def _expand(override: str) -> list[str]:
    """Return the overrides of a sweep: "seed=1,2" -> ["seed=1", "seed=2"]; ranges and choices as in Hydra."""
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return [override]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


def _first_value(override: str) -> str:
    try:
        return _expand(override)[0]
    except Exception:  # of Hydra's grammar: check_command_line has a clearer message
        return override


def run_sweep(jobs: Sequence[SweptRun], num_gpus: int, launch: Launch) -> int:
    """Run the jobs in order, except those that have finished before. Returns 0 when all have finished, 128 + N when
    signal N has ended the sweep before, else 1.

    num_gpus: the ranks of each job. launch: runs the training command with these arguments, and returns its exit code;
    it may raise Interrupted.
    """
    unfinished = 1
    try:
        for number, job in enumerate(jobs, 1):
            if job.read_completed() is not None:
                print(
                    f"run {number} of {len(jobs)}: {job.name} has already finished: {job.output_dir}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            print(
                f"\nrun {number} of {len(jobs)} on {pluralize(num_gpus, 'rank')}: {job.name}",
                file=sys.stderr,
                flush=True,
            )
            before = job.files
            launch(job.arguments)
            job.note_files(before)
    except Interrupted as interrupted:
        unfinished = 128 + interrupted.signum
    print(render_table(jobs))
    return 0 if all(job.read_completed() is not None for job in jobs) else unfinished


def build_launch(trainer: Path, num_gpus: int, folder: Path) -> Launch:
    """Return a function that starts the trainer through DeepSpeed's launcher, which prints only errors. From now on
    signals are for its ranks, which save and exit, and it raises Interrupted then.

    folder: that of all runs, whose name is that of their group in Weights & Biases.
    """
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)
    os.environ[SHARED_COMMAND] = "true"
    supervisor = Supervisor(folder, stuck_seconds=None)

    def launch(arguments: Sequence[str]) -> int:
        launcher = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--quiet",
            "--num_gpus",
            str(num_gpus),
            "--master_port",
            str(find_free_port()),
        ]
        code = 0 if supervisor.signum else supervisor.run([*launcher, str(trainer), *arguments])[0]
        if supervisor.signum:  # also one that has come between two runs
            raise Interrupted(supervisor.signum)
        return code

    return launch


def render_table(jobs: Sequence[SweptRun]) -> str:
    """Return a table with one line per run: swept values, last step, eval loss (the lowest marked) and folder."""
    completed = [job.read_completed() or {} for job in jobs]
    losses = [record["eval_loss"] for record in completed if "eval_loss" in record]
    rows = [("run", "step", "eval_loss", "folder")]
    for job, record in zip(jobs, completed):
        loss = record.get("eval_loss")
        mark = " *" if loss is not None and loss == min(losses) else ""
        rows.append(
            (
                job.name,
                str(record.get("step", "failed")),
                "-" if loss is None else f"{loss:.4f}{mark}",
                str(job.output_dir),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n" + "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
