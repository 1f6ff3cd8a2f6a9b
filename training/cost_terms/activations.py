"""Activations; activation checkpointing, which keeps fewer of them and runs layers again; and the host, where the rest
can wait."""

from __future__ import annotations

from training.cost_terms.cost_term import Chunk, CostTerm
from training.costs.hardware import GB
from training.costs.memory import Kept
from training.costs.time import PassCost


def compute_kept(chunk: Chunk) -> Kept:
    """Return the bytes that a micro-batch keeps, and the peak of recomputation.

    Counted group by group as the backward pass goes: what later groups kept is freed by then. Of what is on the host,
    the input of the group that is recomputed has come back, and that of the one before it is coming. A layer that runs
    no backward pass keeps nothing. Its forward pass counts where nothing later takes as much: the factors of an MLP's
    product, one of them before its activation function too, and the product."""
    checkpointing = chunk.checkpointing
    kept = recomputation = on_host = deferred = 0  # deferred: by the groups that are done
    for group in reversed(chunk.groups):
        layers = chunk.layers[group.start : group.stop]
        if not group.is_recomputed:
            kept += sum(layer.bytes.saved for layer in layers)
            continue
        remade = sum(layer.bytes.remade if checkpointing.is_selective else layer.bytes.saved for layer in layers)
        before = chunk.layers[group.start - 1].bytes.output * layers[0].num_blocks if group.start else 0
        entering = before if group.start else chunk.input_bytes
        if checkpointing.offloads and group.start:
            on_host, came_back, entering = on_host + entering, 2 * entering, 0
        else:
            came_back = 0
        recomputation = max(recomputation, came_back + remade + deferred - kept)
        kept += entering
        deferred += sum(layer.bytes.deferred for layer in layers)
        if checkpointing.is_selective:
            kept += sum(layer.bytes.kept for layer in layers)
    # One of those four is among what any pass needs (`layers.py`)
    working = max((3 * layer.bytes.widest for layer in chunk.layers[: chunk.num_forward_only]), default=0)
    return Kept(
        activations=kept,
        recomputation=max(recomputation, working - kept),
        deferred=sum(layer.bytes.deferred for layer in chunk.layers),
        host=on_host,
    )


def compute_recomputation(chunk: Chunk) -> PassCost:
    """Return the time of running layers again: whole, or under `selective` the operators whose results it does not
    keep."""
    layers = chunk.list_recomputed()
    again = chunk.remake(layers) if chunk.checkpointing.is_selective else chunk.run_again(layers) + leave_out(chunk)
    return again + compute_offload(chunk, again) if chunk.checkpointing.offloads else again


def leave_out(chunk: Chunk) -> PassCost:
    """Return, as a negative cost, the products that recomputation leaves out."""
    layers = [layer for layer in chunk.list_stopped() if layer.work.unrepeated_flops]
    seconds = -sum(
        layer.work.unrepeated_flops / layer.work.forward_flops * chunk.time_products(layer) for layer in layers
    )
    return PassCost(
        backward_flops=-sum(layer.work.unrepeated_flops for layer in layers),
        backward_seconds=seconds,
        recomputed_seconds=seconds,
    )


def compute_offload(chunk: Chunk, again: PassCost) -> PassCost:
    """Return the time that copies to and from the host add.

    They overlap with the passes, one way in the forward and one in the backward pass, and each adds the time by which
    it exceeds its pass; the backward pass also waits for the first. The GPUs of a node share its memory.

    again: what is recomputed.
    """
    hardware = chunk.run.hardware
    ranks_on_node = min(chunk.run.layout.world_size, hardware.cards_per_node)
    rate = min(hardware.host_link_bandwidth, hardware.host_memory_bandwidth / ranks_on_node) * GB
    copying, forward = compute_kept(chunk).host / rate, sum(map(chunk.time_forward, chunk.layers))
    backward = sum(map(chunk.time_backward, chunk.backward_layers)) + again.backward_seconds
    first = chunk.hidden_bytes / rate if copying else 0.0
    return PassCost(
        forward_seconds=max(0.0, copying - forward), backward_seconds=max(0.0, copying - first - backward) + first
    )


ACTIVATIONS = CostTerm(chunk_memory=compute_kept, chunk_cost=compute_recomputation)
