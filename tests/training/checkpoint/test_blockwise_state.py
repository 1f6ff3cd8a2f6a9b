"""Blockwise state, loaded in other blocks than it was saved in: within one step of its table, or bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from training.checkpoint.blockwise_state import BlockRestore, BlockRun
from training.optim.state_kinds import BLOCK_SIZE, count_blocks

functional = pytest.importorskip("bitsandbytes.functional")
NUM = 2000


def quantize(values: torch.Tensor, table: torch.Tensor) -> BlockRun:
    codes, state = functional.quantize_blockwise(values, code=table, blocksize=BLOCK_SIZE)
    return BlockRun(codes, state.absmax, phase=0)


def restore(parts: list[tuple[int, BlockRun]], count: int, table: torch.Tensor) -> BlockRun:
    """parts: each with its position in a partition of `count` elements."""
    codes, scales = torch.zeros(count, dtype=torch.uint8), torch.zeros(count_blocks(count))
    target = BlockRestore(codes, scales, table, "absmax")
    for start, part in parts:
        target.put(start, part)
    target.finish()
    return BlockRun(codes, scales, phase=0)


@pytest.fixture(params=[True, False], ids=["signed", "unsigned"])
def table(request: pytest.FixtureRequest) -> torch.Tensor:
    return functional.create_dynamic_map(signed=request.param)


@pytest.fixture
def saved(table: torch.Tensor) -> BlockRun:
    """Blocks whose sizes differ by orders of magnitude, one of zeros; the largest of some are negative."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(NUM, generator=generator) * 10.0 ** (torch.arange(NUM) // BLOCK_SIZE - 4)
    values[3 * BLOCK_SIZE : 4 * BLOCK_SIZE] = 0
    return quantize(values if table.min() < 0 else values.abs(), table)


@pytest.mark.parametrize("cuts", [(), (100, 700, 701)], ids=["whole", "in fragments"])
def test_the_same_blocks_are_the_same_bits(saved: BlockRun, table: torch.Tensor, cuts: tuple[int, ...]) -> None:
    bounds = [0, *cuts, NUM]
    parts = [(a, saved.narrow(a, b - a)) for a, b in pairwise(bounds)]
    found = restore(parts, NUM, table)
    assert torch.equal(found.scales, saved.scales)
    assert torch.equal(found.dequantize(table), saved.dequantize(table))
    counts = saved.spread_scales() > 0  # where all is 0, any code means 0
    assert torch.equal(found.codes[counts], saved.codes[counts])


@pytest.mark.parametrize("shift", [1, 100, 255, 256])
def test_other_blocks_are_within_one_step(saved: BlockRun, table: torch.Tensor, shift: int) -> None:
    """Everything is further back in the new partition, after another parameter."""
    found = restore([(shift, saved.narrow(0, 900)), (shift + 900, saved.narrow(900, NUM - 900))], NUM + shift, table)
    before, after = saved.dequantize(table), found.narrow(shift, NUM)
    step = (table[1:] - table[:-1]).max() * after.spread_scales()
    assert ((after.dequantize(table) - before).abs() <= step).all()
    assert torch.equal(after.codes[:700], saved.codes[:700]) == (shift == BLOCK_SIZE)
    assert (found.scales[1:] > 0).sum() >= count_blocks(NUM) - 2
    assert found.scales.max() <= saved.scales.max()  # no block got larger than what is in it
