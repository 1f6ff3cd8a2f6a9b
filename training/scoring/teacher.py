"""The pass in which the teacher of a distillation scores the data, before the student is built: through the pipeline,
at the teacher's own layout, each row once. The result lies next to the tokens (`data/loading/teacher.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from console import progress
from data.loading.columns import TARGET_NUMBERS
from data.loading.loader import LoaderOptions, ScoringLoader
from data.loading.teacher import TeacherSize, TeacherWriter, is_whole, read_covered
from data.storage.rows import RowPlan, Rows
from errors import UserError
from models.losses.distill_loss import TeacherLoss, TeacherTop
from training.distributed.process import broadcast_from_main
from training.distributed.ranks import Ranks, raise_together
from training.engine.engine import Engine
from training.scoring.writing import write_together

_CHUNK = 16  # micro-batches per stage, as of a reference (`reference_logprobs.py`)


@dataclass(frozen=True)
class TeacherTask:
    """Data to score. key: of the files. path: their tokenized folder. folder: where the distributions go."""

    key: str
    path: Path
    plan: RowPlan
    folder: Path

    def measure(self, top_k: int) -> TeacherSize:
        rows = Rows(self.path, self.plan, False, False)
        return TeacherSize(int(rows.num_targets.sum(dtype="int64")), top_k)


def find_missing(tasks: Sequence[TeacherTask], top_k: int, ranks: Ranks) -> list[TeacherTask]:
    """Return the tasks that no earlier run has done, of several with the same data one. All ranks call it; the main
    rank reads what is there and says so."""

    def find() -> list[Path]:
        found = [task.folder for task in tasks if is_whole(task.folder, task.measure(top_k))]
        for task in tasks:
            if task.folder in found:
                ranks.say(f"teacher of {task.key}: found next to the tokens, {_describe_covered(task.folder, top_k)}")
        return found

    found = broadcast_from_main(find, ranks)
    return list({task.folder: task for task in tasks if task.folder not in found}.values())


def check_visible(tasks: Sequence[TeacherTask]) -> None:
    """Raise UserError, together on all ranks, where a rank does not see what the main rank has written."""
    unseen = [task.folder for task in tasks if not task.folder.is_dir()]
    raise_together(
        UserError(
            f"distill.teacher: {unseen[0]} was written by the main rank, and this host does not see it; put "
            "data.cache_dir on a file system that all hosts share"
        )
        if unseen
        else None
    )


def score(
    engine: Engine, task: TeacherTask, options: LoaderOptions, loss: TeacherLoss, top_k: int, ranks: Ranks
) -> None:
    """Score the rows that are not done. All ranks call it. engine: of the teacher. options: as its ranks read the
    files. Raises UserError where the disk has no room, or a probability is not finite."""
    size, what = task.measure(top_k), f"teacher of {task.key}"
    ranks.say(f"{what}: {size.describe()}")
    writer = write_together(
        lambda: TeacherWriter(task.folder, size, task.key) if ranks.is_main else None, what, task.folder
    )
    done = broadcast_from_main(lambda: writer.rows_done if writer is not None else 0, ranks)
    if done:
        ranks.say(f"{what}: {done:,} rows are done, the pass continues there")
    options = replace(options, row_plan=task.plan, columns=(TARGET_NUMBERS,))
    loader = ScoringLoader(task.path, options, _CHUNK * engine.layout.num_stages, done)
    total = sum(map(loader.count_rows, range(len(loader))))
    with progress(what, total, "rows", shown=ranks.is_main) as bar:
        for number in range(len(loader)):
            batches, rows = loader.chunk(number)
            engine.forward_only(batches, len(rows), loss)
            for top in _gather(loss.take() if engine.module.reports_loss else [], engine.device, task, top_k):
                assert writer is not None
                writer.write(*(tensor.cpu().numpy() for tensor in (top.numbers, top.token_ids, top.log_probabilities)))
            num_rows = loader.count_rows(number)
            write_together(partial(writer.advance, num_rows) if writer else lambda: None, what, task.folder)
            bar.advance(num_rows)
    write_together(writer.finish if writer else lambda: None, what, task.folder)
    if ranks.is_main:
        ranks.say(f"{what}: done, {_describe_covered(task.folder, top_k)}")


def _describe_covered(folder: Path, top_k: int) -> str:
    return f"{top_k} tokens cover {read_covered(folder):.2%} of its probability"


def _gather(found: Sequence[TeacherTop], device: torch.device, task: TeacherTask, top_k: int) -> Iterator[TeacherTop]:
    """Yield on the main rank what all ranks have found, rank after rank. All ranks exhaust it. Raises UserError on all
    of them for a probability that is not finite."""
    rank = dist.get_rank()
    numbers = [torch.empty(0, dtype=torch.int64, device=device), *(top.numbers for top in found)]
    token_ids = [torch.empty(0, top_k, dtype=torch.int32, device=device), *(top.token_ids for top in found)]
    logs = [torch.empty(0, top_k + 1, device=device), *(top.log_probabilities for top in found)]
    own = [torch.cat(numbers), torch.cat(token_ids), torch.cat(logs)]
    count = torch.where(own[2].isfinite().all(), len(own[0]), -1).reshape(1).to(torch.int64)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    _check_finite(min(counts).item() < 0, task)
    for source, number in enumerate(torch.cat(counts).tolist()):
        if not number:
            continue
        if source == rank != 0:
            for tensor in own:
                dist.send(tensor, 0)
        elif rank == 0 and source:
            received = [torch.empty(number, *tensor.shape[1:], dtype=tensor.dtype, device=device) for tensor in own]
            for tensor in received:
                dist.recv(tensor, source)
            yield TeacherTop(*received)
        elif rank == 0:
            yield TeacherTop(*own)


def _check_finite(is_wrong: bool, task: TeacherTask) -> None:
    if is_wrong:
        raise_together(
            UserError(f"teacher of {task.key}: a log-probability is not finite; look at the weights of distill.teacher")
        )
