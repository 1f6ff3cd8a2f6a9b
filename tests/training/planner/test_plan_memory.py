"""Memory by hand. n = 1000 parameters and dp = 4 unless said otherwise."""

from __future__ import annotations

import pytest

from models.losses.cross_entropy import PIECE
from training.config.schema import CheckpointMode, Device, Offload, OptimizerName, Precision
from training.engine.deepspeed_config import REDUCE_BUCKET
from training.pipeline.activation_checkpoint import ActivationCheckpointing
from training.pipeline.schedule import Interleaved, OneForwardOneBackward
from training.planner.cost import LayerCost
from training.planner.memory import ALLREDUCE_BUCKET, Memory, State, compute_loss_bytes, compute_memory, compute_state

ADAMW, SGD = OptimizerName.adamw, OptimizerName.sgd
BIG = 2 * ALLREDUCE_BUCKET


def state(n: int = 1000, dp: int = 4, precision: Precision = Precision.bf16, offload: Offload = Offload.none, optimizer: OptimizerName = ADAMW,
          device: Device = Device.cpu) -> State:  # fmt: skip
    return compute_state(n, n, dp, precision, offload, optimizer, device)


def test_bf16_holds_two_gradients_and_a_part_of_the_optimizer() -> None:
    found = state()
    assert (found.weights, found.gradients, found.optimizer, found.buffers, found.host) == (
        2000,
        2000 + 4000,
        12 * 250,
        0,
        0,
    )
    assert found.step == 2000 + 4000  # the bf16 copy that is reduced, of a flattened fp32 copy
    assert state(n=BIG).step == 2 * BIG  # one matrix group beyond a bucket is not flattened
    assert state(dp=1).step == 0  # nobody to reduce with


def test_bf16_offloaded() -> None:
    found = state(offload=Offload.cpu)
    assert (found.weights, found.gradients, found.optimizer) == (2000, 4000, 0)
    assert found.host == 250 * (4 + 8 + 4 + 2)  # master weights, moments, gradient, and the weights to send back
    assert found.step == 250 * 4 + 1000 * 6
    on_card = state(n=BIG, dp=1, offload=Offload.cpu, device=Device.cuda)
    assert (
        on_card.buffers == 4 * REDUCE_BUCKET and on_card.step == (4 + 6) * REDUCE_BUCKET
    )  # a second bucket, less the gradients moved into it, and its copies


def test_a_matrix_larger_than_a_bucket_is_reduced_by_itself() -> None:
    largest = 3 * REDUCE_BUCKET
    found = compute_state(BIG, BIG, 2, Precision.bf16, Offload.cpu, ADAMW, Device.cuda, largest=largest)
    assert found.step == 4 * REDUCE_BUCKET + (2 + 4 + 4) * largest  # the bucket is there all the same


def test_fp32() -> None:
    found = state(precision=Precision.fp32)
    assert (found.weights, found.gradients, found.optimizer, found.buffers, found.host) == (4000, 4000, 3000, 0, 0)
    assert found.step == 4 * 1000  # all gradients fit into a bucket, and are flattened at once
    on_card = state(n=BIG, dp=4, precision=Precision.fp32, device=Device.cuda)
    assert (on_card.buffers, on_card.step) == (0, BIG)  # then this rank's
    assert state(precision=Precision.fp32, offload=Offload.cpu, device=Device.cuda).buffers == 4 * REDUCE_BUCKET
    assert state(precision=Precision.fp32, offload=Offload.cpu).host == 250 * 20


def test_sgd_has_no_moments() -> None:
    assert state(optimizer=SGD).optimizer == 4 * 250
    assert state(optimizer=SGD, offload=Offload.cpu).host == 250 * 10


def test_a_frozen_parameter_is_weight_and_nothing_else() -> None:
    found = compute_state(1000, 10, 1, Precision.bf16, Offload.none, ADAMW, Device.cpu)
    assert (found.weights, found.gradients, found.optimizer) == (2000, 60, 120)


TOKENS, HIDDEN = 100, 640  # hidden_states of a micro-batch, bytes
POSITIONS = 800


