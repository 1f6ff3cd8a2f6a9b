"""An optimizer's state is as declared, or the run does not start."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from support.configs import build_config

from errors import UserError
from training.config.schema import OptimizerName, RunConfig, StateDtype
from training.optim import optimizer
from training.optim.optimizer import (
    ELEMENTWISE,
    STEP,
    check_optimizer,
    count_state_bytes,
    declare_state,
    describe_updates,
)
from training.optim.state_kinds import StateKind, StateTensor, check_state

KEPT = {"exp_avg": ELEMENTWISE, "exp_avg_sq": ELEMENTWISE, "step": STEP}
BYTES = {"adamw": 8, "lion": 4, "sgd": 0}


def use_custom(config: RunConfig, target: str, **fields: object) -> RunConfig:
    config.optimizer.name, config.optimizer.custom = OptimizerName.custom, {"_target_": target, **fields}
    return config


@pytest.fixture(scope="module")
def composed() -> RunConfig:
    return build_config()


@pytest.fixture
def config(composed: RunConfig) -> RunConfig:
    return deepcopy(composed)


@pytest.mark.parametrize("name", BYTES)
def test_the_optimizers_of_a_run_keep_what_is_declared(name: str, config: RunConfig) -> None:
    config.optimizer.name = OptimizerName(name)
    check_optimizer(config)
    assert count_state_bytes(config) == BYTES[name]


def test_averages_in_bf16_are_half_of_the_state(config: RunConfig) -> None:
    config.optimizer.state_dtype = StateDtype.bf16
    check_optimizer(config)
    assert count_state_bytes(config) == 4
    assert describe_updates(config) == {"optimizer.state_dtype": "bf16"}


@pytest.mark.parametrize(
    "declared, saves",
    [
        ({**KEPT, "max_exp_avg_sq": ELEMENTWISE}, "max_exp_avg_sq (elementwise)"),
        ({**KEPT, "step": ELEMENTWISE}, "step (elementwise)"),
        ({**KEPT, "exp_avg": StateTensor(StateKind.elementwise, torch.bfloat16)}, "exp_avg (elementwise, bfloat16)"),
        ({"exp_avg": ELEMENTWISE}, "a checkpoint saves exp_avg (elementwise);"),
        ({}, "a checkpoint saves nothing;"),
    ],
    ids=["one more", "of another kind", "of another dtype", "one less", "none"],
)
def test_a_run_whose_optimizer_keeps_something_else_does_not_start(
    declared: dict[str, StateTensor], saves: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    adamw = replace(optimizer.OPTIMIZERS[OptimizerName.adamw], declare=lambda _: declared)
    monkeypatch.setitem(optimizer.OPTIMIZERS, OptimizerName.adamw, adamw)
    with pytest.raises(UserError) as raised:
        check_optimizer(config)
    found = "for each parameter the optimizer keeps exp_avg (elementwise), exp_avg_sq (elementwise), step (scalar), but"
    assert str(raised.value).startswith(found) and saves in str(raised.value)


@pytest.mark.parametrize("value, kind", [(torch.zeros(2, 2), "of shape [2, 2]"), ([1], "list"), (1, "number")])
def test_state_of_an_unknown_shape_is_named(value: object, kind: str) -> None:
    with pytest.raises(UserError, match="keeps scales") as raised:
        check_state(torch.zeros(4), {"scales": value}, {"scales": ELEMENTWISE})
    assert f"scales ({kind})" in str(raised.value)


@pytest.mark.parametrize(
    ("target", "fields", "kept"),
    [
        (
            "torch.optim.RAdam",
            {"betas": [0.9, 0.95]},
            {"exp_avg": ELEMENTWISE, "exp_avg_sq": ELEMENTWISE, "step": STEP},
        ),
        (
            "torch.optim.NAdam",
            {},
            {"exp_avg": ELEMENTWISE, "exp_avg_sq": ELEMENTWISE, "step": STEP, "mu_product": STEP},
        ),
        ("torch.optim.SGD", {"momentum": 0.9}, {"momentum_buffer": ELEMENTWISE}),
        ("torch.optim.RMSprop", {}, {"square_avg": ELEMENTWISE, "step": STEP}),
        (f"{__name__}.Counting", {}, {"seen": StateTensor(StateKind.number, None)}),
        (f"{__name__}.SettingGroups", {}, {}),
    ],
)
def test_what_a_users_optimizer_keeps_is_found_by_running_it(
    target: str, fields: dict, kept: dict[str, StateTensor], config: RunConfig
) -> None:
    assert declare_state(use_custom(config, target, **fields)) == kept
    check_optimizer(config)


class Counting(torch.optim.SGD):
    """Keeps a Python number."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                state.update(seen=state.get("seen", 0) + 1, momentum_buffer=None)


