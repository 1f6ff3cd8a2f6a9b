"""Ring attention alone against attention over whole sequences, in float64: outputs and the gradients of all three."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.packed_kernels import play_block_kernels
from support.strict_device import NAME, start_recording
from support.workers import WorkerGroup
from torch.utils._python_dispatch import TorchDispatchMode

from models.parallel import block_kernels, blocks
from models.parallel.blocks import BlockAttention, SequenceMask
from models.parallel.ring import attend_in_ring, list_blocks
from models.parallel.shard import ContextParallel

BATCH, HEADS, GROUPS, LENGTH, SIZE = 2, 6, 2, 32, 8
SCALE = 0.4
PACKED = torch.tensor([[1] * 5 + [2] * 16 + [3] * 11, [4] * 30 + [5] * 2])  # borders within chunks, and across ranks


def build_mask(documents: torch.Tensor | None, window: int | None) -> SequenceMask:
    """With the bounds that a host would know."""
    if documents is None:
        return SequenceMask(None, window)
    lengths = [len(list(tokens)) for row in documents.tolist() for _, tokens in groupby(row)]
    return SequenceMask(documents, window, len(lengths), max(lengths))


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
        (build_mask(None, None), 2**26, True),
        (build_mask(None, None), BATCH * HEADS * 8 * 3, False),  # three queries at a time, where chunks have eight
        (build_mask(PACKED, 7), BATCH * HEADS * 8 * 3, True),
        (build_mask(None, 14), 2**26, True),  # the diagonal by a kernel
        pytest.param(build_mask(PACKED, None), 2**26, True, marks=pytest.mark.full),
        pytest.param(build_mask(PACKED, 7), BATCH * HEADS * 8 * 3, False, marks=pytest.mark.full),
        pytest.param(build_mask(None, 5), 1, True, marks=pytest.mark.full),
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


@pytest.mark.parametrize("seen", [build_mask(PACKED, None), build_mask(PACKED, 7)], ids=["packed", "packed-window"])
def test_a_ring_of_gpus_is_attention_over_the_whole(workers: Callable[[int], WorkerGroup], seen: SequenceMask) -> None:
    """The operators of a GPU, played: one call per block whose documents may have keys and queries in it."""
    rank_blocks, calls = zip(*workers(2).run(attend_part_as_a_gpu, seen), strict=True)
    for found, expected in zip(zip(*rank_blocks, strict=True), attend_whole(seen), strict=True):
        for rank, own_blocks in enumerate(found):
            torch.testing.assert_close(own_blocks, take(ContextParallel(rank, 2, is_ring=True), expected))
    # Of a window's blocks only the two diagonals are a kernel's
    blocks = 3 + 2 if seen.window is None else 2
    assert calls == (["forward"] * blocks + ["backward"] * blocks,) * 2


def attend_part_as_a_gpu(seen: SequenceMask) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    with play_block_kernels() as called:
        return attend_part(seen, 2**26, True), called


Attention = tuple[torch.Tensor, ...]


def attend_by_blocks(size: int, seen: SequenceMask, inputs: list[torch.Tensor], gradient: torch.Tensor) -> Attention:
    """Return outputs and gradients of whole rows. Without communication: every rank attends to the blocks of all
    others."""
    output, *gradients = (torch.zeros_like(each) for each in (inputs[0], *inputs))
    for rank in range(size):
        own = ContextParallel(rank, size, is_ring=True)
        turns = [(ContextParallel((rank - turn) % size, size, is_ring=True), turn) for turn in range(size)]
        attention = BlockAttention(take(own, inputs[0]), GROUPS, SCALE, seen, uses_kernels=True)
        part, log_sums = attention.start_forward()
        for source, turn in turns:
            key, value = (take(source, each) for each in inputs[1:])
            attention.attend(key, value, list_blocks(own, turn, LENGTH // size), part, log_sums)
        through = attention.start_backward((part, log_sums), take(own, gradient))
        for source, turn in turns:
            key, value = (take(source, each) for each in inputs[1:])
            added = attention.differentiate(key, value, list_blocks(own, turn, LENGTH // size), through)
            places = source.take(torch.arange(LENGTH, device=key.device), dim=0)
            for total, each in zip(gradients[1:], added, strict=True):
                total.index_add_(2, places, each)
        places = own.take(torch.arange(LENGTH, device=part.device), dim=0)
        output.index_add_(2, places, part)
        gradients[0].index_add_(2, places, through.query_gradient)
    return output, *gradients


class Recorded(TorchDispatchMode):
    """The operators within it that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", [build_mask(None, None), build_mask(PACKED, None)], ids=["whole", "packed"])
