"""How ranks split a sequence: the mode that `context_parallel_mode` selects for a model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import ROOT
from transformers import AutoConfig

from errors import UserError
from models.architecture.lookup import ARCHITECTURES
from models.parallel.shard import ContextParallel
from models.sharding.context_parallel import check_sequences, choose_parts


def make_config(model_type: str = "llama", **fields: Any) -> Any:
    return AutoConfig.for_model(model_type, hidden_size=96, num_attention_heads=6, num_key_value_heads=2, **fields)


@pytest.mark.parametrize(
    ("model_type", "mode", "size", "tensor_parallel_size", "is_ring"),
    [
        ("llama", "auto", 2, 1, False),
        ("llama", "auto", 4, 1, True),  # 6 heads
        ("llama", "auto", 2, 2, True),  # 3 heads of a rank
        ("llama", "ring", 2, 1, True),
        ("llama", "ulysses", 4, 1, False),
        ("mistral", "auto", 4, 1, True),
        ("gemma2", "auto", 4, 1, False),  # refused for its heads
        ("llama", "auto", 1, 1, False),
    ],
)
def test_a_mode(model_type: str, mode: str, size: int, tensor_parallel_size: int, is_ring: bool) -> None:
    parts = choose_parts(make_config(model_type), mode, size, tensor_parallel_size)
    assert (parts.size, parts.is_ring, parts.num_chunks) == (size, is_ring, size * (1 + is_ring))


def test_a_model_without_heads_has_whole_sequences() -> None:
    config = AutoConfig.for_model("mamba")
    assert choose_parts(config, "auto", 1, 1) == ContextParallel()


HEADS = (
    "context_parallel_size=4 does not divide the 6 attention heads, of which each rank takes a part; sizes that do: "
)


@pytest.mark.parametrize(
    ("config", "mode", "size", "length", "message"),
    [
        (make_config(), "ulysses", 4, 64, f"{HEADS}1, 2, 3, 6; or give context_parallel_mode=ring"),
        (make_config("gemma2"), "auto", 4, 64, f"{HEADS}1, 2, 3, 6"),
        (make_config("gemma2"), "ring", 2, 64, "context_parallel_mode=ring: a 'gemma2' cannot: "),
        (make_config("mpt"), "ring", 2, 64, "a 'mpt' cannot share sequences: "),
        (make_config(attention_dropout=0.1), "auto", 4, 64, "mode=auto: ring attention has no dropout"),
        (make_config(), "ring", 2, 66, "mode=ring: in a ring of context_parallel_size=2 each rank has"),
        (make_config(), "auto", 4, 68, "not divide max_seq_length=68; the nearest is 64 or 72"),
        (make_config(), "auto", 2, 67, "2 does not divide max_seq_length=67; the nearest is 66 or 68"),
    ],
)  # fmt: skip
def test_refused(config: Any, mode: str, size: int, length: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_sequences(config, mode, size, 1, length)
    text = str(caught.value)
    assert message in text and ("or give" in message) == text.endswith("context_parallel_mode=ring")


def test_what_is_not_refused() -> None:
    check_sequences(make_config(), "ulysses", 2, 1, 66)
    check_sequences(make_config(), "auto", 4, 1, 64)
    check_sequences(make_config("mpt"), "auto", 1, 1, 67)


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_the_page_says_of_every_family_whether_it_runs(mode: str) -> None:
    _, table = (ROOT / "docs/long_context.md").read_text().split("| family | `ulysses` | `ring` |\n|---|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()]
    said = {name: cells[["ulysses", "ring"].index(mode)] for names, *cells in rows for name in names.split(", ")}
    for family in ARCHITECTURES:
        if said[family].startswith("run"):
            check_sequences(make_config(family), mode, 2, 1, 64)
        else:
            assert said[family].startswith("refused")
            with pytest.raises(UserError):
                check_sequences(make_config(family), mode, 2, 1, 64)


def test_parts_are_all_of_a_sequence() -> None:
    tokens = torch.arange(2 * 24).view(2, 24)
    by_heads, in_ring = ([ContextParallel(rank, 3, is_ring=ring).take(tokens) for rank in range(3)] for ring in (0, 1))
    assert torch.equal(torch.cat(by_heads, 1), tokens)
    assert in_ring[0][0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23] and in_ring[2][0].tolist() == list(range(8, 16))
    assert torch.cat(in_ring, 1).sort().values.equal(tokens)
