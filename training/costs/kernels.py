"""The seconds of a pass on a GPU: products by FLOPs, the rest by bytes, and the host that launches both.

The constants hold for GPUs of any kind; that of one kind is `hardware.efficiency`.
"""

from __future__ import annotations

from training.config.schema import Device
from training.costs.hardware import GB, Machine
from training.costs.traffic import Traffic

# Of the rate of large products, what fused attention reaches (FlashAttention-2, 2307.08691, figures 4 to 6: 190 of an
# A100's 312 TFLOP/s at best, less for short rows); and the products of its backward pass, five where its forward has
# two
ATTENTION_RATE, ATTENTION_BACKWARD = 0.65, 2.5 / 2
STREAM_RATE = 0.8  # of a data sheet's bandwidth, what kernels that move long rows reach
LAUNCH_SECONDS = 8e-6  # of the host, for an operator of PyTorch and the Python around it


def time_kernels(
    products: float, attention: float, traffic: Traffic, machine: Machine, is_backward: bool = False
) -> float:
    """Return the seconds of a layer's pass.

    products, attention: seconds of its FLOPs at the rate of large products. The host runs ahead of the GPU, so
    launching counts where it takes longer than all that is launched. A CPU's rate, where its layers are not timed, is
    of whole layers.
    """
    if machine.device is not Device.cuda:
        return products + attention
    attending = attention / ATTENTION_RATE * (ATTENTION_BACKWARD if is_backward else 1)
    moving = traffic.moved / (machine.memory_bandwidth * GB * STREAM_RATE)
    return max(products + attending + moving, traffic.kernels * LAUNCH_SECONDS)
