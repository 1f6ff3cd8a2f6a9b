"""Adapters of stacked experts that an older peft has written, in another order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import build_lora, make_adapter
from support.families import build_family_config, save_family
from support.model_folders import assert_same_bits, export

from models.adapters.build import build_adapter
from models.adapters.folder import load_lora_config
from models.adapters.options import AdapterName, AdapterOptions
from models.adapters.stacks import (
    exchange,
    has_exchanged,
    join_experts,
    list_stack_adapters,
    restore_order,
    split_experts,
)
from models.architecture.lookup import build_layers
from models.weights.sources import open_weights

E, R, IN, OUT = 3, 2, 4, 5


def draw(*shape: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order."""
    return torch.randint(-9, 9, shape).float()


def test_an_exchanged_pair_is_the_same_product() -> None:
    torch.manual_seed(0)
    first, second = draw(E * R, OUT), draw(IN, R * E)
    # what peft 0.18 added to a stack [E, out, in]
    change = torch.einsum("o r e, e r i -> e i o", second.reshape(IN, R, E), first.reshape(E, R, OUT))
    new_first, new_second = exchange(first, second, E)
    assert (new_first.shape, new_second.shape) == ((E * R, IN), (OUT, R * E))
    # what peft 0.21 adds
    expected = torch.einsum("o r e, e r i -> e o i", new_second.reshape(OUT, R, E), new_first.reshape(E, R, IN))
    assert torch.equal(change, expected)
    again = exchange(new_first, new_second, E)
    assert torch.equal(again[0], first) and torch.equal(again[1], second)


def test_experts_are_split_and_joined() -> None:
    first, second = draw(E * R, IN), draw(OUT, R * E)
    joined = join_experts(*split_experts(first, second, E))
    assert torch.equal(joined[0], first) and torch.equal(joined[1], second)


@pytest.mark.parametrize(
    ("peft_version", "is_transposed", "expected"),
    [
        (None, False, True),  # 0.17
        ("0.18.1", False, True),
        ("0.18.1", True, False),
        ("0.19.0", False, True),
        ("0.19.0", True, True),
        ("0.19.1", False, False),
        ("0.19.1", True, False),
        ("0.21.3.dev0@4f2a", False, False),
        ("of a friend", False, False),
    ],
)
def test_versions_that_exchanged(peft_version: str | None, is_transposed: bool, expected: bool) -> None:
    assert has_exchanged(peft_version, is_transposed) == expected


@pytest.mark.parametrize(
    ("model_type", "version"),
    [("mixtral", "0.18.0"), ("qwen3_moe", "0.18.0"), ("qwen3_moe", None), ("gpt_oss", "0.19.0")],
)
def test_a_folder_of_an_older_peft_is_read(tmp_path: Path, model_type: str, version: str | None) -> None:
    """Merged, and as the start of a run. In qwen3_moe gate_up_proj is square, so that the version alone tells. None:
    0.17, which did not write it."""
    save_family(tmp_path / "base", model_type)
    make_adapter(tmp_path / "new", tmp_path / "base")
    write_as_older(tmp_path / "new", tmp_path / "old", version, model_type)
    expected, found = (export(tmp_path / name, tmp_path / f"{name}-merged") for name in ("new", "old"))
    assert_same_bits(load_file(found / "model.safetensors"), load_file(expected / "model.safetensors"))
    layers = build_layers(open_weights(str(tmp_path / "base")).config)
    starts = [
        build_adapter(
            AdapterOptions(name=AdapterName.lora, name_or_path=str(tmp_path / name)),
            layers,
            seed=0,
            base_name=str(tmp_path / "base"),
        )
        for name in ("new", "old")
    ]
    assert starts[0] is not None and starts[1] is not None
    assert_same_bits(dict(starts[1].tensors), dict(starts[0].tensors))


def write_as_older(folder: Path, output: Path, version: str | None, model_type: str) -> None:
    fields = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    layers = build_layers(build_family_config(model_type))
    for adapter in list_stack_adapters(layers, load_lora_config(folder)):
        names = (adapter.first, adapter.second)
        tensors[names[0]], tensors[names[1]] = exchange(tensors[names[0]], tensors[names[1]], adapter.num_experts)
    output.mkdir()
    save_file(tensors, output / "adapter_model.safetensors", metadata={"format": "pt"})
    del fields["peft_version"]
    written = {} if version is None else {"peft_version": version}
    (output / "adapter_config.json").write_text(json.dumps(fields | written))


def test_shapes_that_fit_no_order_stay() -> None:
    """The one that loads them names them."""
    config = build_family_config("mixtral")
    layers = build_layers(config)
    lora = build_lora(layers).config
    adapter = list_stack_adapters(layers, lora)[0]
    tensors = {adapter.first: draw(7, 3), adapter.second: draw(3, 7)}
    restored = restore_order(tensors, layers, lora)
    assert all(restored[name] is tensor for name, tensor in tensors.items())
