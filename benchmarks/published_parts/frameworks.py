"""Differences between other systems and this project, by what a row declares: in memory by its kernels, its loss and
the dtype of its gradients, in time by its attention, its loss and how replicas sum gradients.

B T tokens of a micro-batch, D hidden, V vocabulary, H heads, t ranks of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published_parts.rows import PublishedRun
from training.cost_terms import loss as loss_here
from training.cost_terms.cost_term import Memory
from training.costs.cost import LayerCost
from training.costs.hardware import GIB, STREAM_RATE, Machine
from training.costs.links import Sent, compute_sending_seconds
from training.distributed.topology import DATA
from training.engine.deepspeed_config import MAX_LIVE
from training.planner.plan import Plan, StagePlan

# Bytes of a logit at the peak of the loss. gathered: `torch.nn.functional.cross_entropy` of logits in fp32, at the
# backward pass: the logits in 16 bits, their log-softmax, and the gradients of `nll_loss` and `log_softmax`.
# gathered_16: the same in 16 bits (github.com/KempnerInstitute/KempnerForge, training/loss.py,
# distributed/tensor_parallel.py).
# vocabulary_parallel: Megatron's, which makes the gradient in the memory of the softmax: the logits in 16 bits and
# fp32, and the softmax
LOGIT_BYTES = {"gathered_16": 8, "gathered": 14, "vocabulary_parallel": 10}
# gathered: each rank has the logits of the whole vocabulary; with several micro-batches those of the one before, in
# 16 bits, are in the other of two buffers of outputs, which the last stage does not clear (github.com/Aleph-Alpha/
# scaling, nn/parallel_module/parallel_module.py and nn/pipeline_schedule/train.py). What it received is freed by then
BUFFERED = 2
RECEIVED = 2  # bytes of a logit that is sent to a rank
# Bytes that passes move of a logit besides products. vocabulary_parallel (github.com/NVIDIA/Megatron-LM,
# core/tensor_parallel/cross_entropy.py): cast to fp32, its maximum, less that, its exponential, the sum, divided by it;
# scaled, and cast back. gathered: cast, log-softmax with three looks at it, the most probable token; the two gradients
# that its loss makes, and cast back; with tensor parallelism what is received is copied and concatenated too, and the
# gradient of this rank's part copied (github.com/Aleph-Alpha/scaling, losses/cross_entropy.py, nn/linear/utils.py).
# gathered_16: log-softmax with three looks at the logits, and the two gradients
LOGIT_MOVED = {
    "vocabulary_parallel": 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6,
    "gathered": 6 + 16 + 4 + (4 + 16) + 6,
    "gathered_16": 8 + (2 + 8),
}
CONCATENATED, COPIED = 4 + 4, 4
# Bytes of an element of hidden states that the two norms of a Llama layer keep: those of `transformers`, which are
# counted here, work in fp32, and so do the eager ones of github.com/Aleph-Alpha/scaling (nn/norm/rms_norm.py of version
# 0.1.0, which has its kernel too); in one kernel, what goes in and the result
NORMS_HERE, NORMS = 16, {"eager": 16, "fused_norm": 8, "fused": 8}
# Bytes of an element of hidden states that stay besides those counted here, by the words of `keeps`. projection:
# queries, keys and values are one projection's result, of which the kernels keep the values, a view of it, so that its
# queries and keys stay next to those with their positions. FlashAttention's output is copied into another order for the
# next projection where a micro-batch has several rows, and both stay (github.com/Aleph-Alpha/scaling,
# nn/attention/attention.py; github.com/huggingface/nanotron, models/llama.py). gathered: with sequence parallelism what
# goes into both blocks, of the other ranks' parts; it is not gathered again in the backward pass (scaling,
# nn/norm/rms_norm.py). positions: cosines and sines are looked up for queries and for keys (nn/rotary.py), of an
# element of one head. copied: with tensor parallelism each of the five projections that is split by columns copies what
# goes into it, which three and two of them share here (github.com/PaddlePaddle/Paddle,
# python/paddle/distributed/fleet/layers/mpu/mp_ops.py and paddle/phi/kernels/impl/c_identity_kernel_impl.h)
ONE_RESULT, REORDERED, GATHERED, LOOKED_UP, COPIED_INPUTS = 4, 2, 2 + 2, 2 + 2, 2 * (5 - 2)
# Bytes of an attention score: softmax in fp32 and its result in 16 bits, or that alone
SCORES_HERE, FUSED_SCORES = {"llama": 6}, 2
# Bytes of an attention score that passes move besides products. Eager, in single kernels: scaled, masked, cast, softmax
# in fp32, cast; and the same back, but for the mask. In one kernel (Megatron's scaled masked softmax): read and
# written; back, two read and one written
EAGER_MOVED, FUSED_MOVED = (28, 28), (4, 6)
# Bytes of an attention score by which a backward pass exceeds what is kept for it. Of single kernels, as the plan
# counts them: with softmax in fp32 its gradient and that of the scores, when its result in 16 bits is freed; in 16 bits
# both. In one kernel: the gradient of the scores, which is written over that of its result
SCORES_PASSING_HERE, FUSED_SCORES_PASSING = {"llama": 6, "gpt": 4}, 2
# Bytes of a parameter that gradients take. fp32_and_16: those of a micro-batch stay next to their sums in fp32.
# fp32_whole: under FSDP, until the last micro-batch (KempnerForge, training/grad.py: `set_requires_gradient_sync`)
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp32_and_16": 6, "fp32_whole": 4}
# What a GPU holds besides, GiB: the CUDA context, unless a row states it, and the buffers of one NCCL communicator
# (0.25 to 1; an assumption). And what PyTorch's allocator reserves of what is allocated, without expandable segments,
# which these systems did not have: of the layouts of `vocabulary_parallel` that state both, 1.08 to 1.09, and once 1.39
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
    excess -= _count_kept(run)
    if run.attention == "fused_softmax":
        excess += (SCORES_HERE.get(run.family, FUSED_SCORES) - FUSED_SCORES) * run.heads * run.seq / run.tp

    def adjust(cost: LayerCost) -> LayerCost:
        # Whether a system adds gradients to their sums as it computes them is not known of most: autograd makes them
        cost = replace(cost, parameters=replace(cost.parameters, largest_made=cost.parameters.largest_trained))
        if cost.work.regathers and "gathered" in run.keeps.split():
            cost = replace(cost, work=replace(cost.work, regathers=0))
        if not cost.work.attention_width:
            return cost
        cost = replace(cost, bytes=replace(cost.bytes, saved=cost.bytes.saved - round(excess * tokens)))
        return _time_attention(run, _fuse_scores(run, cost))

    adjusted = {id(cost): adjust(cost) for cost in costs}  # layers of one kind share one
    return [*(adjusted[id(cost)] for cost in costs[:-1]), _time_loss(run, adjusted[id(costs[-1])], machine)]


def _count_kept(run: PublishedRun) -> float:
    """The bytes of a token that stay in a layer by the words of `keeps`. Products of scores take a copy of the values
    of several rows."""
    assert run.hidden is not None and run.heads is not None and run.tp is not None and run.micro_batch is not None
    is_fused, has_rows = run.attention.startswith("flash"), run.micro_batch > 1
    kept = {
        "projection": (ONE_RESULT * (is_fused or not has_rows) + REORDERED * (is_fused and has_rows)) / run.tp,
        "gathered": GATHERED * (1 - 1 / run.tp) if run.sequence_parallel else 0.0,
        "positions": LOOKED_UP / run.heads,
        "copied": COPIED_INPUTS if run.tp > 1 else 0.0,
    }
    return run.hidden * sum(kept.get(word, 0.0) for word in run.keeps.split())


def _fuse_scores(run: PublishedRun, cost: LayerCost) -> LayerCost:
    """The layer with the gradients of scores in one kernel, where they are made in one, or the widest of a matrix."""
    if run.attention != "fused_softmax":
        return cost
    assert run.micro_batch is not None and run.heads is not None and run.tp is not None and run.ffn is not None
    scores = run.micro_batch * run.heads * run.seq * (run.seq // run.cp) // run.tp
    fewer = cost.bytes.widest - (SCORES_PASSING_HERE[run.family] - FUSED_SCORES_PASSING) * scores
    matrix = 2 * run.micro_batch * run.seq // run.cp * run.ffn // run.tp
    return replace(cost, bytes=replace(cost.bytes, widest=min(cost.bytes.widest, max(fewer, matrix))))


def _time_loss(run: PublishedRun, head: LayerCost, machine: Machine) -> LayerCost:
    """The head with what the row's loss moves, in place of the project's. Logits that are gathered count as the bytes
    that the GPU's memory would move meanwhile."""
    if run.loss not in LOGIT_MOVED:
        return head
    assert run.micro_batch is not None and run.vocab is not None and run.tp is not None
    share = 1 / run.tp
    is_gathered = run.loss.startswith("gathered")
    moved = LOGIT_MOVED[run.loss] * (1 if is_gathered else share)
    if is_gathered and run.tp > 1:
        as_memory = machine.memory_bandwidth * STREAM_RATE / machine.rate_to(run.tp - 1)
        moved += CONCATENATED + COPIED * share + RECEIVED * (1 - share) * as_memory
    num_logits = run.micro_batch * run.seq // run.cp * run.vocab
    more = round((moved - loss_here.LOGIT_BYTES * share) * num_logits)
    return replace(
        head,
        work=replace(
            head.work, forward_traffic=replace(head.work.forward_traffic, moved=head.work.forward_traffic.moved + more)
        ),
    )


