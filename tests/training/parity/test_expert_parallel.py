"""Experts divided among ranks: gradients, and losses, norms and weights of five SGD steps, are those of the plain
Hugging Face model in one process; alone, and with stages, replicas, shards of layers and parts of sequences."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.families import FAMILIES, MIXTURES, build_family, save_family
from support.launching import run_deepspeed
from support.parity_table import LARGE
from support.runs import export_of, read_metrics
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

from models.parallel.shard import NO_CP
from training.distributed.topology import Topology
from training.pipeline.schedule import OneForwardOneBackward
from training.pipeline.stage_ranks import join_stage_ranks

# expert_parallel_size, stages, ranks, and other keys
LAYOUTS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "whole": (1, 1, 2, ()),
    "ep2": (2, 1, 2, ()),
    "ep4": (4, 1, 4, ()),
    "ep2xdp2": (2, 1, 4, ()),
    "ep2xpp2": (2, 2, 4, ()),
    "ep2xcp2": (2, 1, 2, ("context_parallel_size=2",)),
    "ep4xcp2": (4, 1, 4, ("context_parallel_size=2",)),
    "ep2xtp2": (2, 1, 4, ("tensor_parallel_size=2",)),
}
STEPS = ("learning_rate=0.05", CLIPPED)
GRADIENTS = (f"learning_rate={LARGE}", "max_grad_norm=0")  # one step so long that the new weights are the gradients
WITH_FILES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss", "llama4_text")
SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
full = pytest.mark.full


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, *overrides, steps): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("experts")
    records = save_records(root / "train.jsonl", 40)
    save_tokenizer(root / "tokenizer")

    def case(family: str, layout: str, *overrides: str, steps: int = 5) -> Case:
        folder = root / family
        if not folder.exists():
            save_family(folder, family, tied=False)
        size, num_stages, world_size, keys = LAYOUTS[layout]
        given = (f"tokenizer_name_or_path={root}/tokenizer", f"expert_parallel_size={size}", *keys, *overrides)
        return Case(folder, records, root, num_stages, world_size, steps, given)

    return case


def compare(workers: Callable[[int], WorkerGroup], case: Case, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return the result of the run."""
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case, model)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    return result


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("qwen3_moe", "ep2", ()),
        *(
            pytest.param(family, "ep2xpp2", (f"schedule={schedule}",), marks=full)
            for family in (*WITH_FILES, "qwen3_moe")
            for schedule in SCHEDULES
        ),
        *(
            pytest.param("deepseek_v3", layout, overrides, marks=full)
            for layout, overrides in (
                ("ep4", ()),
                ("ep2xdp2", ()),
                ("ep2xcp2", ()),
                ("ep4xcp2", (CHECKPOINTED,)),
                ("ep2xtp2", ()),
                ("ep2", (CHECKPOINTED,)),
                ("ep2", SELECTIVE),
                ("ep2xpp2", (*SELECTIVE, "schedule=zero_bubble")),
                ("ep2xdp2", ("zero_stage=2", CHECKPOINTED)),
                ("ep2", ("zero_stage=2",)),
                ("ep2xpp2", ("zero_stage=2", "schedule=interleaved")),
                ("ep2xdp2", ("offload_optimizer=cpu",)),
            )
        ),
        *(
            pytest.param("gpt_oss", layout, overrides, marks=full)
            for layout, overrides in (
                ("ep4", ()),
                ("ep2xdp2", EVERY_SECOND),
                ("ep2xcp2", ()),
                ("ep2xtp2", ()),
                ("ep2xpp2", ("schedule=zero_bubble", CHECKPOINTED, "zero_stage=2")),
            )
        ),
        *(
            pytest.param("llama4_text", layout, overrides, marks=full)
            for layout, overrides in (
                ("ep4", SELECTIVE),
                ("ep2xdp2", ()),
                ("ep2xtp2", ()),
                ("ep2xcp2", (CHECKPOINTED,)),
            )
        ),
        *(pytest.param(family, "ep2", (), marks=full) for family in ("deepseek_v32", "glm_moe_dsa")),
        pytest.param("deepseek_v32", "ep2xdp2", (*SELECTIVE, "zero_stage=2"), marks=full),
        pytest.param("glm_moe_dsa", "ep2xpp2", (CHECKPOINTED, "schedule=zero_bubble"), marks=full),
        *(pytest.param("qwen3_moe", layout, (), marks=full) for layout in ("ep4", "ep2xdp2", "ep2xtp2")),
    ],
)
def test_five_sgd_steps_equal_hugging_face(
    workers, material, family: str, layout: str, overrides: tuple[str, ...]
) -> None:
    compare(workers, material(family, layout, *STEPS, *overrides))


