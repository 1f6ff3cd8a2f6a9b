"""Memory by hand. n = 1000 parameters and dp = 4 unless said otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.configs import build_config
from support.logit_chunks import set_chunk_size

from batch import Targets
from benchmarks.allocation import AllocationPeak
from models.losses import logit_chunks
from models.losses.cross_entropy import causal_lm_loss
from training.config.schema import CheckpointMode, Device, Precision
from training.cost_terms.activations import compute_kept
from training.cost_terms.cost_term import Memory, PlannedRun, Stage
from training.cost_terms.loss import LossBytes
from training.cost_terms.model_states import compute_model_states
from training.cost_terms.table import sum_memory
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import Machine
from training.distributed.topology import Layout, Topology
from training.engine.deepspeed_config import REDUCE_BUCKET
from training.optim.chunks import CHUNK_SIZE as UPDATED
from training.pipeline.schedule import Interleaved

BIG = 10**9
HOST = Machine(
    name="any", device=Device.cpu, cards_per_node=8, memory=1, usable_memory=1, peak_flops={"bf16": 1, "fp32": 1},
    efficiency=1, memory_bandwidth=1, intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory=1,
    host_memory_bandwidth=1, host_link_bandwidth=1, device_name="any",
)  # fmt: skip
GPU = replace(HOST, device=Device.cuda)
OFFLOADED, REDUCED = "offload_optimizer=cpu", "gradient_reduce_dtype=bf16"


def layer(saved: int, n: int = 10, trainable: int | None = None, largest: int = 5) -> LayerCost:
    trained = n if trainable is None else trainable
    return LayerCost(
        name="x",
        parameters=Parameters(held=n, trained=trained, active=n, largest_trained=largest, largest_made=largest),
        work=Work(forward_flops=1.0, attention_width=0),
        bytes=Bytes(saved=saved, output=HIDDEN, kept=saved // 4, remade=saved // 2),
    )


def state(
    *overrides: str, n: int = 1000, trainable: int | None = None, dp: int = 4, largest: int = 0,
    machine: Machine = HOST, saved: int = 0,
) -> Memory:  # fmt: skip
    """Model states of a first stage of n parameters, in bf16 unless `overrides` say otherwise."""
    layout = Layout(Topology.of(2 * dp, pipe=2), 1, 8)
    run = PlannedRun(build_config("precision=bf16", *overrides), layout, 7, machine)
    return compute_model_states(Stage(run, 0, [layer(saved, n, trainable, largest)], [range(1)]))


def test_bf16_holds_the_sum_of_gradients_and_a_part_of_the_optimizer() -> None:
    gathered = 2 * 1000  # what gloo makes of the updated weights
    assert state() == Memory(weights=2000, gradients=4000, optimizer=12 * 250, step=gathered)
    assert state(dp=1).step == state(machine=GPU).step == 0
    assert state(REDUCED).buffers == 2 * 1000  # a copy of a bucket where it is cast to be reduced
    assert state(REDUCED, n=BIG).buffers == 2 * REDUCE_BUCKET
    assert state(REDUCED, dp=1).buffers == 0  # nobody to reduce with


def test_bf16_offloaded() -> None:
    # on the host: master weights, moments, gradient, and the weights to send back
    on_host = 250 * (4 + 8 + 4 + 2)
    assert state(OFFLOADED) == Memory(weights=2000, gradients=4000, host=on_host, step=2 * 1000)
    assert state(OFFLOADED, REDUCED).buffers == 2 * 1000


def test_what_is_offloaded_from_a_card_is_pinned_in_powers_of_two() -> None:
    pinned = (
        1024 + 1024 + 512 + 64
    )  # of 250 master weights, their gradient, the weights to send; of the largest gradient
    assert state(OFFLOADED, largest=20, machine=GPU).host == pinned + 250 * 8  # moments are torch's, and are not
    assert state(OFFLOADED, largest=20).host == 250 * 18  # a CPU pins nothing
    exact = state(OFFLOADED, "optimizer=sgd", n=1024, dp=4, largest=0, machine=GPU)
    assert exact.host == 256 * 10  # which is a power of two each
    assert state(OFFLOADED, largest=20, machine=GPU).buffers == 2 * 20


def test_a_matrix_larger_than_a_bucket_is_reduced_by_itself() -> None:
    largest = 3 * REDUCE_BUCKET  # its copy in bf16, less its new gradient, which is freed
    new, copy = 2 * largest, 2 * largest
    assert state(REDUCED, n=BIG, dp=2, largest=largest, machine=GPU).buffers == max(0, copy - new)


def test_fp32() -> None:
    assert state("precision=fp32") == Memory(weights=4000, gradients=4000, optimizer=3000, step=4 * 1000)
    assert state("precision=fp32", OFFLOADED).host == 250 * 20


def test_fp16() -> None:
    found = state("precision=fp16", n=BIG, machine=GPU)  # reduced in fp32, a bucket at a time
    assert (found.weights, found.gradients, found.optimizer) == (2 * BIG, 2 * BIG, 3 * BIG)
    assert (found.buffers, found.step) == (4 * REDUCE_BUCKET, 0)
    assert state("precision=fp16", "optimizer=sgd", n=BIG, machine=GPU).step == 4 * BIG // 4  # DeepSpeed's own step
    offloaded = state("precision=fp16", OFFLOADED, n=BIG, machine=GPU)
    pinned = 2**30 + 2**30 + 2**29  # of BIG / 4 parameters
    assert (offloaded.buffers, offloaded.step) == (4 * REDUCE_BUCKET, 4 * BIG // 4)
    assert offloaded.host == 8 * BIG // 4 + pinned


def test_zero_stage_2_holds_a_part_of_the_sums() -> None:
    bucket = 2 * (1000 - 20) + 4 * 1000  # beside one gradient, which is counted with the layers; what is made of it
    found = state("zero_stage=2", "activation_checkpoint_interval=1", largest=20)
    assert found == Memory(weights=2000, gradients=1000, optimizer=3000, buffers=bucket, step=2 * 1000)
    for saved, beside in ((0, bucket), (5000, bucket - 5000), (10_000, 0)):  # when it is full, those are freed
        assert state("zero_stage=2", "activation_checkpoint_interval=0", largest=20, saved=saved).buffers == beside


def test_a_bucket_of_alike_layers_is_full_at_the_first_of_them() -> None:
    last, alike = layer(0, n=1000, largest=0), layer(500, n=10, largest=0)
    layout, keys = Layout(Topology.of(4), 1, 8), ("precision=bf16", "zero_stage=2", "activation_checkpoint_interval=0")
    for first in (alike, replace(alike)):  # one object three times, and a copy of it
        stage = Stage(PlannedRun(build_config(*keys), layout, 7, GPU), 0, [first, alike, alike, last], [range(4)])
        # 1,030 gradients, and what is made of them, when two of the alike layers are freed, and the first one is too
        assert compute_model_states(stage).buffers == (2 + 4) * 1030 - 3 * 500


def test_at_zero_stage_2_what_stages_share_is_summed_whole_and_in_no_bucket() -> None:
    """An embedding that is the head of the last stage."""
    keys = ("precision=bf16", "zero_stage=2", "activation_checkpoint_interval=1")
    run = PlannedRun(build_config(*keys), Layout(Topology.of(8, pipe=2), 1, 8), 7, GPU)
    embedding, decoder = layer(0, n=1000, largest=0), layer(0, n=100, largest=0)
    untied, tied = (
        compute_model_states(Stage(run, 0, [first, decoder], [range(2)]))
        for first in (embedding, replace(embedding, tied_key="embedding"))
    )
    assert (untied.gradients, untied.buffers) == (4 * 1100 // 4, (2 + 4) * 1100)
    assert (tied.gradients, tied.buffers) == (4 * 1100 // 4 + 4 * 1000, (2 + 4) * 100)
    alone = replace(run, layout=Layout(Topology.of(2, pipe=2), 1, 8))
    shared = Stage(alone, 0, [replace(embedding, tied_key="embedding"), decoder], [range(2)])
    assert compute_model_states(shared).gradients == 4 * 1100  # nobody to divide the sums with


def test_zero_stage_2_offloaded_holds_its_part_of_the_sums_on_the_gpu() -> None:
    keys = ("zero_stage=2", "activation_checkpoint_interval=1")
    held, offloaded = state(*keys, largest=20), state(*keys, OFFLOADED, largest=20)
    assert offloaded == replace(held, optimizer=0, host=250 * (4 + 8 + 4 + 2))


def test_zero_stage_2_in_fp16() -> None:
    found, on_gpu = (
        state("precision=fp16", "zero_stage=2", "activation_checkpoint_interval=1", machine=machine)
        for machine in (HOST, GPU)
    )
    buffers = 2 * 1000 + 4 * 1000
    assert found == Memory(weights=2000, gradients=500, optimizer=3000, buffers=buffers, step=2 * 1000)
    assert on_gpu.step == 0


def test_stage_3_may_keep_its_part_of_the_weights_on_the_host() -> None:
    sharded, offloaded = (state("zero_stage=3", *more) for more in ((), ("offload_parameters=cpu",)))
    assert (sharded.weights, sharded.host) == (500, 0)
    assert offloaded == replace(sharded, weights=0, host=500)
    assert state("zero_stage=3", "offload_parameters=cpu", machine=GPU).host == 512


def test_sgd_has_no_moments() -> None:
    assert state("optimizer=sgd").optimizer == 4 * 250
    assert state("optimizer=sgd", OFFLOADED).host == 250 * 10


@pytest.mark.parametrize(
    ("optimizer", "bytes_kept"),
    [
        (("optimizer.state_dtype=bf16",), 4),
        (("optimizer=lion",), 4),
        (("optimizer=adamw_8bit",), 2 * (1 + 4 / 256)),
        (("optimizer=custom", "+optimizer.custom={_target_: torch.optim.SGD, momentum: 0.9}"), 4),
    ],
)
def test_small_states_take_what_they_say(optimizer: tuple[str, ...], bytes_kept: float) -> None:
    assert state(*optimizer).optimizer == 4 * 250 + round(bytes_kept * 250)


def test_updates_in_pieces_need_a_buffer_of_one() -> None:
    for keys, buffers in ((("optimizer.state_dtype=bf16",), 2), (("optimizer=lion",), 1), (("optimizer=adamw",), 0)):
        assert state(*keys, n=BIG, machine=HOST, dp=1).step == buffers * 4 * UPDATED
        assert state(*keys, n=BIG, machine=GPU, dp=1).step == 0  # one kernel
        offloaded = state(*keys, "offload_optimizer=cpu", n=BIG, machine=GPU, dp=1)
        assert offloaded.step == 0  # on the host


def test_a_frozen_parameter_is_weight_and_nothing_else() -> None:
    found = state(trainable=10, dp=1)
    assert (found.weights, found.gradients, found.optimizer) == (2000, 40, 120)


TOKENS, HIDDEN = 100, 640  # hidden_states of a micro-batch, bytes
IDS, INTEGERS = 8 * TOKENS, 12 * TOKENS  # what the first layer takes, and what crosses every boundary


def stage_of(layers: list[LayerCost], layout: Layout, stage_id: int, *overrides: str, chunks: int = 1) -> Stage:
    """`layers` in one chunk, or the first of them and the others; in bf16, TOKENS a micro-batch."""
    config = build_config("precision=bf16", f"max_seq_length={TOKENS}", *overrides)
    whole = range(len(layers))
    return Stage(
        PlannedRun(config, layout, 7, HOST), stage_id, layers, [whole] if chunks == 1 else [whole[:1], whole[1:]]
    )


def memory(
    stage_id: int, stages: int, micro_batches: int, interval: int, mode: CheckpointMode = CheckpointMode.grouped
) -> Memory:
    keys = f"activation_checkpoint_interval={interval}", f"activation_checkpoint_mode={mode.value}"
    layers = [layer(s) for s in (3000, 4000, 5000)]
    return sum_memory(stage_of(layers, Layout(Topology.of(stages, pipe=stages), 1, micro_batches), stage_id, *keys))


@pytest.mark.parametrize(
    ("stage_id", "micro_batches", "in_flight"), [(0, 8, 4), (1, 8, 3), (3, 8, 1), (0, 2, 2), (2, 2, 2)]
)
def test_1f1b_keeps_the_micro_batches_in_flight(stage_id: int, micro_batches: int, in_flight: int) -> None:
    sent = 0 if stage_id == 3 else HIDDEN
    received = IDS if stage_id == 0 else HIDDEN
    assert memory(stage_id, 4, micro_batches, 0).activations == in_flight * (12000 + received + INTEGERS + sent)
    assert memory(stage_id, 4, micro_batches, 0).recomputation == 0


def test_interleaved_keeps_what_each_chunk_has_in_flight() -> None:
    """Two stages, two chunks, four micro-batches. The first stage continues with 0 1, chunk by chunk, then 2 through
    its first chunk."""
    schedule = Interleaved(2, 4, 2)
    layers, layout = (
        [layer(3000), layer(4000), layer(5000)],
        Layout(Topology.of(2, pipe=2), 1, 4, num_chunks=2, schedule="interleaved"),
    )
    keep_all = "activation_checkpoint_interval=0"
    first, last = (sum_memory(stage_of(layers, layout, stage, keep_all, chunks=2)) for stage in (0, 1))
    batch_bytes, grad_hidden = IDS + INTEGERS + HIDDEN, HIDDEN + INTEGERS + HIDDEN
    # most is held when both chunks have two and the larger one goes on first: chunks hold (3, 2) or, later, (2, 2) and
    # one more of the second
    assert first.activations == max(
        a * (3000 + batch_bytes) + b * (9000 + grad_hidden) for (a, b), _ in schedule.list_in_flight(0)
    )
    assert max(a + b for (a, b), _ in schedule.list_in_flight(0)) == 5
    assert last.activations == 2 * (3000 + grad_hidden) + 9000 + HIDDEN + INTEGERS  # the loss hands nothing on


def test_checkpointing_keeps_the_inputs_of_groups_and_recomputes_one() -> None:
    each = memory(1, 4, 8, 1)
    assert each.activations == 3 * (3 * HIDDEN + INTEGERS + HIDDEN) and each.recomputation == 5000
    pairs = memory(1, 4, 8, 2)
    assert pairs.activations == 3 * (2 * HIDDEN + INTEGERS + HIDDEN) and pairs.recomputation == 7000 - HIDDEN


def test_every_second_layer_keeps_its_input_and_the_others_all() -> None:
    found = memory(1, 4, 8, 2, CheckpointMode.every)  # the second of three
    assert (
        found.activations == 3 * (3000 + HIDDEN + 5000 + HIDDEN + INTEGERS + HIDDEN) and found.recomputation == 0
    )  # the third gives back more
    assert memory(1, 4, 8, 1, CheckpointMode.every) == memory(1, 4, 8, 1)
    assert memory(1, 4, 8, 9, CheckpointMode.every).recomputation == 0


def test_selective_keeps_results_and_remakes_the_rest() -> None:
    found = memory(1, 4, 8, 2, CheckpointMode.selective)
    assert found.activations == 3 * (2 * HIDDEN + 12000 // 4 + INTEGERS + HIDDEN) and found.recomputation == max(
        5000 // 2, 7000 // 2 - 5000 // 4 - HIDDEN
    )


def test_inputs_on_the_host_are_pinned_in_powers_of_two_and_copied_as_they_are() -> None:
    keys = ("activation_checkpoint_interval=1", "activation_offload=true")
    layers, layout = [layer(s) for s in (3000, 4000, 5000)], Layout(Topology.of(2, pipe=2), 1, 8)
    on_cpu = stage_of(layers, layout, 1, *keys)
    on_gpu = replace(on_cpu, run=replace(on_cpu.run, hardware=GPU))
    found = [compute_kept(stage.chunks[0]) for stage in (on_cpu, on_gpu)]  # of two groups, not of the first
    assert [(kept.host, kept.copied) for kept in found] == [(2 * HIDDEN, 2 * HIDDEN), (2 * 1024, 2 * HIDDEN)]


def test_only_the_last_stage_makes_logits() -> None:
    beside = 12 * TOKENS * 7 - HIDDEN  # of the two gradients of hidden states in a pass, there is one
    assert [memory(stage, 3, 8, 1).loss for stage in range(3)] == [0, 0, beside]


@pytest.mark.parametrize(("on_gpu", "rows"), [(False, 256), (True, 1024)])
def test_the_loss_makes_its_logits_in_pieces(on_gpu: bool, rows: int) -> None:
    many, vocabulary = 4096, 128_000
    chunk = rows * vocabulary
    sizes = many, vocabulary, 4096
    assert LossBytes(*sizes, Precision.bf16, on_gpu).peak == 2 * many * vocabulary + 10 * chunk
    assert LossBytes(*sizes, Precision.bf16, on_gpu, weight_trains=False).peak == 10 * chunk
    assert LossBytes(*sizes, Precision.fp32, on_gpu).peak == 8 * chunk
    assert LossBytes(*sizes, Precision.fp16, on_gpu).peak == 12 * many * vocabulary
    assert LossBytes(10, 10, 4096, Precision.fp32, on_gpu).peak == 800


@pytest.mark.parametrize(("on_gpu", "rows", "part"), [(False, 256, 2**25), (True, 1024, 2**27)])
def test_of_many_targets_the_loss_sums_the_gradient_of_the_head(on_gpu: bool, rows: int, part: int) -> None:
    """As much for 128k tokens as for 16k: pieces of 1,024 targets in all wait, beside a sum in fp32."""
    vocabulary, hidden_size = 128_000, 4096
    needed = [LossBytes(many, vocabulary, hidden_size, Precision.bf16, on_gpu).peak for many in (2**14, 2**17)]
    summed = 4 * vocabulary * hidden_size + 2 * part
    assert needed == [10 * rows * vocabulary + 2 * 1024 * vocabulary + summed] * 2
    assert needed[0] < 2 * 2**14 * vocabulary + 12 * 2**27


def test_the_peak_is_the_larger_of_backward_pass_and_step() -> None:
    found = Memory(
        weights=1, gradients=2, optimizer=4, activations=8, recomputation=100, loss=50, buffers=16, step=0, host=0
    )
    assert found.peak == found.backward_peak == 1 + 2 + 4 + 16 + 8 + 100
    assert replace(found, step=1000).peak == 1 + 2 + 4 + 16 + 1000


@pytest.mark.parametrize("weight_trains", [True, False])
def test_what_the_loss_of_many_targets_takes(monkeypatch: pytest.MonkeyPatch, weight_trains: bool) -> None:
    """Beside what goes in, the gradients that come out included."""
    tokens, hidden_size, vocabulary = 2048, 128, 3000
    set_chunk_size(monkeypatch, 32 * vocabulary)
    monkeypatch.setattr(logit_chunks, "WAITING", 0)
    states, weight = (
        torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((1, tokens, hidden_size), (vocabulary, hidden_size))
    )
    targets = Targets.find(torch.randint(vocabulary, (1, tokens)), torch.tensor(1.0))
    weight.requires_grad_(weight_trains)
    with AllocationPeak(states, weight) as counter:
        torch.autograd.grad(causal_lm_loss((states, weight), targets), (states, weight)[: 1 + weight_trains])
    grad_hidden = 2 * 2 * states.numel()  # those of targets, and their gradient
    sizes = tokens, vocabulary, hidden_size
    found = LossBytes(*sizes, Precision.bf16, on_gpu=False, weight_trains=weight_trains)
    expected = found.peak + grad_hidden
    assert counter.peak == pytest.approx(expected, rel=0.05)
    assert expected < 2 * tokens * vocabulary
