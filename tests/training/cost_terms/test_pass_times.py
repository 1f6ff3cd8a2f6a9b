"""The time of a pass, by which layers are distributed and passes are ordered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.configs import build_config
from support.families import build_family_config
from support.planned import describe_machine, resolve_described
from transformers import LlamaConfig, PretrainedConfig

from training.config.schema import RunConfig
from training.costs.hardware import Machine
from training.planner.plan import plan_resolved
from training.resolution.resolve import ResolvedRun, place_layers, resolve_layout
from training.resolution.target import Target

LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 3000,
}  # fmt: skip


SIZES = ("num_stages=2", "micro_batch_size=2", "gradient_accumulation_steps=4", "max_seq_length=512")
CPUS = Target(2, has_accelerator=False)


def resolve(architecture: PretrainedConfig, *overrides: str, target: Target = CPUS) -> ResolvedRun:
    config = build_config(*SIZES, *overrides)
    return resolve_layout(resolve_described(config, architecture, 2), config, target)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_stage_with_the_head_has_fewer_layers(tied: bool) -> None:
    bounds = resolve(LlamaConfig(**LLAMA, tie_word_embeddings=tied), "activation_checkpoint_interval=0").bounds
    assert bounds[1] - 1 > 6 - (bounds[1] - 1)


def test_a_split_is_balanced_by_the_experts_that_a_token_chooses() -> None:
    """A dense first layer, then three with 8 experts of half its size, of which a token takes two: four alike but for
    a small router."""
    sizes = {"intermediate_size": 72, "moe_intermediate_size": 36, "vocab_size": 8}
    run = resolve(build_family_config("qwen3_moe", mlp_only_layers=[0], **sizes))
    assert run.bounds == [0, 3, 7]


def test_all_schedules_have_the_times_of_their_chunks_in_whole_nanoseconds() -> None:
    for overrides in ((), ("schedule=interleaved", "virtual_stages_per_rank=2"), ("schedule=zero_bubble",)):
        run = resolve(LlamaConfig(**LLAMA), *overrides)
        times = run.layout.pass_times
        assert len(times) == len(run.bounds) - 1
        assert all(isinstance(time, int) for each in times for time in each)
        assert all(each.forward > 0 and each.input_backward > 0 for each in times)
        assert any(each.weight_backward for each in times) == (overrides == ("schedule=zero_bubble",))


def test_the_times_that_order_a_run_are_those_of_its_plan() -> None:
    h100 = describe_machine(build_config("hardware=h100", "precision=bf16", "world_size=2"))
    target = Target(2, True, h100, is_planned=True)
    run = resolve(LlamaConfig(**LLAMA), "schedule=zero_bubble", "precision=bf16", target=target)
    chunks = plan_resolved(run, h100).chunks
    for chunk, times in zip(chunks, run.layout.pass_times, strict=True):
        assert times.forward == pytest.approx(1e9 * chunk.cost.forward_seconds, abs=1)
        assert times.input_backward + times.weight_backward == pytest.approx(1e9 * chunk.cost.backward_seconds, abs=2)
        assert times.weight_backward == pytest.approx(1e9 * chunk.cost.deferred_seconds, abs=1)


def test_a_cpu_is_split_alike_whatever_it_measures() -> None:
    """A plan measures the rates of this machine, its run does not."""
    config = build_config(*SIZES, "hardware=here")
    model = resolve_described(config, LlamaConfig(**LLAMA), 2)
    run = resolve_layout(model, config, CPUS)
    slow = Machine(
        name="here", device=config.hardware.device, cards_per_node=2, memory=8, usable_memory=1.0,
        peak_flops={"fp32": 1.0}, efficiency=1.0, memory_bandwidth=1e9, intra_node_bandwidth=1, inter_node_bandwidth=1,
        host_memory=8, host_memory_bandwidth=1, host_link_bandwidth=1, device_name="cpu",
    )  # fmt: skip
    planned = place_layers(model, config, replace(run.layout, pass_times=()), Target(2, True, slow, is_planned=True))
    assert (planned.bounds, planned.layout) == (run.bounds, run.layout)


def test_an_evaluation_is_split_by_its_forward_passes() -> None:
    """In training the head takes part of its backward pass's work in the loss, and layers are recomputed."""
    config: RunConfig = build_config(*SIZES, "evaluate_only=true", "eval_file=x.jsonl")
    run = resolve_layout(resolve_described(config, LlamaConfig(**LLAMA), 2), config, CPUS)
    assert all(each.input_backward == each.weight_backward == 0 for each in run.layout.pass_times)
