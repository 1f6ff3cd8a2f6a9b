"""The code and the command line of `docs/add_your_data.md`, run as written."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import Case, merge, train_case, worst_difference
from support.configs import build_config
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from torch.nn import functional as F

from data.collator import Checked, PadRight
from data.options import MixtureUnit
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from training.config.sources import parse_files
from training.inputs.custom import build_collator

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "add_your_data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("override", [line.split("' ")[0].strip("'") for line in blocks("text")[0].splitlines()])
def test_mixtures_are_read(override: str) -> None:
    files = parse_files(build_config(override).train_file, "train_file", MixtureUnit.samples)
    assert len(files.entries) == 2 and files.mixture is not None and files.mixture.shares in ((3, 1), (2, 0.5))


def train_there(folder: Path, case: Case) -> dict[str, Any]:
    """Train with the modules in `folder`."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return train_case(case)
    finally:
        os.chdir(before)


def test_user_defined_collator_and_loss(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """Two stages give the weights of a plain loop with torch's label smoothing, on inputs with the same tokens
    hidden."""
    (tmp_path / "my_losses.py").write_text(blocks("python")[1])
    (tmp_path / "data.jsonl").write_text(save_records(tmp_path / "records.jsonl", 8).read_text())
    overrides = [argument for argument in shlex.split(blocks("bash")[2]) if "_target_" in argument]
    assert len(overrides) == 2
    model = save_llama(tmp_path / "model", num_hidden_layers=2)
    save_tokenizer(tmp_path / "model")
    overrides += ["num_workers=1"]
    case = Case(tmp_path / "model", tmp_path / "data.jsonl", tmp_path, 2, 2, steps=1, overrides=tuple(overrides))
    trained = merge(workers(2).run(train_there, tmp_path, case))
    data = TokenizedDataset(next(path for path in (tmp_path / "cache").iterdir() if path.is_dir()), True, True)
    loss_sum, num_targets = 0.0, 0
    for sample in range(len(data)):
        input_ids, labels = (
            torch.from_numpy(read(sample).astype("int64"))[None] for read in (data.input_ids, data.labels)
        )
        input_ids[:, 6::7] = 0
        targets = labels[:, 1:].flatten()
        logits = model(input_ids).logits[:, :-1].flatten(0, 1)
        loss_sum += F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2, ignore_index=-100)
        num_targets += int((targets != -100).sum())
    loss = loss_sum / num_targets
    loss.backward()
    torch.testing.assert_close(trained["losses"], [loss.item()], rtol=1e-5, atol=0)
    expected = {name: (parameter - 0.5 * parameter.grad).detach() for name, parameter in model.named_parameters()}
    assert worst_difference(trained["weights"], expected)[0] < 1e-5


@dataclass(frozen=True)
class Careless(PadRight):
    what: str = ""

    def collate_labels(self, labels, shape):
        collated = super().collate_labels(labels, shape)
        return (
            collated[:, :-1]
            if self.what == "shape"
            else collated.float()
            if self.what == "dtype"
            else collated.fill_(-100)
        )


@pytest.mark.parametrize(
    "what, message",
    [
        ("shape", "data.collator my.Careless: labels must be a tensor torch.int64 [2, 4], not torch.int64 [2, 3]"),
        ("dtype", "data.collator my.Careless: labels must be a tensor torch.int64 [2, 4], not torch.float32 [2, 4]"),
        (
            "targets",
            "data.collator my.Careless: 0 targets in a micro-batch that had 2; "
            "the encoder decides which tokens carry loss",
        ),
    ],
)
def test_a_careless_collator_is_refused(what: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Checked(Careless(what), "data.collator my.Careless").collate_labels(
            [np.array([-100, 5, 6]), np.array([7])], (2, 4)
        )
    assert str(caught.value) == message


class Unsendable(PadRight):
    def __init__(self) -> None:
        self.__dict__["choose"] = lambda token: token


def test_a_collator_that_workers_cannot_have_is_refused() -> None:
    target = f"{__name__}.Unsendable"
    data = build_config(f"data.collator={{_target_: {target}}}").data
    assert build_collator(data, 0)
    with pytest.raises(UserError, match=rf"data.collator {target} cannot be sent to worker processes \(.*lambda"):
        build_collator(data, 1)
