"""The losses of routers through real stages against the plain Hugging Face model, each document run alone: gradients,
steps, and what is reported. The bias of a router against a plain loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CONTEXT_PARALLEL,
    SELECTIVE,
    ZERO_LAYOUTS,
    Case,
    merge,
    train_case,
    train_run,
    worst_difference,
)
from support.combination_runs import EXPERTS
from support.families import save_family
from support.parity_table import LARGE
from support.router_runs import train_router_oracle
from support.routers import BIAS
from support.runs import export_of, read_metrics
from support.tiny import save_pairs, save_records, save_tokenizer
from support.workers import WorkerGroup

AUX, Z, SPEED = 0.5, 0.02, 0.01
LOSSES = (f"moe.aux_loss_coef={AUX}", f"moe.z_loss_coef={Z}")
MOVING = (f"moe.update_router_bias={SPEED}",)
PACKED = ("data.packing=true", "max_seq_length=160")
LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "dp2": (1, 2), "tp2": (1, 2), "tp2xpp2": (2, 4), "pp2xdp2": (2, 4)}
EXPERT_PARALLEL = {"ep2": (1, 2), "ep2xpp2": (2, 4)}  # with expert_parallel_size=2
LAYOUTS |= CONTEXT_PARALLEL | ZERO_LAYOUTS | EXPERT_PARALLEL
OF_RANKS = "expert_rank_load_max"  # of which an oracle in one process knows nothing
REPORTED = ("router_aux_loss", "router_z_loss", "expert_load_max", "expert_load_min")
# Keys that say what is computed, which an oracle reads; the others say how.
OF_ORACLE = ("data", "max_seq_length", "tokenizer", "learning_rate", "task")
full = pytest.mark.full


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case(family, layout, *overrides, steps): its model is made on first use, the records once."""
    root = tmp_path_factory.mktemp("routers")
    records, pairs = save_records(root / "train.jsonl", 60), save_pairs(root / "pairs.jsonl", 24)
    save_tokenizer(root / "tokenizer")

    def case(family: str, layout: str, *overrides: str, steps: int = 1) -> Case:
        folder = root / family
        if not folder.exists():
            save_family(folder, family)
        num_stages, world_size = LAYOUTS[layout]
        prefers = "data=preference" in overrides
        rate = LARGE if steps == 1 else 0.05
        given = (f"tokenizer_name_or_path={root}/tokenizer", f"learning_rate={rate}", *overrides)
        given += ("tensor_parallel_size=2",) if "tp2" in layout else ()
        given += (f"zero_stage={layout[-1]}",) if layout in ZERO_LAYOUTS else ()
        given += ("context_parallel_size=2",) if layout in CONTEXT_PARALLEL else ()
        given += ("expert_parallel_size=2",) if layout in EXPERT_PARALLEL else ()
        workdir = root / ("pairs" if prefers else "packed" if PACKED[0] in overrides else "records")
        return Case(folder, pairs if prefers else records, workdir, num_stages, world_size, steps, given)

    return case


@cache
def find_oracle(case: Case, family: str, speed: float) -> dict[str, Any]:
    return train_router_oracle(case, family, aux=AUX, z=Z, speed=speed)