@full
@pytest.mark.parametrize("family", sorted({*MIXTURES, *WITH_FILES} & {*MIXTURES, *FAMILIES}))
def test_gradients_of_every_mixture_equal_hugging_face(workers, material, family: str) -> None:
    compare(workers, material(family, "ep2", *GRADIENTS, steps=1))


@full
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("ep2", ("zero_stage=2", *SELECTIVE)),
        ("ep2xdp2", (CHECKPOINTED,)),
        ("ep2xpp2", ("schedule=zero_bubble",)),
        ("ep2xtp2", ()),
    ],
)
def test_one_expert_gets_every_token(workers, material, layout: str, overrides: tuple[str, ...]) -> None:
    """The others of its rank get no token, and the other rank no row, in any layer and step."""
    case = material("gpt_oss", layout, *STEPS, *overrides)
    routed = compare(workers, replace(case, model=save_one_sided(case.workdir / "one-sided")))["routed"]
    assert (routed["expert_load_max"], routed["expert_load_min"], routed["expert_rank_load_max"]) == (8, 0, 2)


def find_most_loaded_rank(counts: torch.Tensor) -> float:
    """counts: tokens of each rank for each expert, [ranks, layers, experts]."""
    from models.experts.router import RouterOptions
    from training.pipeline.routers import StageRouters

    topology, rank = Topology.of(4, experts=2), dist.get_rank()
    ranks = join_stage_ranks(topology, OneForwardOneBackward(1, 1), rank, NO_CP)
    routers = StageRouters(RouterOptions(), (), ranks, device=torch.device("cpu"))
    routers._blocks, routers._interval_counts, routers._num_tokens = [None] * counts.shape[1], counts[rank], 1
    return routers.finish_interval()["expert_rank_load_max"]


def test_the_most_loaded_rank_is_that_of_any_group_and_layer(workers) -> None:
    """Ranks 0 and 1 divide four experts, and so do 2 and 3; in sum over both groups the load is even."""
    counts = torch.zeros(4, 2, 4, dtype=torch.int64)
    counts[:, 0] = 2
    counts[0, 1], counts[1, 1] = torch.tensor([[8, 4, 3, 1], [8, 4, 3, 1]])
    counts[2, 1], counts[3, 1] = torch.tensor([[3, 1, 8, 4], [3, 1, 8, 4]])
    assert workers(4).run(find_most_loaded_rank, counts) == [1.5] * 4


@torch.no_grad()
def save_one_sided(folder: Path) -> Path:
    """Save a gpt-oss of which every token chooses the first of 8 experts."""
    model = build_family("gpt_oss", num_experts_per_tok=1)
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            parameter[0] = 100
    model.save_pretrained(folder)
    return folder


@full
def test_sums_over_replicas_in_bf16(workers, material) -> None:
    """With `gradient_reduce_dtype=bf16` gradients of experts and of all else are rounded on their way."""
    exact, rounded = (
        merge(workers(4).run(train_case, material("qwen3_moe", "ep2xdp2", *GRADIENTS, key, steps=1)))["weights"]
        for key in ("gradient_reduce_dtype=fp32", "gradient_reduce_dtype=bf16")
    )
    for are_experts in (True, False):
        names = [name for name in exact if (".experts." in name) is are_experts]
        found, expected = ({name: weights[name] for name in names} for weights in (rounded, exact))
        assert 1e-4 < worst_difference(found, expected)[0] < 1e-2


@full
@pytest.mark.parametrize(
    ("family", "layout", "frozen"),
    [
        ("qwen3_moe", "ep2xdp2", "experts[.]"),
        ("qwen3_moe", "ep2xdp2", "(self_attn|mlp[.]gate[.])"),
        ("qwen3_moe", "ep2xdp2", "embed_tokens|layers[.][01][.]"),
        ("deepseek_v3", "ep2xpp2", "experts[.]"),
        ("gpt_oss", "ep2", "experts[.]"),
    ],
)
def test_frozen_weights(workers, material, family: str, layout: str, frozen: str) -> None:
    """Experts, what is around them, and all before them: then no gradient goes back through their exchange."""
    case = material(family, layout, *STEPS, f"freeze=['{frozen}']")
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    compare(workers, case, model)


