"""`flash_kernels=fa3` where there is no such GPU: what is refused, and what torch registers when it is activated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import _fa3, current_flash_attention_impl, restore_flash_attention_impl
from transformers import LlamaConfig

from errors import UserError
from models.layers.flash_kernels import PACKAGE, find_obstacle, use_flash_attention_3
from training.config.schema import FlashKernels
from training.setup import check_flash_kernels

# What scaled_dot_product_attention, varlen_attn and models/parallel/block_kernels.py call on a GPU
CALLED = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "_flash_attention_forward",
    "_flash_attention_backward",
}  # fmt: skip


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize(
    ("capability", "dropout", "words"),
    [((8, 0), 0.0, "compute capability 9.0"), ((10, 0), 0.0, "compute capability 9.0"), ((9, 0), 0.1, "no dropout")],
)
def test_what_cannot_run_it_is_refused(
    capability: tuple[int, int], dropout: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    architecture = LlamaConfig(attention_dropout=dropout)
    run = SimpleNamespace(config=SimpleNamespace(flash_kernels=FlashKernels.fa3), architecture=architecture)
    with pytest.raises(
        UserError, match=f"flash_kernels=fa3 cannot be used here: .*{words}.*; give flash_kernels=torch"
    ):
        check_flash_kernels(run)  # type: ignore[arg-type]
    run.config.flash_kernels = FlashKernels.torch
    check_flash_kernels(run)  # type: ignore[arg-type]


def test_this_machine_has_no_gpu_and_an_h100_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert "compute capability 9.0" in str(find_obstacle(LlamaConfig()))
    pretend_gpu(monkeypatch, (9, 0))
    assert find_obstacle(LlamaConfig()) is None


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the operators that torch replaces; the package, and its kernels, are played."""
    names: set[str] = set()

    class Library:
        def __init__(self, *_: object) -> None: ...

        def impl(self, name: str, *_: object) -> None:
            names.add(name)

    monkeypatch.setitem(sys.modules, PACKAGE, ModuleType(PACKAGE))
    monkeypatch.setattr(_fa3, "Library", Library)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=None, bwd=None), raising=False)
    yield names
    restore_flash_attention_impl()
    torch._C._set_sm_carveout_experimental(None)


def test_one_key_replaces_what_sdpa_varlen_and_rings_call(registered: set[str]) -> None:
    use_flash_attention_3(4)
    assert current_flash_attention_impl() == "FA3"
    assert registered >= CALLED
    assert torch._C._get_sm_carveout_experimental() == 4
    use_flash_attention_3(0)
    assert torch._C._get_sm_carveout_experimental() is None


def test_the_package_has_to_be_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        use_flash_attention_3(0)
    assert current_flash_attention_impl() is None
