"""State in 8 bits: an index into a table for each element, and a scale for each block of a partition.

A block is a fixed number of consecutive elements of a partition, whatever parameters they belong to, so another layout
has other blocks. A fragment is saved as its indices, elementwise, and the scales of the blocks that it lies in,

    state1/model.layers.3.mlp.up_proj.weight@4096           uint8 [number of elements]
    absmax1+17/model.layers.3.mlp.up_proj.weight@4096       fp32 [number of blocks], of which the first has 17 elements
                                                            before the fragment

A rank that loads them dequantizes the values and quantizes them in its own blocks. Where all of a block was in one
block when it was saved, that block's scale is used, which reproduces the saved indices (but in a block of zeros, where
every index is 0 times the scale); elsewhere the largest magnitude in it. So a run continues with the same values at the
same layout, and at another within one step of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.optim.chunks import split_flat
from training.optim.state_kinds import BLOCK_SIZE, count_blocks

SCALE_MARK = "+"  # in the kind of scales, before the phase


@dataclass(frozen=True)
class BlockRun:
    """Consecutive quantized elements.

    codes: uint8 [number of elements]. scales: fp32 [number of blocks that they lie in]. phase: elements of the first
    block that come before them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    phase: int

    def numel(self) -> int:
        return self.codes.numel()

    def narrow(self, start: int, length: int) -> BlockRun:
        """Return a part of the elements, with the scales of its blocks: views."""
        first, stop = self.phase + start, self.phase + start + length
        blocks = self.scales[first // BLOCK_SIZE : count_blocks(stop)]
        return BlockRun(self.codes.narrow(0, start, length), blocks, first % BLOCK_SIZE)

    def spread_scales(self) -> torch.Tensor:
        """Return the scale of each element: fp32 [number of elements]."""
        return self.scales.repeat_interleave(BLOCK_SIZE)[self.phase : self.phase + self.numel()]

    def dequantize(self, table: torch.Tensor) -> torch.Tensor:
        """Return the values: fp32 [number of elements]."""
        return table[self.codes.int()] * self.spread_scales()


def name_scales(scale: str, phase: int) -> str:
    """Return the kind of a fragment's scales, as in the file."""
    return f"{scale}{SCALE_MARK}{phase}"


class BlockRestore:
    """Collects the values of one blockwise state of a partition in host memory, then quantizes them.

    codes, scales: of the partition, written by `finish`. table: the values of the codes, ascending. scales_name: the
    name of the scales in the optimizer's state.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, scales_name: str) -> None:
        self.scales_name = scales_name
        self._codes, self._scales, self._table = codes, scales, table.cpu()
        self._values = torch.zeros(codes.numel())
        self._lowest = torch.full_like(scales, torch.inf, device="cpu")  # saved scale of each block's elements
        self._highest = torch.zeros_like(scales, device="cpu")

    def put(self, start: int, saved: BlockRun) -> None:
        """Take over saved elements. start: the position of the first one in the partition."""
        self._values[start : start + saved.numel()] = saved.dequantize(self._table)
        blocks = torch.arange(start, start + saved.numel()) // BLOCK_SIZE
        scales = saved.spread_scales()
        self._lowest.scatter_reduce_(0, blocks, scales, "amin")
        self._highest.scatter_reduce_(0, blocks, scales, "amax")

    def finish(self) -> None:
        """Quantize the values into the partition's codes and scales."""
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