class CountingGroups(torch.optim.SGD):
    """Counts its steps in its groups, as apex's FusedAdam does."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class SettingGroups(torch.optim.SGD):
    """Sets a number in its groups once, as DeepSpeed's FusedAdam does (0.19.8)."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group.setdefault("step", 0)


class CountingSelf(torch.optim.SGD):
    """Counts its steps itself."""

    steps = 0

    def step(self, closure: None = None) -> None:
        super().step(closure)
        self.steps += 1


class RowNormalized(torch.optim.SGD):
    """Normalizes whole rows, with no state that would show it."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    weights.grad /= weights.grad.norm(dim=-1, keepdim=True)
        super().step(closure)


class Attached(torch.optim.SGD):
    """Creates its state in its constructor."""

    def __init__(self, params: list, lr: float) -> None:
        super().__init__(params, lr)
        self.kept = {weights: 0 for group in self.param_groups for weights in group["params"]}

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weights in group["params"]:
                self.kept[weights] += 1
        super().step(closure)


class Listing(Counting):
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["history"] = [1.0]


@pytest.mark.parametrize(
    ("target", "fields", "error"),
    [
        ("torch.optim.Adafactor", {}, "Adafactor is not elementwise: ZeRO gives each rank a flat part of the weights"),
        (
            f"{__name__}.RowNormalized",
            {},
            "and on such a part it makes other steps than on whole weights; give an optimizer that",
        ),
        (f"{__name__}.Listing", {}, r"for such a part it keeps history \(list\); give an optimizer"),
        (
            f"{__name__}.CountingGroups",
            {},
            r"CountingGroups keeps step of its parameter groups, and no checkpoint saves",
        ),
        (f"{__name__}.CountingSelf", {}, r"CountingSelf keeps steps, and no checkpoint saves"),
        ("torch.optim.ASGD", {}, r"ASGD keeps eta, a number that is another one in parameter groups of another"),
        ("torch.optim.Adagrad", {}, "DeepSpeed makes torch.optim.Adagrad anew and drops its groups"),
        (f"{__name__}.Attached", {}, r"Attached is not elementwise: .* on such a part it fails \(KeyError"),
        ("torch.optim.Muon", {}, r"Muon does not take a step on matrices and vectors \(ValueError: Muon only supports"),
        ("torch.optim.LBFGS", {}, r"LBFGS does not take a step on matrices and vectors \(ValueError"),
        (
            "torch.optim.RAdam",
            {"betas": [2, 2]},
            r"does not take a step on .* \(ValueError: Invalid beta.*change its f",
        ),
        ("torch.optim.RAdam", {"beta": 1}, r"RAdam does not take these fields: .*'beta'; it is called with parameter"),
        ("torch.optim.RAdam", {"lr": 1e-3}, "lr is the run's learning_rate; give learning_rate=0.001 instead"),
        ("torch.optim.RAdam", {"weight_decay": 0.1}, "weight_decay is the run's weight_decay; give weight_decay=0.1"),
        ("torch.nn.Linear", {}, "Linear does not take these fields"),
        ("torch.optim.Nothing", {}, "the module torch.optim has no class or function 'Nothing'"),
    ],
)
def test_an_optimizer_that_zero_cannot_cut_is_refused(target: str, fields: dict, error: str, config: RunConfig) -> None:
    with pytest.raises(UserError, match=error):
        check_optimizer(use_custom(config, target, **fields))


def test_a_decay_that_an_optimizer_does_not_have_is_refused(config: RunConfig) -> None:
    use_custom(config, "torch.optim.Rprop")
    check_optimizer(config)
    config.weight_decay = 0.1
    with pytest.raises(UserError, match="weight_decay=0.1: torch.optim.Rprop has none; give weight_decay=0"):
        check_optimizer(config)


def test_a_users_optimizer_is_a_mapping(config: RunConfig) -> None:
    use_custom(config, "").optimizer.custom = "torch.optim.RAdam"
    with pytest.raises(UserError, match="optimizer.custom=torch.optim.RAdam: give a mapping, such as {_target_: torch"):
        check_optimizer(config)


def test_8_bits_keep_blocks(config: RunConfig) -> None:
    pytest.importorskip("bitsandbytes")
    config.optimizer.name = OptimizerName.adamw_8bit
    check_optimizer(config)
    assert count_state_bytes(config) == 2 * (1 + 4 / 256)
