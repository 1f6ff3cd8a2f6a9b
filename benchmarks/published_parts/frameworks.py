"""Differences between other systems and this project, by what a row declares: in memory by its kernels, its loss and
the dtype of its gradients, in time by its attention, its loss and how replicas sum gradients.

B T tokens of a micro-batch, D hidden, V vocabulary, H heads, t ranks of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published_parts.rows import PublishedRun
from training.cost_terms import loss as loss_here
from training.costs.cost import LayerCost
from training.costs.hardware import GIB, Machine
from training.costs.kernels import STREAM_RATE
from training.costs.memory import Memory
from training.costs.time import Sent, compute_sending_seconds
from training.distributed.topology import DATA
from training.engine.deepspeed_config import MAX_LIVE
from training.planner.plan import Plan, StagePlan

# Bytes of a logit at the peak of the loss. plain, gathered: `torch.nn.functional.cross_entropy` of logits in fp32, at
# the backward pass: the logits in 16 bits, their log-softmax, and the gradients of `nll_loss` and `log_softmax`.
# vocabulary_parallel: Megatron's, which makes the gradient in the memory of the softmax: the logits in 16 bits and
# fp32, and the softmax
LOGIT_BYTES = {"plain": 14, "gathered": 14, "vocabulary_parallel": 10}
# gathered: each rank has the logits of the whole vocabulary, and next to them, in 16 bits, what it has received and
# what it has sent (github.com/Aleph-Alpha/scaling, nn/linear/column_parallel_linear.py with parallel_output=False)
RECEIVED, SENT = 2, 2
# Bytes that passes move of a logit besides products. vocabulary_parallel (github.com/NVIDIA/Megatron-LM,
# core/tensor_parallel/cross_entropy.py): cast to fp32, its maximum, less that, its exponential, the sum, divided by it;
# scaled, and cast back. gathered: cast, log-softmax with three looks at it, the most probable token; the two gradients
# that its loss makes, and cast back; with tensor parallelism what is received is copied and concatenated too, and the
# gradient of this rank's part copied (github.com/Aleph-Alpha/scaling, losses/cross_entropy.py, nn/linear/utils.py)
LOGIT_MOVED = {
    "vocabulary_parallel": 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6,
    "gathered": 6 + 16 + 4 + (4 + 16) + 6,
}
CONCATENATED, COPIED = 4 + 4, 4
# Bytes of an element of hidden states that the two norms of a Llama layer keep: those of `transformers`, which are
# counted here, work in fp32; others in 16 bits (keeping what goes in, what is scaled, and the result) or in one kernel
NORMS_HERE, NORMS = 16, {"eager": 12, "fused_norm": 8, "fused": 8}
# one_result: queries, keys and values are one projection's result, of which the kernels keep the values, a view of it,
# so that its queries and keys stay next to those with their positions. FlashAttention's output is copied into another
# order for the next projection where a micro-batch has several rows, and both stay
# (github.com/Aleph-Alpha/scaling, nn/attention/attention.py)
ONE_RESULT, REORDERED = 4, 2
# Bytes of an attention score: softmax in fp32 and its result in 16 bits, or that alone
SCORES_HERE, FUSED_SCORES = {"llama": 6}, 2
# Bytes of an attention score that passes move besides products. Eager, in single kernels: scaled, masked, cast, softmax
# in fp32, cast; and the same back, but for the mask. In one kernel (Megatron's scaled masked softmax): read and
# written; back, two read and one written
EAGER_MOVED, FUSED_MOVED = (28, 28), (4, 6)
# What a GPU holds besides, GiB: the CUDA context, and the buffers of one NCCL communicator (0.25 to 1; an assumption).
# And what PyTorch's allocator reserves of what is allocated, without expandable segments, which these systems did not
# have: of the layouts of `vocabulary_parallel` that state both, 1.08 to 1.09, and once 1.39
CONTEXT, COMMUNICATOR, RESERVED = 0.5, 0.5, 1.08
# Under FSDP, the layers whose weights are whole at a time: the one that is computed, and the next (2304.11277, 3.3.2)
WHOLE_LAYERS = 2
FLASH1_SECONDS = 2  # times those of FlashAttention-2 (2307.08691, abstract)


def adjust_costs(run: PublishedRun, costs: Sequence[LayerCost], machine: Machine) -> list[LayerCost]:
    """Return the costs of a row's layers with the activations that its system keeps, and the time of its attention and
    its loss."""
    assert run.micro_batch is not None and run.hidden is not None and run.heads is not None and run.tp is not None
    tokens = run.micro_batch * run.seq // run.cp
    excess = 0.0
    if run.family == "llama":
        parts = run.tp if run.sequence_parallel else 1
        excess += (NORMS_HERE - NORMS.get(run.kernels, NORMS_HERE)) * run.hidden / parts
    if run.qkv == "one_result":
        excess -= _count_projection(run) * run.hidden / run.tp
    if run.attention == "fused_softmax":
        excess += (SCORES_HERE.get(run.family, FUSED_SCORES) - FUSED_SCORES) * run.heads * run.seq / run.tp
    adjusted = {
        id(cost): _time_attention(run, replace(cost, saved_bytes=cost.saved_bytes - round(excess * tokens)))
        if cost.attention_width
        else cost
        for cost in costs
    }
    return [*(adjusted[id(cost)] for cost in costs[:-1]), _time_loss(run, adjusted[id(costs[-1])], machine)]


def _count_projection(run: PublishedRun) -> int:
    """The bytes of an element of hidden states that stay of queries, keys, values and outputs, where they are one
    projection's result, besides those that other systems keep. Products of scores take a copy of the values."""
    is_fused, has_rows = run.attention.startswith("flash"), (run.micro_batch or 1) > 1
    if is_fused:
        return ONE_RESULT + (REORDERED if has_rows else 0)
    return 0 if has_rows else ONE_RESULT


