"""Interleaved 1F1B and zero bubble: the gradients are those of the plain Hugging Face model, and a run continues under
any schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    EVERY_SECOND,
    LAYOUTS,
    SELECTIVE,
    Case,
    merge,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer
from support.workers import WorkerGroup

from training.layer_times import ROUNDS

INTERLEAVED, ZERO_BUBBLE = "schedule=interleaved", "schedule=zero_bubble"
BOTH = pytest.mark.parametrize("schedule", [INTERLEAVED, ZERO_BUBBLE], ids=["interleaved", "zero_bubble"])
STEPS, STEPS_BEFORE = 4, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("interleaved")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_records(root / "train.jsonl", 40)
    return root


def build_case(root: Path, tied: bool, layout: str, schedule: str, *overrides: str) -> Case:
    num_stages, world_size = LAYOUTS[layout]
    keys = [schedule, *overrides]
    if schedule == ZERO_BUBBLE and num_stages == 4:
        keys.append("micro_batch_size=1")  # it needs four micro-batches
    return Case(root / f"tied{tied}", root / "train.jsonl", root, num_stages, world_size, overrides=tuple(keys))


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND) and result["norms"] == pytest.approx(
        oracle["norms"], rel=BOUND
    )


@pytest.mark.parametrize(
    "tied, layout, overrides",
    [
        pytest.param(True, "pp2", (INTERLEAVED, CLIPPED), id="pp2-tied-clipped"),
        pytest.param(  # one layer per chunk
            False, "pp4", (INTERLEAVED, CHECKPOINTED), id="pp4-checkpointed", marks=pytest.mark.full
        ),
        pytest.param(True, "pp2", (ZERO_BUBBLE, CLIPPED), id="zero_bubble-pp2-tied-clipped"),
        pytest.param(False, "pp4", (ZERO_BUBBLE, CHECKPOINTED), id="zero_bubble-pp4-checkpointed"),
    ],
)
def test_five_sgd_steps_equal_hugging_face(
    workers, root: Path, tied: bool, layout: str, overrides: tuple[str, ...]
) -> None:
    compare(workers, build_case(root, tied, layout, *overrides))


def evaluate_one(case: Case) -> list[float]:
    """The loss of a single micro-batch, on the rank that holds it."""
    from support.cases import build_engine

    engine, loader, *_ = build_engine(case)
    return [float(loss) for loss in engine.forward_only(loader.iterate(0, 1), 1)]


@BOTH
def test_a_single_micro_batch_is_evaluated(workers, root: Path, schedule: str) -> None:
    case = build_case(root, True, "pp2", schedule)
    found, plain = (
        [loss for rank_losses in workers(2).run(evaluate_one, one) for loss in rank_losses]
        for one in (case, in_turn(case))
    )
    assert found == pytest.approx(plain, rel=1e-6) and len(plain) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (CHECKPOINTED, CLIPPED),
        SELECTIVE,
        EVERY_SECOND,
        ("micro_batch_size=1", CLIPPED),
        ("freeze=[embed_tokens]",),
        ("data.pad_to=max_seq_length",),
    ],
    ids=lambda overrides: "-".join(overrides) or "plain",
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2xdp2"])
@BOTH
def test_every_layout_equals_hugging_face(
    workers, root: Path, schedule: str, layout: str, tied: bool, overrides: tuple[str, ...]
) -> None:
    if any(override.startswith("freeze") for override in overrides):
        same_as_1f1b(workers, build_case(root, tied, layout, schedule, *overrides))
    else:
        compare(workers, build_case(root, tied, layout, schedule, *overrides))


@pytest.mark.full
@pytest.mark.parametrize(
    "split",
    [(), ("partition_method=[1,2,1,2,1,1]",), ("partition_method=uniform",)],
    ids=["balanced", "list", "uniform"],
)
def test_three_chunks_a_stage(workers, root: Path, split: tuple[str, ...]) -> None:
    compare(workers, build_case(root, True, "pp2", INTERLEAVED, "virtual_stages_per_rank=3", CLIPPED, *split))


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        ("partition_method=[1,2,2,3]",),
        ("partition_method=uniform",),
        ("schedule_memory_limit=1",),
        ("offload_optimizer=cpu",),
    ],
    ids=lambda keys: keys[0].partition("=")[2],
)
def test_a_v_that_is_uneven_narrow_or_offloaded(workers, root: Path, keys: tuple[str, ...]) -> None:
    compare(workers, build_case(root, True, "pp2", ZERO_BUBBLE, CLIPPED, *keys))


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@BOTH
def test_chunks_whose_layers_ranks_share(workers, root: Path, schedule: str, tied: bool) -> None:
    case = build_case(root, tied, "pp2", schedule, "tensor_parallel_size=2", CHECKPOINTED, CLIPPED)
    compare(workers, replace(case, world_size=4))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "pp4"])
@BOTH
def test_lora_equals_peft(workers, root: Path, tmp_path: Path, schedule: str, layout: str) -> None:
    model = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    overrides = (
        "adapter=lora",
        f"adapter.name_or_path={tmp_path}/adapter",
        CHECKPOINTED,
        CLIPPED,
        f"data.cache_dir={tmp_path}/cache",
    )
    case = replace(build_case(root, False, layout, schedule, *overrides), workdir=tmp_path)
    result, oracle = merge(workers(case.world_size).run(train_case, case)), train_oracle(case, model)
    assert worst_difference(*to_peft_weights(result, oracle, model.config))[0] < BOUND
    assert result["norms"] == pytest.approx(oracle["norms"], rel=BOUND)


def same_as_1f1b(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    interleaved, plain = (merge(workers(case.world_size).run(train_case, one)) for one in (case, in_turn(case)))
    assert worst_difference(interleaved["weights"], plain["weights"])[0] < BOUND
    assert interleaved["losses"] == pytest.approx(plain["losses"], rel=BOUND) and interleaved["norms"] == pytest.approx(
        plain["norms"], rel=BOUND
    )


def in_turn(case: Case) -> Case:
    """The case under 1F1B, which other tests compare with the oracle."""
    return Case(
        case.model,
        case.train_file,
        case.workdir,
        case.num_stages,
        case.world_size,
        case.steps,
        (*case.overrides, "schedule=1f1b"),
    )


@pytest.mark.full
@pytest.mark.parametrize("offload", ["none", "cpu"])
@BOTH
def test_in_bf16_the_first_step_is_bit_for_bit_that_of_1f1b(workers, root: Path, schedule: str, offload: str) -> None:
    keys = "precision=bf16", CHECKPOINTED, f"offload_optimizer={offload}"
    case = build_case(root, True, "pp2", schedule, *keys)
    interleaved, plain = (merge(workers(2).run(train_case, one)) for one in (case, in_turn(case)))
    assert interleaved["losses"][0] == plain["losses"][0] and interleaved["norms"][0] == pytest.approx(
        plain["norms"][0], rel=BOUND
    )


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), ("adapter=lora", "adapter.r=4")], ids=["full", "lora"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_preferences_with_a_reference(
    workers, root: Path, tmp_path: Path, schedule: str, overrides: tuple[str, ...]
) -> None:
    """The reference is computed by a forward pass of the same pipeline, over any number of micro-batches."""
    save_pairs(tmp_path / "pairs.jsonl", 21)
    cases = []
    for name in (schedule, "1f1b"):  # each with a reference of its own
        keys = (
            f"data.cache_dir={tmp_path}/{name}",
            "data=preference",
            "micro_batch_size=1",
            "learning_rate=0.02",
            *overrides,
            f"schedule={name}",
        )
        cases.append(Case(root / "tiedTrue", tmp_path / "pairs.jsonl", tmp_path, 2, 2, overrides=keys))
    interleaved, plain = (merge(workers(2).run(train_case, case)) for case in cases)
    assert worst_difference(interleaved["weights"], plain["weights"])[0] < BOUND
    assert interleaved["losses"] == pytest.approx(plain["losses"], rel=BOUND)


@pytest.fixture(scope="module")
def run(workers: Callable[[int], WorkerGroup], root: Path) -> Callable[..., Path]:
    """run(name, override, ...): the output_dir of a whole run at pp2, saved and evaluated on the way. The same run is
    not repeated."""
    save_records(root / "eval.jsonl", 5)  # three micro-batches, of two samples and of one

    def start(name: str, *overrides: str) -> Path:
        out = root / name
        if not out.exists():
            keys = (
                *(f"output_dir={out}", f"eval_file={root}/eval.jsonl", f"eval_steps={STEPS_BEFORE}"),
                *(f"save_steps={STEPS_BEFORE}", "logging_steps=1", "optimizer=adamw", "learning_rate=1e-3"),
                *("max_grad_norm=1.0", "lr_scheduler_type=cosine"),
            )
            case = Case(root / "tiedTrue", root / "train.jsonl", root, 2, 2, STEPS, (*keys, *overrides))
            workers(2).run(train_run, case, ROUNDS)  # predicted bubbles are compared
        return out

    return start


def read(out: Path, after: int = 0) -> Iterator[float]:
    """Loss and gradient norm of each step, and the losses of evaluations."""
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] > after:
            yield from (record[key] for key in ("loss", "grad_norm", "eval_loss") if key in record)


@pytest.mark.parametrize(
    "saved, resumed",
    [
        pytest.param("interleaved", "1f1b", marks=pytest.mark.full),
        ("1f1b", "interleaved"),
        pytest.param("1f1b", "zero_bubble", marks=pytest.mark.full),
        pytest.param("zero_bubble", "1f1b", marks=pytest.mark.full),
        pytest.param("zero_bubble", "interleaved", marks=pytest.mark.full),
        pytest.param("interleaved", "zero_bubble", marks=pytest.mark.full),
    ],
)
def test_a_run_continues_under_the_other_schedule(run: Callable[..., Path], saved: str, resumed: str) -> None:
    whole = run(saved, f"schedule={saved}", "profile_step=2")
    other = run(f"{saved}-resumed", f"schedule={resumed}", f"resume={whole}/checkpoints/global_step{STEPS_BEFORE}")
    expected = list(read(whole, STEPS_BEFORE))
    assert len(expected) == 2 * (STEPS - STEPS_BEFORE) + 1 and list(read(other, STEPS_BEFORE)) == pytest.approx(
        expected, rel=BOUND
    )


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble"])
def test_a_run_is_the_same_under_any_schedule_and_reports_it(run: Callable[..., Path], name: str) -> None:
    plain, other = (run(each, f"schedule={each}", "profile_step=2") for each in ("1f1b", name))
    assert list(read(other)) == pytest.approx(list(read(plain)), rel=BOUND)
    assert (other / "step_2.png").stat().st_size > 10_000
    record = next(json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines())
    assert ("weight_grad_time" in record) == (name == "zero_bubble")
    assert (
        0 < record["bubble"] < 1
        and record["predicted_bubble"]
        < next(json.loads(line) for line in open(plain / "metrics.jsonl"))["predicted_bubble"]
    )
