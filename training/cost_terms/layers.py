"""The time of the layers' own passes.

A pass on a GPU takes the time of its products, by FLOPs and shape, and of the rest, by bytes; or that of the host,
which launches both. The constants hold for GPUs of any kind; that of one kind is `hardware.efficiency`.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from training.config.schema import Device, FlashKernels
from training.cost_terms.cost_term import Chunk, PassCost, PlannedRun
from training.costs.cost import LayerCost
from training.costs.hardware import Machine
from training.costs.traffic import Traffic

# Of the rate of large products, what fused attention reaches by the fastest kernels of a GPU (FlashAttention-2 on an
# A100, 2307.08691, figures 4 to 6: 190 of 312 TFLOP/s at best, less for short rows; cuDNN's on an H200, 444 to 528 of
# 759: benchmarks/results/nvidia-h200-2026-11-27); and the products of its backward pass, five where its forward has two
ATTENTION_RATE, ATTENTION_BACKWARD = 0.65, 2.5 / 2
# Tiles of a product that reach the rate of large products: rows and columns (NVIDIA, Matrix Multiplication Background
# User's Guide, 2.3; smaller ones take less of it)
TILES = ((256, 128), (128, 256), (128, 128))
# Of the GPU, for a kernel to start and to drain, besides its bytes: on an H200, over the rate of a copy, 5 us for SiLU
# and a product of two tensors each, 12 for the eight of an eager RMSNorm (benchmarks/results/nvidia-h200-2026-11-27)
KERNEL_SECONDS = 5e-6


class Launch(Enum):
    """How the host launches the operators of a pass."""

    plain = "plain"
    repeated = "repeated"  # by eager recomputation, with its hooks
    selective = "selective"  # by eager `selective`, under its dispatch modes


# Of the host, for an operator of PyTorch and the Python around it: timed on a CPU, and scaled to the host of an H200,
# whose shortest operator takes 9.8 us
LAUNCH_SECONDS = {Launch.plain: 10e-6, Launch.repeated: 25e-6, Launch.selective: 60e-6}


def compute_passes(chunk: Chunk) -> PassCost:
    """Return the cost of the passes: backward is twice forward, less the gradients of frozen matrices, and nothing in
    layers that run none."""
    run, backward = chunk.run, chunk.backward_layers
    return PassCost(
        forward_flops=sum(layer.work.forward_flops for layer in chunk.layers),
        forward_seconds=sum(time_pass(layer, run) for layer in chunk.layers),
        backward_flops=sum(layer.work.backward_flops for layer in backward),
        backward_seconds=sum(time_pass(layer, run, is_backward=True) for layer in backward),
        deferred_seconds=sum(time_products(layer, run, layer.work.deferred_flops, True) for layer in backward),
    )


def time_pass(layer: LayerCost, run: PlannedRun, is_backward: bool = False, launch: Launch = Launch.plain) -> float:
    """Return the seconds of a layer's pass over a micro-batch: as timed, or by the rates of the GPU and its host.

    The most loaded of the ranks that divide a layer's experts has `moe.imbalance` times the products of an even load;
    what its rows move is in the layer's traffic.
    """
    work = layer.work
    share = work.divided_flops / work.forward_flops if work.divided_flops else 0.0  # of the forward pass
    stretch = 1 + (run.config.moe.imbalance - 1) * share
    if work.pass_seconds:
        return work.pass_seconds[is_backward] * run.tokens * stretch
    flops = stretch * (work.backward_flops if is_backward else work.forward_flops)
    traffic = work.backward_traffic if is_backward else work.forward_traffic
    if run.is_eager:
        return time_kernels(run.time_flops(flops), 0.0, traffic, run.hardware, launch)
    flops -= (1 + is_backward) * work.attention_flops
    attending = time_attention(layer, run, is_backward)
    return time_kernels(run.time_flops(flops), attending, traffic, run.hardware, launch)


def time_attention(
    layer: LayerCost, run: PlannedRun, is_backward: bool = False, by_flash_attention_2: bool | None = None
) -> float:
    """Return the seconds of a layer's fused attention over a micro-batch. by_flash_attention_2: whether its kernels are
    those of that package; None for what the layer runs. A CPU's rate, where its layers are not timed, is of whole
    layers."""
    products = run.time_flops((1 + is_backward) * layer.work.attention_flops)
    if run.hardware.device is not Device.cuda:
        return products
    if by_flash_attention_2 is None:
        by_flash_attention_2 = layer.work.runs_flash_attention_2
    is_slower = by_flash_attention_2 and run.config.flash_kernels is not FlashKernels.fa3
    rate = ATTENTION_RATE * (run.hardware.flash_attention_2 if is_slower else 1.0)
    return products / rate * (ATTENTION_BACKWARD if is_backward else 1)


def time_products(layer: LayerCost, run: PlannedRun, flops: float, is_backward: bool = False) -> float:
    """Return the seconds of a pass's products with so many FLOPs of a token; of a layer that was timed, as large a
    share of the whole pass."""
    if layer.work.pass_seconds is None:
        return run.time_flops(flops)
    whole = layer.work.backward_flops if is_backward else layer.work.forward_flops
    return flops / whole * time_pass(layer, run, is_backward) if whole else 0.0


def time_kernels(
    products: float, attending: float, traffic: Traffic, machine: Machine, launch: Launch = Launch.plain
) -> float:
    """Return the seconds of a layer's pass.

    products: seconds of its FLOPs at the rate of large products; attending: those of its attention. The host runs ahead
    of the GPU, so launching counts where it takes longer than all that is launched. Products whose shapes are known
    take as much longer as they leave multiprocessors idle.
    """
    if machine.device is not Device.cuda:
        return products + attending
    moving = traffic.moved / machine.stream_rate + traffic.kernels * KERNEL_SECONDS
    computing = products * stretch_products(traffic.products, machine.multiprocessors)
    return max(computing + attending + moving, traffic.kernels * LAUNCH_SECONDS[launch])


@lru_cache(maxsize=2**12)  # a search asks for the same layers thousands of times
def stretch_products(products: tuple[tuple[int, int, int], ...], multiprocessors: int | None) -> float:
    """Return the time of products over what their FLOPs take where every multiprocessor has work; 1 where their number
    or the shapes are not known.

    products: (rows, depth, columns) of each.
    """
    if multiprocessors is None or not products:
        return 1.0
    taken = sum(depth * _count_taken(rows, columns, multiprocessors) for rows, depth, columns in products)
    return taken / sum(rows * depth * columns for rows, depth, columns in products)


def _count_taken(rows: int, columns: int, multiprocessors: int) -> float:
    """The elements that a result takes the time of, of the tiles that take least, as a library chooses."""
    counts = ((-(-rows // height) * -(-columns // width), height * width) for height, width in TILES)
    return min(size * _count_waves(num_tiles, multiprocessors) for num_tiles, size in counts)


def _count_waves(num_tiles: int, multiprocessors: int) -> float:
    """As many tiles as multiprocessors, for each wave: one on each. Where there are fewer tiles, several share the
    depth of one (split-K)."""
    if num_tiles < multiprocessors:
        return multiprocessors / (multiprocessors // num_tiles)
    return -(-num_tiles // multiprocessors) * multiprocessors