def compare(results: list[dict[str, Any]], case: Case, speed: float = 0.0) -> None:
    """results: of each rank."""
    plain = tuple(key for key in case.overrides if key.startswith(OF_ORACLE))
    oracle = find_oracle(replace(case, num_stages=1, world_size=1, overrides=plain), case.model.name, speed)
    result = merge(results)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for result in results:
        most_loaded = result["routed"].pop(OF_RANKS, 1)
        assert 1 <= most_loaded <= result["routed"]["expert_load_max"]
        assert result["routed"] == pytest.approx(oracle["routed"], rel=BOUND)


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("deepseek_v3", "pp2", (CHECKPOINTED, *PACKED)),
        ("qwen3_moe", "tp2", ()),
        *(
            pytest.param(family, layout, overrides, marks=full)
            for family in ("deepseek_v3", "qwen3_moe")
            for layout, overrides in (
                ("pp1", ()),
                ("pp1", (CHECKPOINTED,)),
                ("pp2", ()),
                ("dp2", SELECTIVE),
                ("dp2", PACKED),
                ("ep2", PACKED),
                ("ep2xpp2", (CHECKPOINTED, *PACKED)),
                ("tp2xpp2", (CHECKPOINTED, *PACKED)),
                ("pp2xdp2", ("micro_batch_size=1",)),
                ("zero2", (CHECKPOINTED,)),
                ("zero3", (CHECKPOINTED, *PACKED)),
                ("pp2", ("schedule=interleaved", CHECKPOINTED)),
            )
        ),
        pytest.param("mixtral", "pp2", (CHECKPOINTED,), marks=full),
        pytest.param("minimax_m2", "pp2", PACKED, marks=full),
        pytest.param("gpt_oss", "tp2", (), marks=full),
        pytest.param("gpt_oss", "ep2xpp2", PACKED, marks=full),
        pytest.param("deepseek_v3", "cp2", (), marks=full),
        pytest.param("deepseek_v3", "cp2xpp2", (CHECKPOINTED, *PACKED), marks=full),
        pytest.param("gpt_oss", "cp2", (*SELECTIVE, *PACKED), marks=full),
        pytest.param("deepseek_v3", "pp2", ("data=preference", CHECKPOINTED), marks=full),
        pytest.param("qwen3_moe", "dp2", ("data=preference",), marks=full),
    ],
)
def test_gradients_are_those_of_each_document_alone(
    workers: Callable[[int], WorkerGroup], material, family: str, layout: str, overrides: tuple[str, ...]
) -> None:
    """One step so long that the new weights are the gradients."""
    case = material(family, layout, *LOSSES, *overrides)
    compare(workers(case.world_size).run(train_case, case), case)


@full
@pytest.mark.parametrize("layout", EXPERT_PARALLEL)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_five_steps_of_packed_rows_with_divided_experts(workers, material, family: str, layout: str) -> None:
    case = material(family, layout, *LOSSES, *PACKED, steps=5)
    compare(workers(case.world_size).run(train_case, case), case)


@pytest.mark.parametrize(
    ("family", "layout", "overrides"),
    [
        ("deepseek_v3", "dp2", SELECTIVE),
        pytest.param("deepseek_v3", "tp2xpp2", (CHECKPOINTED,), marks=full),
        pytest.param("deepseek_v3", "pp2", ("partition_method=[2,5]",), id="a-stage-without-experts", marks=full),
        pytest.param("minimax_m2", "pp2xdp2", (), marks=full),
        *(pytest.param("deepseek_v3", layout, (CHECKPOINTED,), marks=full) for layout in ZERO_LAYOUTS),
        pytest.param("ernie4_5_moe", "zero3", (), marks=full),
        pytest.param("deepseek_v3", "cp2", SELECTIVE, marks=full),
        pytest.param("deepseek_v3", "ep2", SELECTIVE, marks=full),
        pytest.param("deepseek_v3", "ep2xpp2", (), marks=full),
        pytest.param("minimax_m2", "ep2xpp2", (CHECKPOINTED,), marks=full),
        pytest.param("ernie4_5_moe", "ep2", (), marks=full),
        pytest.param("ernie4_5_moe", "pp2", (), marks=full),
    ],
)
def test_biases_follow_the_load(workers, material, family: str, layout: str, overrides: tuple[str, ...]) -> None:
    case = material(family, layout, *LOSSES, *MOVING, *overrides, steps=3)
    results = workers(case.world_size).run(train_case, case)
    compare(results, case, SPEED)
    start = train_router_oracle(replace(case, steps=0), family)["weights"]
    weights = merge(results)["weights"]
    moved = [(weights[name] - start[name]).abs().max() for name in weights if BIAS in name]
    assert moved and all(SPEED / 2 < distance < 3.5 * SPEED for distance in moved)


@full
@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_off_changes_no_bit(workers, material, layout: str) -> None:
    """Counting alone, against routers without hooks."""
    case = material("deepseek_v3", layout, CHECKPOINTED, steps=3)
    watched, plain = (merge(workers(2).run(function, case)) for function in (train_case, train_unwatched))
    assert watched["losses"] == plain["losses"] and watched["norms"] == plain["norms"]
    assert all(torch.equal(tensor, plain["weights"][name]) for name, tensor in watched["weights"].items())