def test_a_block_is_merged_in_one_pass_over_its_outputs(mask: SequenceMask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the kernel: a cast of its output, one operator that merges it, four on a number per head and query."""
    query, key = (torch.randn(BATCH, heads, LENGTH, SIZE, dtype=torch.bfloat16) for heads in (HEADS, GROUPS))
    attended = torch.zeros_like(query[:, :, :16]), torch.zeros(BATCH, HEADS, 16)
    kernel = block_kernels.BlockKernel(lambda *_: attended, lambda *_: pytest.fail())
    monkeypatch.setattr(blocks, "find_kernel", lambda _: kernel)
    attention = BlockAttention(query, GROUPS, SCALE, mask, uses_kernels=True)
    output, log_sums = attention.start_forward()
    block = blocks.Block(slice(0, 16), slice(0, 16), 16, 0)
    mask.locate(block)  # once per micro-batch
    with Recorded() as found:
        attention.attend(key, key, [block], output, log_sums)
    assert sorted(found.names) == ["_to_copy", "lerp_", "logaddexp", "nan_to_num_", "sigmoid_", "sub"]


ROWS = [[4] * LENGTH, [4, 5, 6] + [7] * 29, [4] * 16 + [5] * 16, [*range(4, LENGTH + 4)]]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("row", ROWS)
def test_documents_of_packed_rows_take_a_kernel_once_per_block(row: list[int], size: int, window: int | None) -> None:
    """The kernels of a CPU and of a GPU, which is played; and without a window no scores are made."""
    seen = build_mask(torch.stack([PACKED[0], torch.tensor(row)]), window)
    inputs, gradient = draw(0, HEADS, GROUPS, GROUPS), draw(1, HEADS)[0]
    expected = attend_whole(seen)
    with nullcontext() if window else patch.object(BlockAttention, "_score", side_effect=AssertionError):
        for each, whole in zip(attend_by_blocks(size, seen, inputs, gradient), expected, strict=True):
            torch.testing.assert_close(each, whole)
        with play_block_kernels() as called:
            found = attend_by_blocks(size, seen, inputs, gradient)
    for each, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(each, whole)
    blocks = [block for rank in range(size) for block in list_all_blocks(rank, size) if fits(seen, block)]
    assert sorted(called) == ["backward"] * len(blocks) + ["forward"] * len(blocks)


def list_all_blocks(rank: int, size: int) -> list[blocks.Block]:
    own = ContextParallel(rank, size, is_ring=True)
    return [block for turn in range(size) for block in list_blocks(own, turn, LENGTH // size)]


def fits(seen: SequenceMask, block: blocks.Block) -> bool:
    """Whether the block takes a kernel: the longest document may be in it, and only diagonals know windows."""
    first_key_unseen = block.first_key + block.num_keys
    reaches = block.is_diagonal or seen.longest > block.first_query - first_key_unseen + 1
    return reaches and (seen.window is None or block.is_diagonal)


def test_documents_in_blocks_wait_for_no_device(tmp_path: Path) -> None:
    group = WorkerGroup(1, tmp_path)
    try:
        ((found, waits),) = group.run(attend_on_device)
    finally:
        group.close()
    assert waits == list[str]()
    for each, whole in zip(found, attend_whole(build_mask(PACKED, None)), strict=True):
        torch.testing.assert_close(each, whole)


def attend_on_device() -> tuple[Attention, list[str]]:
    """Return outputs and gradients, and what the host waited for."""
    record = start_recording()
    seen, device = build_mask(PACKED, None), torch.device(NAME, 0)
    seen = SequenceMask(PACKED.to(device), None, seen.most, seen.longest)
    inputs, gradient = (
        [each.to(device) for each in draw(*drawn)] for drawn in ((0, HEADS, GROUPS, GROUPS), (1, HEADS))
    )
    record.waits.clear()  # for the copies
    with play_block_kernels():
        found = attend_by_blocks(4, seen, inputs, gradient[0])
    waits = [f"{wait.operation} {wait.place}" for wait in record.waits]
    return tuple(each.cpu() for each in found), waits


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
    found = block_kernels._differentiate_flash(output, query, key, key, (output, log_sums), is_causal, SCALE)
    assert [each.shape for each in found] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_diagonal", [False, True])
def test_a_gpu_kernel_takes_the_documents_of_a_block(is_diagonal: bool, window: int | None) -> None:
    query, key = (torch.empty(2, heads, 16, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 2))
    seen = SequenceMask(torch.empty(2, 64, dtype=torch.int64, device="meta"), window, 5, 20)
    documents = seen.locate(blocks.Block(slice(16, 32), slice(16, 32), 48, 48 if is_diagonal else 16))
    output, log_sums = block_kernels._attend_flash(query, key, key, is_diagonal, SCALE, documents)
    assert (output.shape, log_sums.shape) == (query.shape, query.shape[:3])
    assert (output.dtype, log_sums.dtype) == (torch.bfloat16, torch.float32)
    found = block_kernels._differentiate_flash(
        output, query, key, key, (output, log_sums), is_diagonal, SCALE, documents
    )
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in (query, key, key)]


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float32, 20)])
def test_a_machine_without_a_gpu_has_its_own_kernel(dtype: torch.dtype, size: int) -> None:
    assert block_kernels.find_kernel(torch.empty(1, 1, 1, size, dtype=dtype)) is not None
    assert block_kernels.find_kernel(torch.empty(1, 1, 1, size, dtype=dtype, device="meta")) is None
