"""Layers below the first trained one run no backward pass, are not recomputed and keep nothing; a later chunk runs all
of its layers backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support.adapters import build_lora
from support.chain import B, Chain, T, positions, tokens
from support.configs import build_config
from support.families import build_family
from test_cost_terms import GPU, LAYER
from torch.utils.flop_counter import FlopCounterMode

from models.adapters.adapter import Adapter
from models.adapters.freeze import choose_trained
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from training.cost_terms.activations import compute_kept
from training.cost_terms.cost_term import PlannedRun, Stage
from training.cost_terms.gradients import compute_reduction
from training.cost_terms.table import sum_memory, sum_pass_cost
from training.costs.cost import LayerCost, MicroBatchShape, count_layers
from training.distributed.topology import DATA, Layout, Topology
from training.pipeline.activation_checkpoint import Group

LOWER = ("embed_tokens", r"layers\.[0-2]\.")  # all layers but the last
TOP = ["model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj"]
FROZEN = replace(LAYER, parameters=replace(LAYER.parameters, trained=0, largest_trained=0))


def build_stage(layers: Sequence[LayerCost], *keys: str, stage_id: int = 0, num_stages: int = 1, dp: int = 1) -> Stage:
    run = PlannedRun(
        build_config("precision=bf16", "max_seq_length=100", "activation_checkpoint_interval=0", *keys),
        Layout(Topology.of(num_stages * dp, pipe=num_stages), 1, 4),
        50,
        GPU,
    )
    return Stage(run, stage_id, layers, [range(len(layers))])


def build_on_top(layers: Sequence[Layer]) -> Adapter:
    return build_lora(layers, r=4, target_modules=TOP)


@pytest.mark.parametrize(
    ("freeze", "adapt"),
    [
        pytest.param((), None, id="nothing frozen"),
        pytest.param(LOWER, None, id="lower layers frozen"),
        pytest.param((*LOWER, "lm_head"), None, id="head frozen too"),
        pytest.param((), build_lora, id="lora"),
        pytest.param((), build_on_top, id="lora on the last layer"),
    ],
)
def test_the_flops_of_passes_are_those_that_autograd_runs(
    freeze: tuple[str, ...], adapt: Callable[[Sequence[Layer]], Adapter] | None
) -> None:
    """But for the input gradients of the first trained layer's first products, which nothing below asks for."""
    model = build_family("llama")
    model.config._attn_implementation = "eager"  # whose products torch counts as they are
    layers, chain = build_layers(model.config), Chain(model)
    adapter = None if adapt is None else adapt(layers)
    for index, (layer, module) in enumerate(zip(chain.layers, chain.stages, strict=True)):
        choose_trained(module, index, layer, adapter, freeze)
    with FlopCounterMode(display=False) as counter:
        chain(tokens(), positions()).sum().backward()
    run = counter.get_total_flops() / (B * T)

    shape = MicroBatchShape(B, T, torch.float32)
    costs = count_layers(layers, model.config, shape, adapter=adapter, freeze=freeze)
    cost = sum_pass_cost(build_stage(costs, "attn_implementation=eager").chunks[0])
    first = next(each for each in costs if each.parameters.trained)
    assert run <= cost.forward_flops + cost.backward_flops <= run + first.work.forward_flops


def test_a_frozen_stage_runs_no_backward_pass_where_it_is_the_first() -> None:
    chunks = [build_stage([FROZEN, FROZEN], stage_id=stage_id, num_stages=3).chunks[0] for stage_id in (0, 1)]
    first, second = map(sum_pass_cost, chunks)
    assert first.backward_flops == first.backward_seconds == 0 < first.forward_seconds
    assert second.backward_flops == 2 * 2 * LAYER.work.forward_flops
    assert chunks[0].boundary_bytes == chunks[1].boundary_bytes  # the gradient is sent, and not used


@pytest.mark.parametrize("keys", [(), ("activation_checkpoint_interval=1",)], ids=["kept", "recomputed"])
def test_what_runs_no_backward_pass_keeps_nothing(keys: tuple[str, ...]) -> None:
    below, alone = ([FROZEN, FROZEN, LAYER, FROZEN, LAYER], [LAYER, FROZEN, LAYER])
    lower, upper = (build_stage(layers, *keys).chunks[0] for layers in (below, alone))
    assert lower.backward_layers == upper.backward_layers == alone
    assert lower.list_recomputed() == upper.list_recomputed()
    entering = LAYER.bytes.output - upper.input_bytes  # of the first group that is recomputed
    assert compute_kept(lower).activations - compute_kept(upper).activations == (entering if keys else 0)
    frozen = build_stage([FROZEN] * 3, *keys).chunks[0]
    received = frozen.integer_bytes + (0 if keys else frozen.input_bytes)
    assert compute_kept(frozen).activations == received


def test_a_forward_pass_alone_takes_what_its_widest_layer_makes() -> None:
    wide = replace(FROZEN, bytes=replace(FROZEN.bytes, widest=10**7))
    assert compute_kept(build_stage([wide, LAYER]).chunks[0]).recomputation == 3 * 10**7 - LAYER.bytes.saved
    assert compute_kept(build_stage([LAYER, wide]).chunks[0]).recomputation == 0


def test_a_group_that_is_recomputed_is_whole() -> None:
    """The second group has a trained layer, and runs again from its input."""
    chunk = build_stage([FROZEN, FROZEN, FROZEN, LAYER, LAYER], "activation_checkpoint_interval=2").chunks[0]
    assert chunk.groups == [Group(2, 4, True), Group(4, 5, True)]
    assert chunk.list_recomputed() == [FROZEN, LAYER]  # not the head
    every = build_stage(
        [FROZEN, FROZEN, FROZEN, LAYER, LAYER], "activation_checkpoint_interval=2", "activation_checkpoint_mode=every"
    ).chunks[0]
    assert every.groups == [Group(3, 4, True), Group(4, 5, False)]


def test_weights_are_gathered_for_the_passes_that_run() -> None:
    least = replace(FROZEN, parameters=replace(FROZEN.parameters, trained=1))
    frozen, trained = (
        compute_reduction(build_stage([each, each, LAYER], "zero_stage=3", dp=2)).reduce_sent[DATA]
        for each in (FROZEN, least)
    )
    per_layer = 4 * 2 * LAYER.parameters.held / 2  # micro-batches x bytes x the other rank's part
    assert trained - frozen == pytest.approx(2 * per_layer, rel=1e-3)


def test_gradients_are_reduced_while_other_layers_are_freed() -> None:
    """The bucket is full at the first trained layer: those below free nothing."""
    large = replace(LAYER, parameters=replace(LAYER.parameters, trained=10**7))
    keys = ("zero_stage=2",)
    below, alone = (sum_memory(build_stage(each, *keys, dp=2)) for each in ([FROZEN, FROZEN, large], [large]))
    assert below.buffers == alone.buffers