def _time_loss(run: PublishedRun, head: LayerCost, machine: Machine) -> LayerCost:
    """The head with what the row's loss moves, in place of the project's. Logits that are gathered count as the bytes
    that the GPU's memory would move meanwhile."""
    if run.loss not in LOGIT_MOVED:
        return head
    assert run.micro_batch is not None and run.vocab is not None and run.tp is not None
    share = 1 / run.tp
    moved = LOGIT_MOVED[run.loss] * (1 if run.loss == "gathered" else share)
    if run.loss == "gathered" and run.tp > 1:
        as_memory = machine.memory_bandwidth * STREAM_RATE / machine.intra_node_bandwidth
        moved += CONCATENATED + COPIED * share + RECEIVED * (1 - share) * as_memory
    num_logits = run.micro_batch * run.seq // run.cp * run.vocab
    more = round((moved - loss_here.LOGIT_BYTES * share) * num_logits)
    return replace(head, forward_traffic=replace(head.forward_traffic, moved=head.forward_traffic.moved + more))


def _time_attention(run: PublishedRun, cost: LayerCost) -> LayerCost:
    if run.attention == "flash1":
        more = (FLASH1_SECONDS - 1) * cost.attention_flops
        return replace(cost, attention_flops=cost.attention_flops + more, forward_flops=cost.forward_flops + more)
    if run.attention != "fused_softmax" or run.kernels != "eager":  # where kernels are fused, softmax is one of them
        return cost
    assert run.micro_batch is not None and run.heads is not None and run.tp is not None
    scores = run.micro_batch * run.heads * run.seq * (run.seq // run.cp) // run.tp
    forward, backward = (scores * (eager - fused) for eager, fused in zip(EAGER_MOVED, FUSED_MOVED, strict=True))
    return replace(
        cost,
        forward_traffic=replace(cost.forward_traffic, moved=cost.forward_traffic.moved - forward),
        backward_traffic=replace(cost.backward_traffic, moved=cost.backward_traffic.moved - backward),
    )


def adjust_reduction(run: PublishedRun, plan: Plan, machine: Machine) -> Plan:
    """Return the plan with the time of the row's sums over replicas: where all ranks get them, in fp32, as much is sent
    again as where each gets its part."""
    if run.reduction != "all_reduce":
        return plan

    def send_again(stage: StagePlan) -> float:
        nbytes = 4 * stage.num_parameters * (1 - 1 / plan.layout.num_weight_replicas)
        return compute_sending_seconds(Sent({DATA: nbytes}), plan.layout, stage.stage_id, machine)

    return replace(plan, reduce_seconds=max(stage.reduce_seconds + send_again(stage) for stage in plan.stages))


def count_memory(run: PublishedRun, plan: Plan, costs: Sequence[LayerCost]) -> float:
    """Return the GiB of the fullest stage with the row's dtype of gradients, its loss and how it shards weights."""
    last = max(chunk.last_layer for stage in plan.stages for chunk in stage.chunks)
    memories = [
        _adjust_memory(run, stage.memory, has_loss=stage.chunks[-1].last_layer == last) for stage in plan.stages
    ]
    if run.sharding == "fsdp":
        memories = [shard_weights(run, memory, costs) for memory in memories]
    return max(memory.peak for memory in memories) / GIB


def count_limit(run: PublishedRun, machine: Machine) -> float:
    """Return the GiB of tensors that the row's system can hold on its GPU."""
    communicators = sum((size or 1) > 1 for size in (run.tp, run.pp, run.cp, run.dp))
    return (machine.memory - CONTEXT - COMMUNICATOR * communicators) / RESERVED


def _adjust_memory(run: PublishedRun, memory: Memory, has_loss: bool) -> Memory:
    stated = 4 if run.gradients == "fp32" else 2
    memory = replace(memory, gradients=memory.gradients * stated // 4)
    return replace(memory, loss=count_loss_bytes(run)) if has_loss and run.loss else memory


def shard_weights(run: PublishedRun, memory: Memory, costs: Sequence[LayerCost]) -> Memory:
    """Return the memory of a row under FSDP, from that under DeepSpeed's stage 3.

    A rank has its part of the weights in fp32 alone, and whole, in 16 bits, what is not a decoder layer (the outermost
    unit) and the layers at work, one of them with its gradients. Gradients are not copied for the step.
    """
    layers = {cost.tied_key or index: cost for index, cost in enumerate(costs)}.values()
    num_weights = sum(layer.num_parameters for layer in layers)
    live = num_weights if run.recompute == "none" else min(num_weights, MAX_LIVE)
    outermost = sum(layer.num_parameters for layer in layers if not layer.attention_width)
    largest = max(layer.num_parameters for layer in layers if layer.attention_width)
    whole = outermost + (WHOLE_LAYERS + 1) * largest
    return replace(memory, weights=0, buffers=memory.buffers + 2 * (whole - live), step=0)


def count_loss_bytes(run: PublishedRun) -> int:
    """Return the bytes of a row's loss, which makes all logits at once."""
    assert run.micro_batch is not None and run.vocab is not None and run.tp is not None
    num_logits = run.micro_batch * run.seq // run.cp * run.vocab
    if run.loss != "gathered":
        return LOGIT_BYTES[run.loss] * num_logits // run.tp
    exchanged = RECEIVED + SENT / run.tp if run.tp > 1 else 0
    return round((LOGIT_BYTES[run.loss] + exchanged) * num_logits)
