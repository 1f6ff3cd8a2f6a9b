"""State in 8 bits: an index into a table for each element, and a scale for each block of a partition.

A block is so many consecutive elements of a partition, whatever parameters they belong to, so another layout has other
blocks. Saved of a fragment are its indices, elementwise, and the scales of the blocks that it lies in,

    state1/model.layers.3.mlp.up_proj.weight@4096           uint8 [number of elements]
    absmax1+17/model.layers.3.mlp.up_proj.weight@4096       fp32 [number of blocks], of which the first has 17 elements
                                                            in front of the fragment

A rank that loads them puts the values together and quantizes them in its own blocks. Where all of a block was in one
block when it was saved, that one's scale is taken, which gives the very indices that were saved; elsewhere the largest
magnitude in it. So a run continues with the same bits at the same layout, and at another within one step of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.optim.chunks import split_flat
from training.optim.state_kinds import BLOCK_SIZE, count_blocks

SCALE_MARK = "+"  # in the kind of scales, in front of the phase


@dataclass(frozen=True)
class BlockRun:
    """Consecutive elements of blocks. codes: uint8 [number of elements]. scales: fp32 [number of blocks that they lie
    in]. phase: elements of the first block in front of them."""

    codes: torch.Tensor
    scales: torch.Tensor
    phase: int

    def numel(self) -> int:
        return self.codes.numel()

    def narrow(self, start: int, length: int) -> BlockRun:
        first, stop = self.phase + start, self.phase + start + length
        blocks = self.scales[first // BLOCK_SIZE : count_blocks(stop)]
        return BlockRun(self.codes.narrow(0, start, length), blocks, first % BLOCK_SIZE)

    def spread_scales(self) -> torch.Tensor:
        """The scale of each element."""
        return self.scales.repeat_interleave(BLOCK_SIZE)[self.phase : self.phase + self.numel()]

    def dequantize(self, table: torch.Tensor) -> torch.Tensor:
        return table[self.codes.int()] * self.spread_scales()


def name_scales(scale: str, phase: int) -> str:
    return f"{scale}{SCALE_MARK}{phase}"


class BlockRestore:
    """The values of one state of a partition while they are put together, in the host's memory.

    codes, scales: of the partition, to be written by `finish`. table: what codes are indices into, ascending.
    scales_name: that the optimizer gives to the scales.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, scales_name: str) -> None:
        self.scales_name = scales_name
        self._codes, self._scales, self._table = codes, scales, table.cpu()
        self._values = torch.zeros(codes.numel())
        self._lowest = torch.full_like(scales, torch.inf, device="cpu")  # of the saved scales of a block's elements
        self._highest = torch.zeros_like(scales, device="cpu")

    def put(self, start: int, saved: BlockRun) -> None:
        """start: the place of the first element in the partition."""
        self._values[start : start + saved.numel()] = saved.dequantize(self._table)
        blocks = torch.arange(start, start + saved.numel()) // BLOCK_SIZE
        scales = saved.spread_scales()
        self._lowest.scatter_reduce_(0, blocks, scales, "amin")
        self._highest.scatter_reduce_(0, blocks, scales, "amax")

    def finish(self) -> None:
        num_blocks = self._scales.numel()
        padded = torch.zeros(num_blocks * BLOCK_SIZE)
        padded[: self._values.numel()] = self._values
        largest = padded.view(num_blocks, BLOCK_SIZE).abs().amax(dim=1) if num_blocks else self._highest
        scales = torch.where(self._lowest == self._highest, self._highest, largest)
        self._scales.copy_(scales)
        spread = scales.clamp(min=torch.finfo(torch.float32).tiny).repeat_interleave(BLOCK_SIZE)
        borders = (self._table[1:] + self._table[:-1]) / 2
        for codes, values, scale in split_flat(self._codes, self._values, spread[: self._values.numel()]):
            codes.copy_(torch.bucketize(values / scale, borders))
