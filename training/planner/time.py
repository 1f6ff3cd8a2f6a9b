"""How long a step of a plan sends and updates: pure arithmetic on a layout and a machine's bandwidths. docs/plan.md has the assumptions."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.schema import Offload, OptimizerName, Precision, RunConfig
from training.distributed.topology import PIPE, TENSOR, Layout
from training.planner.hardware import GB, Machine
from training.planner.memory import bytes_of


def find_bandwidth_between(layout: Layout, stage_id: int, hardware: Machine) -> float:
    """GB/s from `stage_id` to the next stage, or from the last to the first, of the replica whose path is slowest."""
    crosses = any(
        _spans_nodes((rank, layout.topology.neighbour(rank, PIPE)), hardware.cards_per_node)
        for rank in layout.list_stage_ranks(stage_id)
    )
    return hardware.inter_node_bandwidth if crosses else hardware.intra_node_bandwidth


def compute_sum_seconds(nbytes: int, layout: Layout, hardware: Machine) -> float:
    """All-reduce of `nbytes` over the slowest tensor-parallel group, on a ring."""
    size = layout.tensor_parallel_size
    crosses = any(_spans_nodes(ranks, hardware.cards_per_node) for ranks in layout.topology.groups(TENSOR))
    bandwidth = hardware.inter_node_bandwidth if crosses else hardware.intra_node_bandwidth
    return 2 * (size - 1) / size * nbytes / (bandwidth * GB)


def compute_reduce_seconds(
    num_trainable: int, layout: Layout, stage_id: int, config: RunConfig, hardware: Machine
) -> float:
    """All-reduce of the gradients and all-gather of the weights over the stage's replicas, on a ring; both in the training dtype."""
    topology = layout.topology
    ranks = next(
        ranks for ranks in topology.groups(*topology.weight_replica_axes) if topology.index(ranks[0], PIPE) == stage_id
    )
    bandwidth = (
        hardware.inter_node_bandwidth if _spans_nodes(ranks, hardware.cards_per_node) else hardware.intra_node_bandwidth
    )
    share = (layout.num_weight_replicas - 1) / layout.num_weight_replicas
    copied = count_reduce_bytes(layout, config.precision, config.offload_optimizer)
    return num_trainable * (
        copied / (hardware.memory_bandwidth * GB) + 3 * share * bytes_of(config.precision) / (bandwidth * GB)
    )


def count_reduce_bytes(layout: Layout, precision: Precision, offload: Offload) -> int:
    """What is read and written of a gradient to reduce it, beside the sending, as seen of deepspeed 0.19.8's operations.

    Flattened, divided and taken back, in bf16 made bf16 for that; nothing of one replica (`skip_averaging`). In fp16, or offloaded, put into a bucket
    before, and taken out of it, also of one replica.
    """
    in_bucket = precision is Precision.fp16 or offload is not Offload.none
    if layout.num_weight_replicas == 1 and not in_bucket:
        return 0
    if precision is Precision.bf16:
        return 2 * (4 + 4) + 2 * (4 + 2) + (2 + 2)
    return (5 if in_bucket else 3) * 2 * bytes_of(precision)


def count_update_bytes(optimizer: OptimizerName, precision: Precision) -> int:
    """What an optimizer step reads and writes for a trained parameter, as seen of deepspeed 0.19.8's operations.

    `BF16_Optimizer` takes the norm of the fp32 gradient, clips it, and sets it and its bf16 part to zero; `DeepSpeedZeroOptimizer` takes the
    norm in fp64, copies the gradient and clips that. Then the gradient is read, master weight and AdamW's moments read and written, and
    the weight copied from its master.
    """
    gradient = 4 + (4 + 4) + (4 + 4) if precision is Precision.bf16 else (4 + 8 + 8) + (4 + 4) + (4 + 4)
    moments = 16 if optimizer is OptimizerName.adamw else 0
    return gradient + 4 + (4 + 4) + moments + 4 + bytes_of(precision)


def compute_optimizer_seconds(num_trainable: int, layout: Layout, config: RunConfig, hardware: Machine) -> float:
    """Bound by memory: `count_update_bytes` of this replica's part."""
    part = num_trainable / layout.num_weight_replicas
    moved = count_update_bytes(config.optimizer.name, config.precision) * part
    if config.offload_optimizer is Offload.none:
        return moved / (hardware.memory_bandwidth * GB)
    ranks_on_node = min(layout.world_size, hardware.cards_per_node)
    across = (4 + bytes_of(config.precision)) * part / (hardware.host_link_bandwidth * GB)
    return across + moved * ranks_on_node / (hardware.host_memory_bandwidth * GB)


def _spans_nodes(ranks: Sequence[int], cards_per_node: int) -> bool:
    return len({rank // cards_per_node for rank in ranks}) > 1
