"""Products that are added to sums of higher precision; the operator of a GPU is played."""

from __future__ import annotations

import pytest
import torch
from support.mixed_addmm import play_mixed_addmm

from models.losses.accumulate import add_product


def draw(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total, left, right = (torch.randn(*shape, generator=generator) for shape in ((6, 4), (6, 50), (50, 4)))
    return total, left.to(dtype), right.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_the_device_can_the_product_is_not_rounded(dtype: torch.dtype) -> None:
    total, left, right = draw(dtype)
    exact, rounded = total + left.float() @ right.float(), total + left @ right
    with play_mixed_addmm() as shapes:
        found = total.clone()
        add_product(found, left, right)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    assert (rounded - exact).abs().max() > 100 * (found - exact).abs().max()
    assert shapes.count((6, 4)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elsewhere_it_is_that_of_the_factors(dtype: torch.dtype) -> None:
    total, left, right = draw(dtype)
    expected = total + left @ right
    add_product(total, left, right)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


def test_a_torch_that_wants_sums_in_16_bits_is_not_asked_again() -> None:
    total, left, right = draw(torch.bfloat16)
    expected = total + left @ right
    with play_mixed_addmm(takes_fp32_sums=False) as shapes:
        add_product(total, left, right)
    assert torch.equal(total, expected) and shapes == []
