"""Distillation from a teacher that is in memory next to its student, against both plain Hugging Face models in one
process, over the whole vocabulary or the teacher's most probable tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import objective_runs
from support.cases import BOUND, CHECKPOINTED, CLIPPED, Case, merge, train_run, worst_difference
from support.distill_runs import build_case, check_equal, save_sharp, save_teacher, train_oracle
from support.objective_runs import load_model, start_runs, train_answers
from support.runs import read_metrics
from support.workers import WorkerError, WorkerGroup

from training.observability.stage_timer import Span

ONLINE = "distill.online=true"
ALL_TOKENS = (ONLINE, "distill.top_k=null")
FORWARD = ("distill.divergence=forward", "distill.temperature=2")
REVERSE, SYMMETRIC = "distill.divergence=reverse", "distill.divergence=jensen_shannon"
PACKED = ("data.packing=true", "global_batch_size=2", "micro_batch_size=1")
full = pytest.mark.full


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("online"))


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", False, (*ALL_TOKENS, *FORWARD, CLIPPED)),
        *(
            pytest.param(layout, tied, overrides, marks=full)
            for layout, tied, *overrides in (
                ("pp1", True, *ALL_TOKENS, SYMMETRIC, CHECKPOINTED, "micro_batch_size=1"),
                ("pp2", True, *ALL_TOKENS, REVERSE, *PACKED),
                ("pp2xdp2", True, *ALL_TOKENS, REVERSE, "distill.temperature=0.7", CLIPPED),
                ("tp2", True, *ALL_TOKENS, SYMMETRIC, "distill.temperature=2"),
                ("tp2", False, *ALL_TOKENS, REVERSE, "sequence_parallel=true"),
                ("tp2xpp2", False, *ALL_TOKENS, *FORWARD, *PACKED[:1]),
                ("pp2", False, *ALL_TOKENS, *FORWARD, "schedule=zero_bubble"),
                ("pp2", True, *ALL_TOKENS, SYMMETRIC, "schedule=interleaved", CHECKPOINTED),
                ("pp4", False, *ALL_TOKENS, *FORWARD),
                ("zero2", False, *ALL_TOKENS, *FORWARD),
                ("pp2xdp2", False, ONLINE, *FORWARD, "schedule=zero_bubble"),  # the most probable tokens
                ("tp2xpp2", True, ONLINE, REVERSE),
            )
        ),
    ],
)
def test_five_sgd_steps_equal_both_models_in_one_process(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied, steps=5)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, load_model(case.model), load_model(root / "teacher"))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert not list((tmp_path / "cache").glob("*/teacher-*"))  # nothing is kept


PAUSE = 0.05  # seconds that each stage of a slow teacher adds to its pass over a micro-batch


def train_with_a_slow_teacher(case: Case) -> list[list[Span]]:
    """Return the units of each step on this rank."""
    from training import run
    from training.observability.telemetry import Telemetry

    build, finish, steps = run.build_resident, Telemetry.finish_step, []

    def build_slow(this_run: Any) -> Any:
        resident = build(this_run)
        resident.engine.module.register_forward_hook(lambda *_: time.sleep(PAUSE))
        return resident

    def finish_step(telemetry: Telemetry) -> list[Span]:
        steps.append(finish(telemetry))
        return steps[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "build_resident", build_slow)
        patch.setattr(Telemetry, "finish_step", finish_step)
        train_run(case)
    return steps


def test_the_pass_before_a_step_is_part_of_its_time(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    keys = (ONLINE, f"output_dir={tmp_path}/out", "logging_steps=1", "profile_step=2", "save_final=false")
    case = build_case(root, tmp_path, "pp2", *keys, steps=2)
    ranks = workers(2).run(train_with_a_slow_teacher, case)
    number = case.config().global_batch_size // case.config().micro_batch_size
    for spans in (step for steps in ranks for step in steps):
        forward = [span.stop - span.start for span in spans if span.name == "ForwardPass"]
        assert len(forward) == 2 * number and min(forward[:number]) > PAUSE
    for line in read_metrics(tmp_path / "out", timed=True):
        times = [line[f"{kind}_time"] for kind in ("compute", "communication", "wait")]
        assert all(seconds > number * PAUSE for seconds in line["compute_time"])
        assert all(sum(parts) <= line["step_time"] for parts in zip(*times, strict=True))
    assert (tmp_path / "out" / "step_2.png").is_file()


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


@full
def test_a_run_continues_with_a_teacher_that_has_left_its_tokens(run, tmp_path: Path) -> None:
    """Its steps and its evaluation, in several groups of micro-batches, are those of such a run."""
    keys = ("micro_batch_size=1", "global_batch_size=2")
    kept, online = run("kept", "pp2", *keys), run("online", "pp2", ONLINE, *keys)
    names = ("loss", "grad_norm", "distill_loss")
    objective_runs.check_continued(kept, online, names, absolute=1e-5)
    for name in ("eval_loss", "eval_distill_loss", "eval_token_accuracy"):
        assert online[-1][name] == pytest.approx(kept[-1][name], rel=1e-4), name
    begun = run("begun", "pp2", ONLINE, *keys, "stop_after_steps=3")
    ended = run("ended", "tp2", *keys, f"resume={tmp_path}/begun/checkpoints")
    objective_runs.check_continued(online, ended, names, absolute=1e-5)
    run("alone", "pp1", ONLINE, *keys, "evaluate_only=true", f"resume={tmp_path}/begun/checkpoints")
    alone = json.loads((tmp_path / "alone" / "evaluation.json").read_text())
    for name in ("eval_loss", "eval_distill_loss", "eval_token_accuracy"):
        assert alone[name] == pytest.approx(begun[-1][name], rel=1e-4), name


@full
def test_embeddings_of_other_sizes_have_no_whole_vocabulary(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    """The teacher's is padded. Its most probable tokens are compared all the same."""
    save_sharp(tmp_path / "padded", seed=7, vocab_size=384)

    def build(*keys: str) -> Case:
        return build_case(root, tmp_path, "tp2", f"distill.teacher={tmp_path}/padded", *FORWARD, *keys)

    with pytest.raises(WorkerError, match="the student's embedding has 320 rows, the teacher's 384"):
        workers(2).run(train_answers, build(*ALL_TOKENS))
    online, kept = (merge(workers(2).run(train_answers, build(*keys))) for keys in ((ONLINE,), ()))
    check_equal(online, kept)
