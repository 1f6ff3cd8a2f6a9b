"""Building a stage: nothing is initialised that will be loaded, nothing is built that is another rank's, nothing is
wider than it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.cases import Case, build_engine, this_rank
from support.configs import build_config
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SPLIT = [3, 4]  # layers of each stage


class Made(TorchDispatchMode):
    """Every floating tensor with a storage of its own that an operator makes, and every operator of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.random: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            if torch.Tag.nondeterministic_seeded in function.tags:
                self.random.append(str(function))
            if tensor.is_floating_point() and tensor.untyped_storage()._cdata not in given:
                self.bytes[str(tensor.dtype)] = self.bytes.get(str(tensor.dtype), 0) + tensor.untyped_storage().nbytes()
        return result


def build_counted(folder: Path) -> tuple[dict[str, int], list[str], list[int], int]:
    """(bytes made by dtype, operators of random numbers, decoder layers built, bytes of the stage's parameters)."""
    from models.weights.sources import open_weights
    from training.build import build_stage
    from training.setup import Run, build_setup

    config = build_config(
        "num_stages=2", f"partition_method={SPLIT}", "precision=bf16", "micro_batch_size=1", "global_batch_size=1"
    )
    setup = build_setup(config, open_weights(str(folder)), this_rank())
    decoder_layer = setup.layers[1].module_class
    built, init = [], decoder_layer.__init__

    def count(self: Any, config: Any, layer_idx: int, *others: Any) -> None:
        built.append(layer_idx)
        init(self, config, layer_idx, *others)

    with patch.object(decoder_layer, "__init__", count), Made() as made:
        module = build_stage(Run.of(setup, this_rank()))
    return made.bytes, made.random, built, sum(p.nbytes for p in module.parameters())


def test_a_stage_is_made_of_its_own_loaded_weights_alone(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", num_hidden_layers=4)  # in fp32: embedding, four decoder layers, norm, head
    for rank, (made, random, built, size) in enumerate(workers(2).run(build_counted, tmp_path / "hf")):
        assert made == {"torch.bfloat16": size} and random == []
        assert set(built) == ({0, 1}, {2, 3})[rank]


def list_warnings_of_a_step(case: Case) -> list[str]:

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, loader, *_ = build_engine(case)
        engine.train_step(loader.iterate(0, 1), 0, 1)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_weights_are_made_equal_outside_of_autograd(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, precision: str
) -> None:
    save_llama(tmp_path / "hf", tied=True)
    save_tokenizer(tmp_path / "hf")
    case = Case(
        tmp_path / "hf",
        save_records(tmp_path / "train.jsonl", 12),
        tmp_path,
        2,
        2,
        overrides=(f"precision={precision}",),
    )
    for texts in workers(2).run(list_warnings_of_a_step, case):
        assert not [text for text in texts if "autograd" in text]