def train_unwatched(case: Case) -> dict[str, Any]:
    from training.resolution import resolve

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(resolve, "build_router_options", lambda *_: None)
        return train_case(case)


@full
@pytest.mark.parametrize("layout", ["pp2", "dp2", *ZERO_LAYOUTS])
def test_an_adapter_with_frozen_routers(workers, material, tmp_path: Path, layout: str) -> None:
    """The losses' gradient reaches the adapters through hidden states alone."""
    given = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", CHECKPOINTED, *LOSSES)
    case = material("deepseek_v3", layout, *given, steps=3)
    policy = make_adapter(tmp_path / "adapter", case.model, EXPERTS["deepseek_v3"])
    results = workers(2).run(train_case, case)
    oracle = train_router_oracle(case, "deepseek_v3", aux=AUX, z=Z, policy=policy)
    worst, name = worst_difference(*to_peft_weights(merge(results), oracle, policy.config))
    assert worst < BOUND, name
    torch.testing.assert_close(results[0]["norms"], oracle["norms"], rtol=BOUND, atol=0)
    assert results[0]["routed"] == pytest.approx(oracle["routed"], rel=BOUND)


@full
def test_a_run_reports_and_resumes_at_another_layout(workers, material, tmp_path: Path) -> None:
    """Evaluations are not counted, nor what is recomputed. A bias is where it would be without the stop, to the bit."""
    records = save_records(tmp_path / "eval.jsonl", 11, seed=1)

    def start(name: str, layout: str, *overrides: str) -> Path:
        given = (
            f"output_dir={tmp_path}/{name}", f"data.cache_dir={tmp_path}/cache", f"eval_file={records}", "eval_steps=1",
            "logging_steps=2", "optimizer=sgd", CHECKPOINTED, *LOSSES, *MOVING, *overrides,
        )  # fmt: skip
        case = material("deepseek_v3", layout, *given, steps=4)
        workers(case.world_size).run(train_run, case)
        return tmp_path / name

    whole = start("whole", "dp2")
    start("stopped", "pp2", "stop_after_steps=2")
    resumed = start("stopped", "tp2", "resume=latest")
    lines, again = ([line for line in read_metrics(folder) if "loss" in line] for folder in (whole, resumed))
    assert [line["step"] for line in lines] == [line["step"] for line in again] == [2, 4]
    for line, other in zip(lines, again, strict=True):
        assert [line[name] for name in REPORTED] == pytest.approx([other[name] for name in REPORTED], rel=BOUND)
    case = material("deepseek_v3", "pp1", steps=2)
    train_case_once(workers, case)
    oracle = train_router_oracle(case, "deepseek_v3", aux=AUX, z=Z, speed=SPEED)["routed"]
    assert {name: lines[0][name] for name in REPORTED} == pytest.approx(oracle, rel=BOUND)
    weights, others = export_of(whole), export_of(resumed)
    assert worst_difference(others, weights)[0] < BOUND
    biases = [name for name in weights if BIAS in name]
    assert biases and all(torch.equal(weights[name], others[name]) for name in biases)


def train_case_once(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    """Tokenizes, for the oracle."""
    workers(1).run(train_case, replace(case, steps=1))


@full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("layout", "recompute", "num_graphs"),
    [("pp1", (CHECKPOINTED,), [2]), ("pp1", SELECTIVE, [2]), ("pp2", (CHECKPOINTED,), [2, 1])],
    ids=["checkpointed", "selective", "pp2"],
)
def test_compiled_layers(workers, material, layout: str, recompute: tuple[str, ...], num_graphs: list[int]) -> None:
    """Two kinds of layers, one compiled graph for each; the second of two stages has only one kind."""
    one_length = "data.pad_to=max_seq_length"
    case = material("deepseek_v3", layout, "compile=true", one_length, *LOSSES, *recompute, steps=2)
    results = workers(case.world_size).run(train_compiled, case)
    compare(results, case)
    assert [result["num_graphs"] for result in results] == num_graphs


def train_compiled(case: Case) -> dict[str, Any]:
    """As `train_case`, with the number of graphs that were compiled for it."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    result = train_case(case)
    return {**result, "num_graphs": counters["stats"]["unique_graphs"]}
