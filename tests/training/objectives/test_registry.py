"""The table of objectives: the lookup, what is refused, and that a new one is a class and a line in the table."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import BOUND, Case, mean_loss, train_oracle, train_run, worst_difference
from support.configs import build_config
from support.planned import build_small_plan
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from batch import Targets
from data.encoders.kinds import KINDS
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from models.losses.cross_entropy import Loss, build_loss
from models.losses.metric_sums import MetricSums
from models.losses.token_loss import TokenAccuracy, TokenLoss
from training.config.schema import RunConfig
from training.objectives.objective import LastStage, Metrics, Modifier, Objective, PassOver
from training.objectives.registry import (
    OBJECTIVES,
    check_objective,
    describe_objective,
    find_auxiliary,
    get_objective,
    is_trained_on,
)
from training.plan_command.run import plan_run
from training.resolution.user_loss import build_run_loss

SCALE = 3.0
LEARNING_RATE = 0.5


class ScaledLoss:
    """Cross entropy times a constant, with a metric: the number of targets in a row of a micro-batch."""

    def __init__(self, stage: LastStage) -> None:
        self._loss = build_loss(stage.architecture, stage.parallel)
        self.sums = (MetricSums("targets_per_row"),)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        is_target = targets.ids != -100
        self.sums[0].add(is_target.sum()[None], is_target.any(dim=1).sum())
        return SCALE * self._loss(outputs, targets)


class ScaledCrossEntropy(Objective):
    """A new objective: cross entropy times a constant."""

    name = "scaled"
    data_kinds = ("sft",)
    remakes_logits = True  # it does not, but the plan must read this

    def identity(self, config: RunConfig) -> dict[str, str]:
        return {"scale": f"{SCALE:g}"}

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        return ScaledLoss(stage)

    def metrics(self, loss: ScaledLoss, device: torch.device) -> Metrics:
        return Metrics(loss.sums, device, lambda device: {"scale": SCALE})


@contextmanager
def registered() -> Iterator[None]:
    """Add the new objective to the table."""
    OBJECTIVES[ScaledCrossEntropy.name] = ScaledCrossEntropy()
    try:
        yield
    finally:
        del OBJECTIVES[ScaledCrossEntropy.name]


@pytest.fixture
def new_objective() -> Iterator[None]:
    with registered():
        yield


def train_scaled(case: Case) -> None:
    """Run training on this rank with the new objective."""
    with registered():
        train_run(case)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("objectives")
    save_llama(root / "model")
    save_tokenizer(root / "model")
    save_records(root / "train.jsonl", 21)
    return root


def test_a_new_objective_is_trained_evaluated_and_reported_through_pipeline_stages(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    overrides = (f"eval_file={root}/train.jsonl", "logging_steps=1", f"learning_rate={LEARNING_RATE / SCALE}")
    case = Case(root / "model", root / "train.jsonl", tmp_path, 2, 2, steps=3, overrides=("task=scaled", *overrides))
    workers(2).run(train_scaled, case)
    oracle = train_oracle(replace(case, overrides=(f"learning_rate={LEARNING_RATE}",)))
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps, evaluation = records[:-1], records[-1]
    assert [record["loss"] / SCALE for record in steps] == pytest.approx(oracle["losses"], rel=BOUND)
    assert [record["grad_norm"] / SCALE for record in steps] == pytest.approx(oracle["norms"], rel=BOUND)

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf", dtype=torch.float32)
    assert worst_difference(dict(trained.named_parameters()), oracle["weights"])[0] < BOUND
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    expected, num_targets = mean_loss(trained, TokenizedDataset(folder, True, True))
    assert (evaluation["eval_tokens"], evaluation["eval_scale"]) == (num_targets, SCALE)
    assert evaluation["eval_targets_per_row"] == num_targets / 21
    assert all(1 < record["targets_per_row"] < 100 for record in steps)
    assert evaluation["eval_loss"] / SCALE == pytest.approx(expected, rel=BOUND)

    again = replace(case, overrides=(*overrides, f"resume={tmp_path}/out/checkpoints"))
    with pytest.raises(WorkerError, match="scale was 3, is none; task was scaled, is none. Give the same"):
        workers(2).run(train_run, again)


@pytest.fixture(scope="module")
def usual() -> RunConfig:
    """The default config; `set_keys` changes copies, which is faster than composing."""
    return build_config()


def test_messages_name_a_new_objective(new_objective: None) -> None:
    config = build_config("task=scaled")
    check_objective(config)
    assert describe_objective(config) == {"scale": "3", "task": "scaled"}
    with pytest.raises(UserError, match="task=quiz: must be one of .*dpo, .*pretrain, .*scaled, sft"):
        check_objective(build_config("task=quiz"))
    with pytest.raises(
        UserError, match="task=scaled and data=preference do not go together; give data=sft, or task=dpo"
    ):
        check_objective(build_config("task=scaled", "data=preference"))
    with pytest.raises(UserError, match="loss and task=scaled: each is a loss; give one of them"):
        stage = LastStage(PretrainedConfig(vocab_size=8))
        build_run_loss(build_config("task=scaled", "loss={_target_: my_losses.MyLoss}"), stage)


def test_the_plan_reads_a_new_objective(new_objective: None) -> None:
    """Its logits are computed again in the backward pass; its rows are those of cross entropy."""
    usual, scaled = build_small_plan(), build_small_plan("task=scaled")
    assert scaled.stages[-1].cost.backward_flops > usual.stages[-1].cost.backward_flops
    assert scaled.stages[0].cost.backward_flops == usual.stages[0].cost.backward_flops
    assert scaled.tokens_per_step == usual.tokens_per_step


def test_the_plan_counts_the_pass_and_the_vectors_of_embeddings() -> None:
    """A query and its document are two rows, as a pair of answers is."""
    dpo, vectors = build_small_plan("data=preference"), build_small_plan("data=embedding")
    assert vectors.stages[0].cost.forward_flops == 2 * dpo.stages[0].cost.forward_flops
    assert vectors.stages[0].cost.backward_flops == dpo.stages[0].cost.backward_flops
    assert vectors.tokens_per_step == dpo.tokens_per_step
    more = build_small_plan("data=embedding", "data.num_negatives=2", "global_batch_size=1024")
    num_texts, num_cosines = 1024 * 4, 1024 * 1024 * 3
    assert more.stages[-1].memory.loss == 4 * (3 * num_texts * 4096 + 6 * num_cosines) + num_cosines
    assert more.stages[0].memory.loss == 0


def test_a_plan_refuses_an_unknown_task() -> None:
    with pytest.raises(UserError, match="task=scaled: must be one of .*dpo, .*pretrain, .*sft"):
        next(plan_run(build_config("task=scaled", "plan=true", "world_size=4")))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=lambda objective: objective.name)
def test_the_tables_of_objectives_and_of_data_agree(objective: Objective) -> None:
    kinds = [kind for kind in KINDS.values() if is_trained_on(objective, kind)]
    assert kinds and set(objective.data_kinds) <= KINDS.keys()
    for kind in kinds:
        config = build_config(f"data={kind.name}", f"task={objective.name}")
        assert objective.group_size(config.data) in (1, kind.count_samples(config.data))
        check_objective(config)
        assert get_objective(config) is objective


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_says_what_is_trained(kind: str) -> None:
    config = build_config(f"data={kind}")
    assert get_objective(config).name == KINDS[kind].task
    assert "task" not in describe_objective(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task=foo",), "task=foo: must be one of .*dpo, .*pretrain, .*sft"),
        (
            ("data.name=foo",),
            f"data.name=foo: must be one of {', '.join(sorted(KINDS))}",
        ),
        (("task=dpo",), "task=dpo and data=sft do not go together; give data=preference, or task=sft"),
    ],
)
def test_what_does_not_go_together(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_objective(build_config(*overrides))


def test_a_run_reads_one_frozen_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config("distill.teacher=a")
    other = copy.copy(find_auxiliary(config))
    assert other is not None
    other.key = "mine.teacher"
    objective = get_objective(config)
    monkeypatch.setattr(objective, "modifiers", (*objective.modifiers, other))
    with pytest.raises(UserError, match="^distill.teacher and mine.teacher: a run reads one frozen model; omit one"):
        check_objective(config)


def test_a_key_of_an_extension_that_changes_the_loss_is_refused_with_a_users_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Modifier):
        key = "mine.entropy"

        def read(self, config: RunConfig) -> float:
            return 0.5

    config, mine = build_config("loss={_target_: my_losses.MyLoss}"), Mine()
    check_objective(config)
    monkeypatch.setattr(get_objective(config), "modifiers", (mine,))
    monkeypatch.setattr("training.objectives.registry.MODIFIERS", (mine,))
    message = r"^mine.entropy=0.5: loss takes the place of the loss .*; omit loss, or give mine.entropy=0$"
    with pytest.raises(UserError, match=message):
        check_objective(config)


def test_a_key_of_an_extension_that_adds_a_term_is_refused_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Modifier):
        key = "mine.entropy"

        def read(self, config: RunConfig) -> float:
            return 0.5

        def change(self, loss: TokenLoss, config: RunConfig, stage: LastStage) -> TokenLoss:
            return replace(loss, terms=(*loss.terms, TokenAccuracy()))

    objective, stage = get_objective(build_config()), LastStage(LlamaConfig())
    monkeypatch.setattr(type(objective), "modifiers", (Mine(),))
    objective.loss(build_config("precision=bf16"), stage)
    message = r"^mine.entropy=0.5: the gradient of the term .* precision=fp16 .*fp32, or give mine.entropy=0$"
    with pytest.raises(UserError, match=message):
        objective.loss(build_config("precision=fp16"), stage)


def test_losses_of_routers_are_kept_where_there_are_any() -> None:
    assert "moe.aux_loss_coef" not in describe_objective(build_config())
    config = build_config("moe.aux_loss_coef=0.01", "moe.update_router_bias=0.001")
    assert describe_objective(config) == {"moe.aux_loss_coef": "0.01"}


@pytest.mark.parametrize(
    ("overrides", "pass_over", "scored"),
    [
        ((), None, []),
        (("distill.teacher=a",), None, ["teacher_token_ids", "teacher_log_probabilities"]),
        (("distill.teacher=a", "distill.online=true"), PassOver.auxiliary, []),
        (("data=embedding", "task=embedding"), PassOver.samples, []),
    ],
)
def test_what_is_scored_before_training_and_before_each_step(
    overrides: tuple[str, ...], pass_over: PassOver | None, scored: list[str]
) -> None:
    config = build_config(*overrides)
    objective = get_objective(config)
    assert objective.pass_over(config) is pass_over
    auxiliary = find_auxiliary(config)
    columns = [*objective.scored, *(() if auxiliary is None else auxiliary.scored(config))]
    assert [column.name for column in columns] == scored