def layer(saved: int) -> LayerCost:
    return LayerCost("x", 10, 10, 10, 5, 1.0, 0, saved, HIDDEN, kept_bytes=saved // 4, remade_bytes=saved // 2)


def memory(
    stage_id: int, stages: int, micro_batches: int, interval: int, mode: CheckpointMode = CheckpointMode.grouped
) -> Memory:
    nothing = State(0, 0, 0, 0, 0, 0)
    return compute_memory(
        [[layer(s) for s in (3000, 4000, 5000)]],
        stage_id,
        OneForwardOneBackward(stages, micro_batches),
        ActivationCheckpointing(interval, mode),
        TOKENS,
        7,
        nothing,
        Precision.bf16,
    )


@pytest.mark.parametrize(
    ("stage_id", "micro_batches", "in_flight"), [(0, 8, 4), (1, 8, 3), (3, 8, 1), (0, 2, 2), (2, 2, 2)]
)
def test_1f1b_keeps_the_micro_batches_in_flight(stage_id: int, micro_batches: int, in_flight: int) -> None:
    sent = 0 if stage_id == 3 else HIDDEN
    received = POSITIONS if stage_id == 0 else HIDDEN
    assert memory(stage_id, 4, micro_batches, 0).activations == in_flight * (12000 + received + POSITIONS + sent)
    assert memory(stage_id, 4, micro_batches, 0).recomputation == 0


def test_interleaved_keeps_what_each_chunk_has_in_flight() -> None:
    """Two stages, two chunks, four micro-batches. The first stage goes on with 0 1, chunk by chunk, then 2 through its first chunk."""
    nothing, schedule = State(0, 0, 0, 0, 0, 0), Interleaved(2, 4, 2)
    chunks = [[layer(3000)], [layer(4000), layer(5000)]]
    first, last = (
        compute_memory(chunks, stage, schedule, ActivationCheckpointing(0), TOKENS, 7, nothing, Precision.bf16)
        for stage in (0, 1)
    )
    of_batch, of_hidden = POSITIONS + POSITIONS + HIDDEN, HIDDEN + POSITIONS + HIDDEN
    # most is held when both chunks have two and the larger one goes on first: chunks hold (3, 2) or, later, (2, 2) and one more of the second
    assert first.activations == max(
        a * (3000 + of_batch) + b * (9000 + of_hidden) for a, b in schedule.list_in_flight(0)
    )
    assert max(a + b for a, b in schedule.list_in_flight(0)) == 5
    assert last.activations == 2 * (3000 + of_hidden) + 9000 + HIDDEN + POSITIONS  # the loss hands nothing on


def test_checkpointing_keeps_the_inputs_of_groups_and_recomputes_one() -> None:
    each = memory(1, 4, 8, 1)
    assert each.activations == 3 * (3 * HIDDEN + POSITIONS + HIDDEN + POSITIONS + HIDDEN) and each.recomputation == 5000
    pairs = memory(1, 4, 8, 2)
    assert (
        pairs.activations == 3 * (2 * HIDDEN + POSITIONS + HIDDEN + POSITIONS + HIDDEN)
        and pairs.recomputation == 7000 - HIDDEN
    )


def test_every_second_layer_keeps_its_input_and_the_others_all() -> None:
    found = memory(1, 4, 8, 2, CheckpointMode.every)  # the second of three
    assert (
        found.activations == 3 * (3000 + HIDDEN + 5000 + POSITIONS + HIDDEN + POSITIONS + HIDDEN)
        and found.recomputation == 0
    )  # the third gives back more
    assert memory(1, 4, 8, 1, CheckpointMode.every) == memory(1, 4, 8, 1)
    assert memory(1, 4, 8, 9, CheckpointMode.every).recomputation == 0


def test_selective_keeps_results_and_remakes_the_rest() -> None:
    found = memory(1, 4, 8, 2, CheckpointMode.selective)
    assert found.activations == 3 * (
        2 * HIDDEN + 12000 // 4 + POSITIONS + HIDDEN + POSITIONS + HIDDEN
    ) and found.recomputation == max(5000 // 2, 7000 // 2 - 5000 // 4 - HIDDEN)


def test_only_the_last_stage_makes_logits() -> None:
    assert [memory(stage, 3, 8, 1).loss for stage in range(3)] == [0, 0, 12 * TOKENS * 7]


def test_the_loss_makes_its_logits_in_pieces() -> None:
    many = 4096 * 128_000
    assert compute_loss_bytes(many, Precision.bf16) == 2 * many + 10 * PIECE
    assert compute_loss_bytes(many, Precision.fp32) == 8 * PIECE
    assert compute_loss_bytes(many, Precision.fp16) == 12 * many
    assert compute_loss_bytes(100, Precision.fp32) == 800


def test_the_peak_is_the_larger_of_backward_pass_and_step() -> None:
    found = Memory(
        weights=1, gradients=2, optimizer=4, activations=8, recomputation=100, loss=50, buffers=16, step=0, host=0
    )
    assert found.peak == found.backward_peak == 1 + 2 + 4 + 16 + 8 + 100
    assert Memory(1, 2, 4, 8, 100, 50, 16, step=1000, host=0).peak == 1 + 2 + 4 + 16 + 1000
