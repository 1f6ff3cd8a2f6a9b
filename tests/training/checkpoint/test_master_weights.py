"""The fp32 weights of a run in 16 bits, read back from its optimizer's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from errors import UserError
from models.layers.layer import Layer
from training.checkpoint.master_weights import MasterWeights

LAYER = Layer("model.head.", nn.Linear, (4, 6))


def save(folder: Path, rank: int, **fragments: torch.Tensor) -> None:
    save_file(
        {key: tensor.clone() for key, tensor in fragments.items()},
        folder / f"optimizer-stage_00-dp_0{rank}.safetensors",
    )


def test_what_an_adapter_has_started_as_stays(tmp_path: Path) -> None:
    """Its layer files have [A; A0] and [B -B0], the optimizer's A and B alone."""
    first, second = torch.randn(4, 3), torch.randn(5, 4)
    names = [f"q_proj.lora_{matrix}.default.weight" for matrix in "AB"]
    pairs = zip(names, (first[:2], second[:, :2]), strict=True)
    save(tmp_path, 0, **{f"weight/model.head.{name}@0": half.flatten() for name, half in pairs})
    rounded = dict(zip(names, (first.bfloat16(), second.bfloat16()), strict=True))
    found = MasterWeights(tmp_path, starts_from_base=True).restore(LAYER, rounded)
    assert torch.equal(found[names[0]], torch.cat([first[:2], first[2:].bfloat16()]))
    assert torch.equal(found[names[1]], torch.cat([second[:, :2], second[:, 2:].bfloat16()], dim=1))


def test_fragments_and_shards_make_up_the_weights(tmp_path: Path) -> None:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    save(tmp_path, 0, **{"weight/model.head.weight@0": weight.flatten()[:10], "exp_avg/model.head.weight@0": weight[0]})
    save(tmp_path, 1, **{"weight/model.head.weight@10": weight.flatten()[10:]})
    masters = MasterWeights(tmp_path)
    rounded = {"weight": weight.bfloat16(), "bias": bias.bfloat16()}
    found = masters.restore(LAYER, rounded)
    assert torch.equal(found["weight"], weight) and found["bias"] is rounded["bias"]
    halves = {f"weight/model.head.weight[4:{first}+2]@0": weight[:, first : first + 2].flatten() for first in (0, 2)}
    save(tmp_path, 0, **halves)
    (tmp_path / "optimizer-stage_00-dp_01.safetensors").unlink()
    assert torch.equal(MasterWeights(tmp_path).restore(LAYER, rounded)["weight"], weight)
    save(tmp_path, 0, **{"weight/model.head.weight@0": weight.flatten()[:10]})
    with pytest.raises(UserError, match=r"lacks 14 fp32 weights of 'model.head.weight'"):
        MasterWeights(tmp_path).restore(LAYER, rounded)
    save(tmp_path, 0, **{"exp_avg/model.head.weight@0": weight.flatten()})
    assert not MasterWeights(tmp_path)  # of a run in fp32