def _time_attention(run: PublishedRun, cost: LayerCost) -> LayerCost:
    if run.attention == "flash2":
        return replace(cost, work=replace(cost.work, runs_flash_attention_2=True))
    if run.attention == "flash1":
        more = (FLASH1_SECONDS - 1) * cost.work.attention_flops
        return replace(
            cost,
            work=replace(
                cost.work,
                attention_flops=cost.work.attention_flops + more,
                forward_flops=cost.work.forward_flops + more,
            ),
        )
    if run.attention != "fused_softmax" or run.kernels != "eager":  # where kernels are fused, softmax is one of them
        return cost
    assert run.micro_batch is not None and run.heads is not None and run.tp is not None
    scores = run.micro_batch * run.heads * run.seq * (run.seq // run.cp) // run.tp
    forward, backward = (scores * (eager - fused) for eager, fused in zip(EAGER_MOVED, FUSED_MOVED, strict=True))
    return replace(
        cost,
        work=replace(
            cost.work,
            forward_traffic=replace(cost.work.forward_traffic, moved=cost.work.forward_traffic.moved - forward),
            backward_traffic=replace(cost.work.backward_traffic, moved=cost.work.backward_traffic.moved - backward),
        ),
    )


def adjust_reduction(run: PublishedRun, plan: Plan, machine: Machine) -> Plan:
    """Return the plan with the time of the row's sums over replicas: where all ranks get them, in fp32, as much is sent
    again as where each gets its part; without ZeRO they are sent twice in the dtype that they are summed in, and no
    weights are."""
    more = 4 if run.reduction == "all_reduce" else 0 if run.zero else 2 * GRADIENT_BYTES[run.gradients] - (4 + 2)
    if not more:
        return plan

    def send(stage: StagePlan) -> float:
        nbytes = more * stage.num_parameters * (1 - 1 / plan.layout.num_weight_replicas)
        return compute_sending_seconds(Sent({DATA: nbytes}), plan.layout, stage.stage_id, machine)

    stages = [replace(stage, reduce_seconds=stage.reduce_seconds + send(stage)) for stage in plan.stages]
    return replace(plan, stages=stages)


def adjust_states(run: PublishedRun, plan: Plan) -> Plan:
    """Return the plan with the optimizer's whole state on each replica, updated there, where a row has no ZeRO."""
    if run.zero:
        return plan
    replicas = plan.layout.num_weight_replicas
    stages = [
        replace(
            stage,
            memory=replace(stage.memory, optimizer=replicas * stage.memory.optimizer),
            optimizer_seconds=replicas * stage.optimizer_seconds,
        )
        for stage in plan.stages
    ]
    return replace(plan, stages=stages)


def count_memory(run: PublishedRun, plan: Plan, costs: Sequence[LayerCost]) -> float:
    """Return the GiB of the fullest stage with the row's dtype of gradients, its loss and how it shards weights.
    costs: as `adjust_costs` returns them."""
    memories = [_adjust_memory(run, stage, costs) for stage in plan.stages]
    if run.sharding == "fsdp":
        memories = [shard_weights(run, memory, costs) for memory in memories]
    return max(memory.peak for memory in memories) / GIB


def count_measured(run: PublishedRun, allocated: float) -> float:
    """Return the GiB of a row's figure of memory: what its allocator reserves, or all of the process, where that was
    measured. allocated: by `count_memory`."""
    if run.memory_is not in ("reserved", "process"):
        return allocated
    return RESERVED * allocated + (_count_outside(run) if run.memory_is == "process" else 0)


def count_limit(run: PublishedRun, machine: Machine) -> float:
    """Return the GiB of tensors that the row's system can hold on its GPU."""
    return (machine.memory - _count_outside(run)) / RESERVED


def _count_outside(run: PublishedRun) -> float:
    """The GiB of a GPU that no allocator of tensors has."""
    context = CONTEXT if run.context is None else run.context
    return context + COMMUNICATOR * sum((size or 1) > 1 for size in (run.tp, run.pp, run.cp, run.dp))


def _adjust_memory(run: PublishedRun, stage: StagePlan, costs: Sequence[LayerCost]) -> Memory:
    memory = _keep_embedding(run, stage)
    whole = run.dp or 1 if run.gradients == "fp32_whole" else 1
    memory = replace(memory, gradients=memory.gradients * GRADIENT_BYTES[run.gradients] * whole // 4)
    if run.states:  # weights and two averages in 16 bits, without weights in fp32
        part = memory.optimizer // 3
        memory = replace(memory, optimizer=part + (part // 2 if run.sharding else 0))
    if run.precision == "fp16":  # the step's gradients in fp32, next to 12 bytes of state (DeepSpeed's, Megatron's)
        memory = replace(memory, step=max(memory.step, memory.optimizer // 3))
    if not run.loss or stage.chunks[-1].last_layer + 1 < len(costs):
        return memory
    layers = [layer for chunk in stage.chunks for layer in costs[chunk.first_layer : chunk.last_layer + 1]]
    return replace(memory, loss=max(0, count_loss_bytes(run) - count_gradients_in_pass(run, layers)))


def _keep_embedding(run: PublishedRun, stage: StagePlan) -> Memory:
    """The memory of a stage, with the whole embedding where each rank of a tensor parallel group keeps it."""
    if "embedding" not in run.keeps.split() or stage.chunks[0].first_layer > 0:
        return stage.memory
    assert run.vocab is not None and run.hidden is not None and run.tp is not None
    others = run.vocab * run.hidden * (run.tp - 1) // run.tp
    return scale_states(stage.memory, 1 + others / stage.num_parameters)


def scale_states(memory: Memory, factor: float) -> Memory:
    """Return the memory with so many times the weights, gradients and state of the optimizer."""
    scaled = {name: round(factor * getattr(memory, name)) for name in ("weights", "gradients", "optimizer")}
    return replace(memory, **scaled)


def count_gradients_in_pass(run: PublishedRun, layers: Sequence[LayerCost]) -> int:
    """Return the bytes of gradients on their way through the layers of the last stage, which a plan counts
    (`training/cost_terms/layers.py`) and which are not there yet at the peak of a loss that makes all logits."""
    assert run.tp is not None
    parts = run.tp if run.sequence_parallel else 1  # a block works on those of all ranks
    widest = max((layer.bytes.widest for layer in layers[:-1]), default=0)
    largest = max((layer.parameters.largest_made for layer in layers[:-1]), default=0)
    return 2 * parts * layers[0].bytes.output + max(widest, (4 if run.precision == "fp32" else 2) * largest)


def shard_weights(run: PublishedRun, memory: Memory, costs: Sequence[LayerCost]) -> Memory:
    """Return the memory of a row under FSDP, from that under DeepSpeed's stage 3.

    A rank has its part of the weights in fp32 alone, or as `states` says, and whole, in 16 bits, what is not a decoder
    layer (the outermost unit) and the layers at work, one of them with its gradients. Gradients are not copied for the
    step.
    """
    layers = {cost.tied_key or index: cost for index, cost in enumerate(costs)}.values()
    num_weights = sum(layer.parameters.held for layer in layers)
    live = num_weights if run.recompute == "none" else min(num_weights, MAX_LIVE)
    outermost = sum(layer.parameters.held for layer in layers if not layer.work.attention_width)
    largest = max(layer.parameters.held for layer in layers if layer.work.attention_width)
    whole = outermost + (WHOLE_LAYERS + 1) * largest
    return replace(memory, weights=0, buffers=memory.buffers + 2 * (whole - live), step=0)


def count_loss_bytes(run: PublishedRun) -> int:
    """Return the bytes of a row's loss, which makes all logits at once."""
    assert run.micro_batch is not None and run.vocab is not None and run.tp is not None and run.dp is not None
    num_logits = run.micro_batch * run.seq // run.cp * run.vocab
    if not run.loss.startswith("gathered"):
        return LOGIT_BYTES[run.loss] * num_logits // run.tp
    has_buffers = run.loss == "gathered" and run.global_batch > run.micro_batch * run.dp
    return (LOGIT_BYTES[run.loss] + BUFFERED * has_buffers) * num_logits
