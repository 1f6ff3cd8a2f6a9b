"""A key that was given and that the run does not read is named; what runs read is what they are seen to read."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
from omegaconf import OmegaConf
from support.adapters import make_adapter
from support.cases import Case
from support.configs import build_config, compose_config
from support.reads import recording, train_recorded
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer
from support.workers import WorkerGroup

from errors import UserError
from training.config.incompatible import CheckedConfig
from training.config.key_table import list_types
from training.config.schema import RunConfig
from training.config.validate import check_config
from training.plan_command.run import has_experts, plan_run
from training.resolution.readers import check_read, find_unread, list_readers

PREFERENCES = ("data=preference", "train_file={root}/pairs.jsonl", "eval_file={root}/pairs.jsonl")
# Mode -> its keys, over those of `Case`; {root} is the folder with models and data.
MODES: dict[str, tuple[str, ...]] = {
    "sft": ("max_steps=null", "num_train_epochs=0.1"),
    "sft-eval": ("eval_file={root}/eval.jsonl", "early_stopping_patience=3", "eval_steps=1", "optimizer=adamw"),
    "chat-lora": (
        "data=chat", "data.chat_template=mistral", "adapter=lora", "optimizer=adamw", "lr_scheduler_type=cosine",
    ),
    "adapter-of-a-folder": ("adapter=lora", "adapter.name_or_path={root}/adapter", "adapter.loraplus_lr_ratio=4"),
    "pretrain-stream": (
        "data=pretrain", "data.text_field=completion", "data.streaming=true", "lr_scheduler_type=wsd", "optimizer=lion",
    ),
    "mixture": ("train_file=[{{path: {root}/train.jsonl, weight: 1}}, {{path: {root}/eval.jsonl, weight: 2}}]",),
    "held-out": ("data.eval_fraction=0.3", "eval_epochs=0.5", "lr_scheduler_type=linear"),
    "dpo": (*PREFERENCES, "lr_scheduler_type=polynomial"),
    "orpo": (*PREFERENCES, "task=orpo"),
    "simpo": (*PREFERENCES, "task=simpo"),
    "cpo": (*PREFERENCES, "task=cpo", "optimizer=custom", "optimizer.custom={{_target_: torch.optim.RAdam}}"),
    "reward": (*PREFERENCES, "task=reward"),
    "kto": (*PREFERENCES, "task=kto", "lr_scheduler_type=cosine_with_restarts"),
    "distill": ("distill.teacher={root}/hf",),
    "zero-bubble": ("num_stages=2", "schedule=zero_bubble"),
    "interleaved": ("num_stages=2", "schedule=interleaved"),
    "evaluate": ("evaluate_only=true", "eval_file={root}/eval.jsonl"),
}  # fmt: skip
PLANS = {
    "plan": ("plan=true", "world_size=1", "hardware=h200"),
    "plan-experts": (
        "plan=true", "world_size=2", "hardware=h200", "model=mixtral_8x7b", "model_name_or_path=nowhere",
        "expert_parallel_size=2", "precision=bf16",
    ),
    "search": (
        "plan=search", "world_size=2", "hardware=h200", "model=llama_tiny", "model_name_or_path=nowhere",
        "precision=bf16",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("readers")
    save_llama(root / "hf")
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", 40)
    save_records(root / "eval.jsonl", 11, seed=1)
    save_pairs(root / "pairs.jsonl", 24)
    make_adapter(root / "adapter", root / "hf")
    return root


def build_case(mode: str, root: Path, workdir: Path) -> Case:
    keys = tuple(key.format(root=root) for key in (MODES | PLANS)[mode])
    num_stages = 2 if "num_stages=2" in keys else 1
    return Case(root / "hf", root / "train.jsonl", workdir, num_stages, num_stages, steps=2, overrides=keys)


def give(config: RunConfig, key: str) -> RunConfig:
    """Returns a copy of the config with a value of a key that is not its default."""
    given = deepcopy(config)
    *groups, name = key.split(".")
    parent: Any = reduce(getattr, groups, given)
    setattr(parent, name, choose(list_types()[key], getattr(parent, name)))
    return given


def choose(hint: Any, default: Any) -> Any:
    """Returns a value of a type that is not the default."""
    kind = next(each for each in get_args(hint) if each is not type(None)) if isinstance(hint, UnionType) else hint
    if get_origin(kind) in (list, dict):
        return get_origin(kind)([("x", 1)])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(member for member in kind if member is not default)
    value = {bool: not default, int: 3, float: 0.25}.get(kind, "x")
    return 7 if value == default else value


@pytest.mark.parametrize(
    "mode", ["sft", *(pytest.param(mode, marks=pytest.mark.full) for mode in [*MODES, *PLANS] if mode != "sft")]
)
def test_every_key_in_every_mode_is_read_or_named(root: Path, tmp_path: Path, mode: str) -> None:
    config = build_case(mode, root, tmp_path).config()
    before = {each.key for each in find_unread(CheckedConfig(config), ())}
    for key, reader in list_readers().items():
        run = CheckedConfig(give(config, key))
        unread = set() if reader.holds(run) else {key}
        assert {each.key for each in find_unread(run, {key})} == before | unread


# Keys that are copied or described where nothing comes of them
COPIED = {
    "eval_token_accuracy",  # into the options of an objective, of which next-token losses read it
    "metric_for_best_model", "greater_is_better", "eval_steps", "eval_epochs", "eval_on_start",  # into the loop
    "data.template_kwargs",  # its date is described for every kind of data
    "data.mixture_by",  # into the files of a key, which may have no shares
    "moe.imbalance",  # into the ranks that divide experts, which may be one
    "world_size",  # into the teacher's config, as all keys of a plan
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_run_reads_what_the_table_says(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, mode: str
) -> None:
    case = build_case(mode, root, tmp_path)
    compare(case.config(), set().union(*workers(case.world_size).run(train_recorded, case)), trains=mode != "evaluate")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["plan", "plan-experts"])  # a search tries other optimizers and adapters too
def test_a_plan_reads_nothing_that_the_table_denies(
    root: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.plan_command.run.advise", lambda *_: [])  # it tries other keys, as a search does
    config = build_case(mode, root, tmp_path).config()
    with recording() as read:
        assert list(plan_run(config))
    compare(config, read, trains=False)


def compare(config: RunConfig, read: set[str], *, trains: bool) -> None:
    """trains: else the table also holds what a training run of the same keys would read."""
    run = CheckedConfig(config)
    denied = {key for key, reader in list_readers().items() if not reader.holds(run)}
    assert sorted(read & denied - COPIED) == []
    if trains:
        assert sorted(list_readers().keys() - denied - read) == []


@pytest.mark.parametrize(
    ("name", "overrides", "unread"),
    [
        ("qwen2_72b_lora_pp8", ("adapter=none",), []),
        ("deepseek_v3_lora_pp16", ("adapter=none",), ["adapter.target_parameters"]),
        ("llama_7b_pp4", ("max_steps=5",), ["num_train_epochs"]),
        ("llama_8b_pp1", ("optimizer=adamw_8bit",), ["optimizer.state_dtype"]),
        ("llama_8b_distill_pp4", ("distill.teacher=null",), []),
        ("llama_tiny_pp2", ("eval_file=null",), []),
    ],
)
def test_an_override_of_a_primary_config_leaves_keys_of_its_file_unread(
    name: str, overrides: tuple[str, ...], unread: list[str]
) -> None:
    """They are named, unless the command line turns off what would read them."""
    config = OmegaConf.to_object(compose_config(name, "train_file=data.jsonl", *overrides))
    assert isinstance(config, RunConfig)
    check_config(config, has_accelerator=True)
    found = check_read(CheckedConfig(config), {override.partition("=")[0] for override in overrides}, continues=False)
    assert [text.partition("=")[0] for text in found] == unread


def test_keys_of_an_adapter_without_one_are_refused_wherever_they_stand() -> None:
    """The whole model would be trained, unless that is what the command line chooses."""
    config = build_config("adapter=lora", "adapter.r=4", "adapter.name_or_path=/nowhere")
    config.adapter.name = type(config.adapter.name).none
    for given in ((), ("adapter.r",)):
        with pytest.raises(UserError, match="^adapter.r=4: this run does not read it, only one with adapter=lora"):
            check_read(CheckedConfig(config), given, continues=False)
    for given, continues in (("adapter",), False), ((), True), (("adapter.r",), True):
        assert len(check_read(CheckedConfig(config), given, continues=continues)) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("adapter.r=16",), "adapter.r=16: this run does not read it, only one with adapter=lora without adapter.name"),
        (("eval_steps=4",), "eval_steps=4: .*, only one with eval_file, data.eval_fraction or data.eval_samples does"),
        (("eval_file=null", "eval_steps=4"), "eval_steps=4: this run does not read it, only one with eval_file"),
        (("early_stopping_threshold=0.5",), "early_stopping_threshold=0.5: .* only one with eval_file, data.eval_f"),
        (("data.chosen_field=a",), "data.chosen_field=a: .* only one with data=preference without data.encoder does"),
        (("virtual_stages_per_rank=2",), "virtual_stages_per_rank=2: .* only one with schedule=interleaved does"),
        (("world_size=8",), "world_size=8: .* only one with plan=true does; give that, or omit the key"),
        (("optimizer=lion", "optimizer.eps=1e-6"), "optimizer.eps=1e-06: .* optimizer=adamw or adamw_8bit does"),
        (("data.template_kwargs.date=2026-01-01", "data=pretrain"), "data.template_kwargs={'date': .* only one with"),
    ],
)
def test_a_key_of_the_command_line_is_refused(overrides: tuple[str, ...], message: str) -> None:
    added = tuple("+" * override.startswith("data.template_kwargs.") + override for override in overrides)
    run = CheckedConfig(build_config(*added))
    with pytest.raises(UserError, match=f"^{message}"):
        check_read(run, {override.partition("=")[0] for override in overrides}, continues=False)


def test_a_default_that_asks_for_nothing_is_not_named() -> None:
    run = CheckedConfig(build_config())
    keys = ("eval_steps", "distill.divergence", "early_stopping_threshold", "data.train_on", "adapter.use_dora")
    assert check_read(run, keys, continues=False) == []


def test_the_threshold_of_early_stopping_is_read_without_patience() -> None:
    """Checkpoints hold the count that depends on it, and a resumed run with patience starts from that."""
    run = CheckedConfig(build_config("eval_file=eval.jsonl", "early_stopping_threshold=0.5"))
    assert check_read(run, {"early_stopping_threshold"}, continues=False) == []


@pytest.mark.parametrize("model", ["llama_7b", "mixtral_8x7b"])
def test_a_search_reads_the_imbalance_of_a_mixture_alone(model: str) -> None:
    keys = (f"model={model}", "model_name_or_path=nowhere", "plan=search", "world_size=2", "moe.imbalance=3")
    config = build_config(*keys)
    run = CheckedConfig(config, has_experts=has_experts(config))
    if model == "mixtral_8x7b":
        assert check_read(run, {"moe.imbalance"}, continues=False) == []
        return
    with pytest.raises(
        UserError, match="^moe.imbalance=3.0: this run does not read it, only one with expert_parallel_size"
    ):
        check_read(run, {"moe.imbalance"}, continues=False)