@full
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", "ep2"),
        ("llama4_text", "ep2xpp2"),
        ("qwen3_moe", "ep2xdp2"),
        ("deepseek_v3", "ep2xtp2"),
        ("gpt_oss", "ep4"),
    ],
)
def test_lora_on_experts_equals_peft(workers, material, tmp_path: Path, family: str, layout: str) -> None:
    given = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", CHECKPOINTED, *STEPS)
    case = material(family, layout, *given)
    model = make_adapter(tmp_path / "adapter", case.model)
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case, model)
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def read_steps(lines: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm)."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


@full
@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("qwen3_moe", "ep2xpp2", ("schedule=zero_bubble",)),
        ("deepseek_v3", "ep4", (CHECKPOINTED,)),
        ("gpt_oss", "ep2xdp2", ("zero_stage=2",)),
    ],
)
def test_a_launched_run_equals_hugging_face(
    material, tmp_path: Path, family: str, layout: str, overrides: tuple[str, ...]
) -> None:
    """Through the launcher: the losses and norms of its metrics, and the weights of its export."""
    case = replace(material(family, layout, *STEPS, "logging_steps=1", *overrides), workdir=tmp_path)
    ended = run_deepspeed(["-cn", "base", *case.list_overrides()], tmp_path, case.world_size)
    assert (ended.code, ended.left_alive, ended.errors()) == (0, [], []), ended.output
    oracle, steps = train_oracle(case), read_steps(read_metrics(tmp_path / "out"))
    losses, norms = zip(*steps.values(), strict=True)
    assert losses == pytest.approx(oracle["losses"], rel=BOUND) and norms == pytest.approx(oracle["norms"], rel=BOUND)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf", dtype=torch.float32).state_dict()
    worst, name = worst_difference(exported, oracle["weights"])
    assert worst < BOUND, name


def test_a_run_saves_exports_and_continues_with_whole_experts(workers, material, tmp_path: Path) -> None:
    """Its checkpoint is that of any other run, and continues with whole experts; its export, read into divided experts
    and exported again, is the same, bit for bit. Its evaluation, of a file that two ranks cannot share evenly, is that
    of whole experts; the time of its exchanges is reported."""
    records = save_records(tmp_path / "eval.jsonl", 5, seed=1)
    keys = (
        "learning_rate=1e-3", "optimizer=adamw", "logging_steps=1", "save_steps=2", f"data.cache_dir={tmp_path}/c",
        f"eval_file={records}", "eval_steps=2",
    )  # fmt: skip
    case = material("qwen3_moe", "ep2", *keys, f"output_dir={tmp_path}/ep2", steps=4)
    workers(2).run(train_run, case)
    begun = tmp_path / "ep2" / "checkpoints" / "global_step2"
    again = material("qwen3_moe", "whole", *keys, f"output_dir={tmp_path}/again", f"resume={begun}", steps=4)
    workers(2).run(train_run, again)
    whole, divided = (read_metrics(tmp_path / name, timed=True) for name in ("again", "ep2"))
    found, expected = read_steps(whole), read_steps(divided)
    assert list(found) == [3, 4] and all(found[step] == pytest.approx(expected[step], rel=BOUND) for step in found)
    evaluations = [[line["eval_loss"] for line in lines if "eval_loss" in line] for lines in (whole, divided)]
    assert len(evaluations[0]) == 1 and evaluations[0] == pytest.approx(evaluations[1][1:], rel=BOUND)
    assert all(line["exchange_time"][0] > 0 for line in divided if "loss" in line)
    assert not any("exchange_time" in line for line in whole)
    steps = ("learning_rate=0", f"model_name_or_path={tmp_path}/ep2/hf", f"data.cache_dir={tmp_path}/c")
    copy = material("qwen3_moe", "ep2", *keys, *steps, f"output_dir={tmp_path}/copy", steps=1)
    workers(2).run(train_run, copy)
    original, exported = (export_of(tmp_path / name) for name in ("ep2", "copy"))
    assert original.keys() == exported.keys() and all(torch.equal(original[key], exported[key]) for key in original)
