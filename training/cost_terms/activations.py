"""Activations; activation checkpointing, which keeps fewer of them and runs layers again; and the host, where the rest
can wait."""

from __future__ import annotations

from collections.abc import Sequence

from training.cost_terms.buffers import count_flowing, count_on_the_way
from training.cost_terms.cost_term import Chunk, Kept, PassCost, PlannedRun
from training.cost_terms.layers import Launch, time_kernels, time_pass, time_products
from training.costs.cost import LayerCost
from training.costs.hardware import GB


def compute_kept(chunk: Chunk) -> Kept:
    """Return the bytes that a micro-batch keeps, and the peak of recomputation. It keeps the chunk's output, if that is
    sent, and what came in: hidden_states, which a first group that is recomputed counts itself, and integers. What a
    layer lends to later ones is kept for a group that is recomputed and begins with one of them: the keys that its
    indexer has selected, for layers that select none.

    Counted group by group as the backward pass goes: what later groups kept is freed by then, and the group's own input
    where autograd keeps nothing of it. Of what is on the host, the input of the group that is recomputed has come back,
    and that of the one before it is coming. While a group runs again its input is there, and results that autograd does
    not keep, but of the gradients that any pass needs (`buffers.py`) only the one that flows into it. A layer that runs
    no backward pass keeps nothing. Its forward pass counts where nothing later takes as much: the factors of an MLP's
    product, one of them before its activation function too, and the product."""
    checkpointing = chunk.checkpointing
    kept = recomputation = on_host = copied = deferred = 0  # deferred: by the groups that are done
    is_borrowed = False  # whether a later group, which is recomputed, takes what an earlier layer lends
    for group in reversed(chunk.groups):
        layers = chunk.layers[group.start : group.stop]
        lent = [layer.bytes.lent for layer in layers if layer.bytes.lent]
        if is_borrowed and lent:
            kept, is_borrowed = kept + lent[-1], False
        if not group.is_recomputed:
            kept += sum(layer.bytes.saved for layer in layers)
            continue
        is_borrowed = is_borrowed or bool(layers[0].selection and not layers[0].selection.selected_bytes)
        remade = sum(layer.bytes.remade if checkpointing.is_selective else layer.bytes.saved for layer in layers)
        entering, came_back, freed = chunk.input_bytes, 0, 0
        if group.start:
            entering = chunk.layers[group.start - 1].bytes.output * layers[0].num_blocks
            freed = entering if layers[0].bytes.frees_input and chunk.checkpointing.runs_again else 0
            if checkpointing.offloads:
                on_host, copied = on_host + chunk.run.pin(entering), copied + entering
                came_back, entering = 2 * entering, 0
        missing = freed
        if not (checkpointing.is_selective or chunk.run.config.compile):
            repeated = max(layer.bytes.repeated for layer in layers)
            missing = min(freed, count_flowing(chunk.layers, chunk) + count_on_the_way(chunk) - repeated)
        recomputation = max(recomputation, came_back + remade + deferred - kept - missing)
        kept += entering
        deferred += sum(layer.bytes.deferred for layer in layers)
        if checkpointing.is_selective:
            kept += sum(layer.bytes.kept for layer in layers)
    # One of those four is among what any pass needs (`buffers.py`)
    working = max((3 * layer.bytes.widest for layer in chunk.layers[: chunk.num_forward_only]), default=0)
    crossing = chunk.integer_bytes + (0 if chunk.has_loss else chunk.hidden_bytes)
    crossing += 0 if checkpointing.list_groups(1)[0].is_recomputed else chunk.input_bytes
    return Kept(
        activations=kept + crossing,
        recomputation=max(recomputation, working - kept),
        deferred=sum(layer.bytes.deferred for layer in chunk.layers),
        host=on_host,
        copied=copied,
    )


def compute_recomputation(chunk: Chunk) -> PassCost:
    """Return the time of running layers again: whole, but for the products behind the last activation that is kept; or
    under `selective` the operators whose results it does not keep."""
    run, layers = chunk.run, chunk.list_recomputed()
    if chunk.checkpointing.is_selective:
        flops = sum(layer.work.attention_flops for layer in layers) if run.is_eager else 0.0
        again = _add_to_backward(flops, sum(time_remade(layer, run) for layer in layers))
    else:
        stopped = [(layer, layer.work.unrepeated_flops) for layer in chunk.list_stopped()]
        left_out = sum(time_products(layer, run, flops) for layer, flops in stopped)
        again = run_again(layers, run) + _add_to_backward(-sum(flops for _, flops in stopped), -left_out)
    return again + compute_offload(chunk, again) if chunk.checkpointing.offloads else again


def run_again(layers: Sequence[LayerCost], run: PlannedRun) -> PassCost:
    """Return the cost that a second forward pass of `layers` adds to the backward pass."""
    launch = Launch.plain if run.config.compile else Launch.repeated
    seconds = sum(time_pass(layer, run, launch=launch) for layer in layers)
    return _add_to_backward(sum(layer.work.forward_flops for layer in layers), seconds)


def _add_to_backward(flops: float, seconds: float) -> PassCost:
    return PassCost(backward_flops=flops, backward_seconds=seconds, recomputed_seconds=seconds)


def time_remade(layer: LayerCost, run: PlannedRun) -> float:
    """Return the seconds of what `selective` runs again of a layer, the scores of eager attention included; of one that
    was timed by the bytes it moves."""
    traffic = layer.work.remade_traffic
    if layer.work.pass_seconds:
        return min(traffic.moved / run.hardware.stream_rate, time_pass(layer, run))
    products = run.time_flops(layer.work.attention_flops) if run.is_eager else 0.0
    return time_kernels(products, 0.0, traffic, run.hardware, Launch.plain if run.config.compile else Launch.selective)


def compute_offload(chunk: Chunk, again: PassCost) -> PassCost:
    """Return the time that copies to and from the host add.

    They overlap with the passes, one way in the forward and one in the backward pass, and each adds the time by which
    it exceeds its pass; the backward pass also waits for the first. The GPUs of a node share its memory.

    again: what is recomputed.
    """
    run, hardware = chunk.run, chunk.run.hardware
    ranks_on_node = min(run.layout.world_size, hardware.cards_per_node)
    rate = min(hardware.host_link_bandwidth, hardware.host_memory_bandwidth / ranks_on_node) * GB
    copying, forward = compute_kept(chunk).copied / rate, sum(time_pass(layer, run) for layer in chunk.layers)
    backward = sum(time_pass(layer, run, is_backward=True) for layer in chunk.backward_layers) + again.backward_seconds
    first = chunk.hidden_bytes / rate if copying else 0.0
    return PassCost(
        forward_seconds=max(0.0, copying - forward), backward_seconds=max(0.0, copying - first - backward) + first
    )
