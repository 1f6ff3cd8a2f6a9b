"""Scores on several hosts: ranks of one machine, each with a cache of its own, are hosts without a common disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import save_tokenizer
from support.workers import WorkerError, WorkerGroup

from batch import Column, Per, Source
from data.encoders.sft import SFTEncoder
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan
from data.storage.scores import Scores, find_scores, write_scores
from data.storage.tokenizing import prepare_dataset
from errors import Ending, UserError
from extensions.distillation.scores import list_teacher_columns
from training.scoring import scored

REFERENCE = Column("reference", torch.float64, Per.document, Source.scored)


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """The same tokenized folder on each host."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "legs", "completion": "eight"}\n' * 5)
    encoding = Encoding(SFTEncoder(), save_tokenizer(tmp_path / "tokenizer"), 64)
    given: dict[str, Any] = {"key": "train_file", "encoding": encoding, "cache_dir": tmp_path / "cache", "log": None}
    path = prepare_dataset([str(tmp_path / "a.jsonl")], **given)
    return [path, Path(shutil.copytree(path, tmp_path / "other" / path.name))]


def share_scores(hosts: list[Path], columns: tuple[Column, ...], seen: bool) -> tuple[Scores, bytes]:
    """Returns what this rank reads of what the main rank has written; other ranks see it or not."""
    import torch.distributed as dist

    from training.distributed.ranks import Ranks
    from training.scoring.scored import find_missing, share

    rank = dist.get_rank()
    ranks, datasets = Ranks(rank, 2, 0, 1), {"train_file": hosts[rank]}

    def find(_: str, path: Path) -> Scores:
        return find_scores("scores", path, RowPlan(64), columns, "0")

    found, missing = find_missing(datasets, find, ranks)
    if rank == 0 and missing:
        values = [np.full((found["train_file"].num_values, *column.shape), -1) for column in columns]
        write_scores(found["train_file"], "train_file", values)
    dist.barrier()
    if rank and not seen:  # as where there is no such path
        found = {key: replace(scores, folder=Path("/nowhere") / scores.folder.name) for key, scores in found.items()}
    scores = share(found["train_file"], hosts[rank], "train_file", ranks, "distill.teacher")
    return scores, scores.find_file(scores.folder, columns[0]).read_bytes()


def test_hosts_that_see_the_scores_of_the_main_rank_read_them(
    workers: Callable[[int], WorkerGroup], hosts: list[Path]
) -> None:
    for columns in ((REFERENCE,), list_teacher_columns(3)):
        main, other = workers(2).run(share_scores, hosts, columns, True)
        assert main == other and main[0].folder.parent == hosts[0]
    assert not list(hosts[1].glob("scores-*"))


def test_a_host_that_does_not_see_them_gets_a_copy_of_small_ones(
    workers: Callable[[int], WorkerGroup], hosts: list[Path]
) -> None:
    for _ in range(2):  # the second time both are there
        main, other = workers(2).run(share_scores, hosts, (REFERENCE,), False)
        assert [scores.folder.parent for scores, _ in (main, other)] == hosts and main[1] == other[1]
        assert other[0].is_whole()
        assert not list(hosts[1].glob("*.tmp"))


def test_a_host_that_does_not_see_those_of_a_teacher_ends_all_ranks(
    workers: Callable[[int], WorkerGroup], hosts: list[Path]
) -> None:
    message = "distill.teacher: /nowhere/.* was written by the main rank, and this host does not see it"
    with pytest.raises(WorkerError, match=message):
        workers(2).run(share_scores, hosts, list_teacher_columns(3), False)


@pytest.mark.parametrize(
    ("number", "ending"), [(errno.ENOSPC, Ending.DISK), (errno.EIO, Ending.DISK), (errno.EACCES, Ending.MISTAKE)]
)
def test_a_run_ends_as_what_the_disk_refuses(number: int, ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[UserError | None] = []
    monkeypatch.setattr(scored, "raise_together", found.append)

    def refuse() -> None:
        raise OSError(number, "refused", "/cache/x")

    with pytest.raises(IndexError):
        scored.write_together(refuse, "scores", Path("/cache"))
    (error,) = found
    assert error is not None and error.ending is ending and "/cache/x cannot be written: refused" in str(error)
