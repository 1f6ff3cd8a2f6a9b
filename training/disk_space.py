"""The disk space of checkpoints and exports, known before a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from errors import UserError
from formatting import render_bytes
from models.adapters.options import AdapterName
from models.storage.folders import check_disk_space
from models.weights.passthrough import find_passthrough
from models.weights.source import WeightSource
from training.config.precision import DTYPES
from training.config.schema import Precision, RunConfig
from training.export_receiver import takes_steps
from training.optim.optimizer import count_state_bytes

SPARE_BYTES = 16 * 2**20  # headers, state, manifest


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint, without headers and the manifest. passthrough: of what training does not change, once for
    all checkpoints and in each export."""

    weights: int
    optimizer: int
    passthrough: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer

    @property
    def export(self) -> int:
        return self.weights + self.passthrough


def estimate_size(config: RunConfig, num_parameters: int, num_trainable: int, num_starts: int = 0) -> CheckpointSize:
    """Return the size of one checkpoint of a run; adapters are saved without the model, with what they have started as
    (`num_starts` elements). The counts are of all layers, shared parameters once."""
    saved = num_parameters if config.adapter.name is AdapterName.none else num_trainable + num_starts
    weights = saved * DTYPES[config.precision].itemsize
    if config.save_weights_only:
        return CheckpointSize(weights, 0)
    masters = 0 if config.precision is Precision.fp32 else 4
    return CheckpointSize(weights, round(num_trainable * (masters + count_state_bytes(config))))


def measure_passthrough(source: WeightSource, config: RunConfig) -> int:
    """Return the bytes that a run of `source` copies unchanged; adapters are saved without them."""
    is_whole = config.adapter.name is AdapterName.none
    return find_passthrough(source, config.export_unused).nbytes if is_whole else 0


def check_room(config: RunConfig, size: CheckpointSize, checkpoints: Path) -> None:
    """Check that the disk has room for a checkpoint, before weights are read instead of after the last step. Raises
    UserError when it does not, and the run saves any if nothing ends it early. checkpoints: the folder of all steps."""
    regular = config.save_steps or config.save_epochs or config.save_minutes or config.save_final
    if not (regular or config.export_steps or config.keep_best or config.load_best_model_at_end):
        return
    try:
        check_disk_space(checkpoints, size.total + SPARE_BYTES)
    except UserError as error:
        raise UserError(f"a checkpoint of this run does not fit: {error}", error.ending) from None


def count_disk_bytes(config: RunConfig, size: CheckpointSize, num_steps: int | None = None) -> int | None:
    """Return an upper bound of the disk space that checkpoints and exports of a run take, without those that somebody
    asks for while it runs. num_steps: that the run trains, where they are known. None where nothing limits the number
    of checkpoints.

    A run saves at its end and at `export_steps` (`TrainingLoop._finish_step`), and as often as other keys say. The last
    `keep_last` are kept, those that are the best, and next to them the one that is being written. An export that takes
    the place of `hf/` is written next to it.
    """
    num_exported = len(set(config.export_steps))
    evaluates_often = config.eval_steps or config.eval_epochs
    saves_often = (
        config.save_epochs
        or config.save_minutes
        or takes_steps(config)
        or (config.load_best_model_at_end and evaluates_often)
    )
    limits = []
    if num_steps is not None:
        last_step = num_steps + sum(last - first + 1 for first, last in config.skip_data_intervals)
        limits.append(last_step)
        if config.save_steps and not saves_often:
            limits.append(last_step // config.save_steps + num_exported + 1)
    if not saves_often and not config.save_steps:
        limits.append(num_exported + 1)
    if config.keep_last is not None:
        limits.append(config.keep_last + (config.keep_best or 0) + config.load_best_model_at_end + 1)
    if not limits:
        return None
    num_exports = num_exported + 1 + takes_steps(config)
    return min(limits) * size.total + size.passthrough + num_exports * size.export


def render_disk(size: CheckpointSize, config: RunConfig, num_steps: int | None) -> str:
    """Return the space of a checkpoint, an export and all of a run. num_steps: as in `count_disk_bytes`."""
    whole = count_disk_bytes(config, size, num_steps)
    in_all = (
        "as many as are saved (keep_last=null)" if whole is None else f"at most {render_bytes(whole)} of them in all"
    )
    return f"{render_bytes(size.total)} a checkpoint, {render_bytes(size.export)} an export; {in_all}"
