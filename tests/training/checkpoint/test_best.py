"""Which evaluation is the best: by the keys of a run, and over many evaluations."""

from __future__ import annotations

import math

import pytest
from support.configs import build_config, set_keys

from errors import UserError
from training.checkpoint.best import Best, has_lost_patience, update_best
from training.config.criterion import Criterion
from training.objectives.registry import check_metric_name


def test_the_name_says_what_is_better_unless_a_key_does() -> None:
    base = build_config()
    for given, greater in (("eval_loss", False), ("code_loss", False), ("eval_rewards_accuracy", True)):
        criterion = Criterion.of(set_keys(base, f"metric_for_best_model={given}"))
        assert (criterion.metric.removeprefix("eval_"), criterion.greater_is_better) == (
            given.removeprefix("eval_"), greater,
        )  # fmt: skip
        assert criterion.metric.startswith("eval_")
    assert Criterion.of(set_keys(base, "greater_is_better=true")) == Criterion("eval_loss", True)


@pytest.mark.parametrize(
    ("values", "threshold", "best", "since"),
    [
        ([3.0, 2.0, 1.0], 0.0, (1.0, 3), 0),
        ([1.0, 1.0, 2.0], 0.0, (1.0, 1), 2),  # equal is no improvement
        ([3.0, 2.9, 2.8], 0.15, (2.8, 3), 2),  # the best improves in steps too small to count
        ([math.nan, 2.0, math.nan], 0.0, (2.0, 2), 1),
    ],
)
def test_the_best_and_how_long_ago_it_was(
    values: list[float], threshold: float, best: tuple[float, int], since: int
) -> None:
    for criterion, sign in ((Criterion(), 1), (Criterion("eval_x", greater_is_better=True), -1)):
        found: Best | None = None
        for step, value in enumerate(values, start=1):
            found = update_best(found, criterion, {criterion.metric: sign * value}, step, threshold)
        assert found is not None and (sign * found.value, found.step, found.evaluations_since) == (*best, since)
        assert found.criterion == criterion and has_lost_patience(found, 2) == (since >= 2)
        assert not has_lost_patience(found, None)


def test_a_metric_that_no_evaluation_reports_is_refused_at_the_start() -> None:
    one, two = "eval_file=a", "eval_file={math: a, code: b}"
    fitting = {
        (one,): ("eval_loss", "loss"),
        (two,): ("eval_loss", "eval_math_loss", "code_loss", "eval_code_token_accuracy"),
        (one, "data=preference"): ("eval_rewards_accuracy",),
        (two, "data=preference"): ("eval_math_rewards_accuracy",),
        (one, "data=preference", "dpo.sft_coef=0.1"): ("eval_nll_loss",),
        (one, "data=preference", "task=orpo"): ("eval_log_odds_ratio",),
        (one, "data=preference", "task=reward"): ("rewards_margin",),
    }
    for keys, metrics in fitting.items():
        for metric in metrics:
            check_metric_name(set_keys(build_config(), *keys, f"metric_for_best_model={metric}"))
    for keys, metric, known in (
        ((one, "eval_token_accuracy=false"), "eval_math_loss", "give one of eval_loss$"),
        (
            (two, "eval_token_accuracy=false"),
            "eval_physics_loss",
            "give one of eval_loss, eval_math_loss, eval_code_loss$",
        ),
        ((one,), "accuracy", "give one of eval_loss, eval_token_accuracy$"),
        ((two, "data=preference"), "rewards_accuracy", "eval_code_rewards_margin, eval_code_rewards_accuracy$"),
        ((one, "data=preference", "task=reward"), "token_accuracy", "eval_rewards_margin, eval_rewards_accuracy$"),
        ((one, "data=preference"), "nll_loss", "eval_rewards_accuracy$"),
    ):
        with pytest.raises(UserError, match=f"'eval_.*' is not reported by this run's evaluations; .*{known}"):
            check_metric_name(set_keys(build_config(), *keys, f"metric_for_best_model={metric}"))
