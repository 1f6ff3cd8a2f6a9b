"""Ring attention alone against attention over whole sequences, in float64: outputs and the gradients of all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.workers import WorkerGroup

from models.parallel import block_kernels, blocks
from models.parallel.blocks import BlockAttention, SequenceMask
from models.parallel.ring import attend_in_ring, list_blocks
from models.parallel.shard import ContextParallel

BATCH, HEADS, GROUPS, LENGTH, SIZE = 2, 6, 2, 32, 8
SCALE = 0.4
PACKED = torch.tensor([[1] * 5 + [2] * 16 + [3] * 11, [4] * 30 + [5] * 2])  # borders within chunks, and across ranks


def draw(seed: int, *heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, each, LENGTH, SIZE, generator=generator, dtype=torch.float64) for each in heads]


def take(parallel: ContextParallel, tensor: torch.Tensor) -> torch.Tensor:
    return parallel.take(tensor, dim=2).clone()


def attend_part(mask: SequenceMask, most_scores: int, uses_kernels: bool) -> tuple[torch.Tensor, ...]:
    """Return this rank's outputs and gradients."""
    parallel = ContextParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, is_ring=True)
    inputs = [take(parallel, each).requires_grad_() for each in draw(0, HEADS, GROUPS, GROUPS)]
    with patch.object(blocks, "MOST_SCORES", most_scores):
        output = attend_in_ring(*inputs, mask, SCALE, parallel, uses_kernels)
        output.backward(take(parallel, draw(1, HEADS)[0]))
    return output.detach(), *(each.grad for each in inputs)  # type: ignore[misc]


def attend_whole(mask: SequenceMask) -> tuple[torch.Tensor, ...]:
    """Return torch's outputs and gradients, with every hidden token masked."""
    places = torch.arange(LENGTH)
    seen = places[:, None] >= places
    if mask.window is not None:
        seen = seen & (places[:, None] - places < mask.window)
    seen = seen.expand(BATCH, 1, -1, -1)
    if mask.documents is not None:
        seen = seen & (mask.documents[:, None, :, None] == mask.documents[:, None, None, :])
    inputs = [each.requires_grad_() for each in draw(0, HEADS, GROUPS, GROUPS)]
    attend: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
    output = attend(*inputs, attn_mask=seen, scale=SCALE, enable_gqa=True)
    output.backward(draw(1, HEADS)[0])
    return output.detach(), *(each.grad for each in inputs)  # type: ignore[misc]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("mask", "most_scores", "uses_kernels"),
    [
        (SequenceMask(None, None), 2**26, True),
        (SequenceMask(None, None), BATCH * HEADS * 8 * 3, False),  # three queries at a time, where chunks have eight
        (SequenceMask(PACKED, 7), BATCH * HEADS * 8 * 3, True),
        (SequenceMask(None, 14), 2**26, True),  # the diagonal by a kernel
        pytest.param(SequenceMask(PACKED, None), 2**26, True, marks=pytest.mark.full),
        pytest.param(SequenceMask(PACKED, 7), BATCH * HEADS * 8 * 3, False, marks=pytest.mark.full),
        pytest.param(SequenceMask(None, 5), 1, True, marks=pytest.mark.full),
    ],
    ids=["kernels", "pieces", "packed-window", "window", "packed", "packed-pieces", "single"],
)
def test_a_ring_is_attention_over_the_whole(
    workers: Callable[[int], WorkerGroup], size: int, mask: SequenceMask, most_scores: int, uses_kernels: bool
) -> None:
    rank_blocks = workers(size).run(attend_part, mask, most_scores, uses_kernels)
    for found, expected in zip(zip(*rank_blocks, strict=True), attend_whole(mask), strict=True):
        for rank, own_blocks in enumerate(found):
            torch.testing.assert_close(own_blocks, take(ContextParallel(rank, size, is_ring=True), expected))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("row", [[1] * LENGTH, [1, 2, 3] + [4] * 29, [1] * 16 + [2] * 16, [*range(LENGTH)]])
def test_documents_of_packed_rows_are_whole_blocks_that_kernels_take(row: list[int], size: int) -> None:
    """Without communication: every rank attends to the blocks of all others, and no scores are made."""
    mask = SequenceMask(torch.stack([PACKED[0], torch.tensor(row)]), None)
    inputs, expected = draw(0, HEADS, GROUPS, GROUPS), attend_whole(mask)
    gradient = draw(1, HEADS)[0]
    found = [torch.zeros_like(each) for each in expected[2:]]
    for rank in range(size):
        own = ContextParallel(rank, size, is_ring=True)
        attention = BlockAttention(take(own, inputs[0]), GROUPS, SCALE, mask, uses_kernels=True)
        turns = [(ContextParallel((rank - turn) % size, size, is_ring=True), turn) for turn in range(size)]
        output, log_sums = attention.start_forward()
        with patch.object(BlockAttention, "_score", side_effect=AssertionError):
            for source, turn in turns:
                key, value = (take(source, each) for each in inputs[1:])
                blocks = list_blocks(own, turn, LENGTH // size)
                attention.attend(key, value, blocks, output, log_sums)
            through = attention.start_backward((output, log_sums), take(own, gradient))
            for source, turn in turns:
                key, value = (take(source, each) for each in inputs[1:])
                added = attention.differentiate(key, value, list_blocks(own, turn, LENGTH // size), through)
                places = source.take(torch.arange(LENGTH), dim=0)
                for total, each in zip(found, added, strict=True):
                    total.index_add_(2, places, each)
        torch.testing.assert_close(output, take(own, expected[0]))
        torch.testing.assert_close(through.query_gradient, take(own, expected[1]))
    for total, each in zip(found, expected[2:], strict=True):
        torch.testing.assert_close(total, each)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_have_even_work_and_see_every_earlier_token_once(size: int) -> None:
    length = 4
    seen = torch.zeros(2 * size * 2, 2 * size * 2)
    for rank in range(size):
        for turn in range(size):
            found = list_blocks(ContextParallel(rank, size, is_ring=True), turn, length)
            assert len(found) == (3 if turn == 0 else 2)  # two of the first turn's are causal: half of their scores
            for block in found:
                seen[block.first_query : block.first_query + 2, block.first_key : block.first_key + 2] += 1
    chunks = torch.ones(2 * size, 2 * size).tril()
    assert torch.equal(seen, chunks.repeat_interleave(2, 0).repeat_interleave(2, 1))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_gpu_kernel_takes_what_a_block_gives_it(is_causal: bool) -> None:
    """torch's own description of its operators checks arguments and shapes; the numbers need a GPU."""
    query, key = (torch.empty(2, heads, 16, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 2))
    output, log_sums = block_kernels._attend_flash(query, key, key, is_causal, SCALE)
    assert (output.shape, log_sums.shape, log_sums.dtype) == (query.shape, query.shape[:3], torch.float32)
    found = block_kernels._differentiate_flash(output, query, key, key, output, log_sums, is_causal, SCALE)
    assert [each.shape for each in found] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float32, 20)])
def test_a_machine_without_a_gpu_has_its_own_kernel(dtype: torch.dtype, size: int) -> None:
    assert block_kernels.find_kernel(torch.empty(1, 1, 1, size, dtype=dtype)) is not None
    assert block_kernels.find_kernel(torch.empty(1, 1, 1, size, dtype=dtype, device="meta")) is None
