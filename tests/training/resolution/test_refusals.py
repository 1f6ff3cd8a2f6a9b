"""A plan refuses what its run would, in the same words; the table of pairs marks what only one of them refuses."""

from __future__ import annotations

import ast
import dataclasses
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.configs import build_config, set_keys
from support.refusals import OTHERS, list_examples
from support.tiny import save_llama, save_tokenizer

from errors import UserError
from training import setup
from training.config.incompatible import Pair, Scope, list_pairs
from training.config.ranges import list_ranges
from training.config.schema import RunConfig
from training.distributed.ranks import Ranks
from training.plan_command.run import resolve_planned
from training.resolution.resolve import resolve_layout
from training.resolution.target import Target
from training.setup import check_run

ROOT = Path(__file__).resolve().parents[3]
# Of a config that is not composed, and of an installed package
BEFORE_BOTH = {"build_schema", "_extend_group", "to_typed", "check_deepspeed_version"}
RANKS = Ranks(rank=0, world_size=24, local_rank=0, local_size=8)


def build_run(folder: Path, *overrides: str) -> RunConfig:
    """A run that would start, but for the overrides."""
    return build_config(
        f"model_name_or_path={folder}/hf", f"output_dir={folder}/out", "micro_batch_size=1", "global_batch_size=48",
        "precision=bf16", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    save_llama(folder / "hf")
    save_tokenizer(folder / "hf")
    check_run(build_run(folder), RANKS)
    return folder


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is started where the plan expects it."""
    monkeypatch.setattr(setup, "has_accelerator", lambda: True)
    monkeypatch.setattr(setup, "describe_device", lambda: "NVIDIA H100 80GB HBM3")


def find_refusal(config: RunConfig) -> str | None:
    """Returns the message that refuses a run with these keys."""
    try:
        check_run(config, RANKS)
    except UserError as error:
        return str(error)
    return None


def find_planned_refusal(config: RunConfig) -> str | None:
    """Returns the message that refuses the plan of a run with these keys, unless they ask for a search."""
    keys = dataclasses.replace(config, plan=config.plan or True, world_size=config.world_size or RANKS.world_size)
    try:
        model = resolve_planned(keys)
        resolve_layout(model, keys, Target(RANKS.world_size, has_accelerator=True, is_planned=True))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("pair", list_pairs(), ids=lambda pair: f"{pair.first.words} + {pair.second.words}")
def test_who_refuses_a_pair(folder: Path, pair: Pair, request: pytest.FixtureRequest) -> None:
    if pair.scope is not Scope.run:
        request.getfixturevalue("on_gpus")
    message, overrides = next(list_examples(pair))
    config = set_keys(build_run(folder), *overrides)
    refused, planned = find_refusal(config), find_planned_refusal(config)
    if pair.scope is Scope.plan:
        assert planned is not None and planned.startswith(message)
        return
    assert refused is not None and refused.startswith(message)
    assert planned == (refused if pair.scope is Scope.both else None)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=custom",),
        ("optimizer=custom", "optimizer.custom={_target_: torch.optim.LBFGS}"),
        ("parameter_groups=[{pattern: nowhere, learning_rate: 1e-5}]",),
        ("parameter_groups=[{pattern: '(', learning_rate: 1e-5}]",),
        ("loss={_target_: no_such_module.Loss}",),
        ("data.collator={_target_: no_such_module.Collator}",),
        ("data.encoder={_target_: no_such_module.Encoder}",),
        ("callbacks=[{_target_: no_such_module.Callback}]",),
        ("adapter=lora", "adapter.target_modules=[no_such_projection]"),
        ("adapter=lora", "adapter.modules_to_save=[no_such_module]"),
        ("adapter=lora", "adapter.r=0"),
        ("adapter=lora", "data=chat", "data.chat_template=chatml"),
        ("freeze=[no_such_weight]",),
        ("task=reward", "data=sft"),
        ("data.chat_template=no_such_template", "data=chat"),
        ("num_stages=24",),
        ("tensor_parallel_size=3",),
        ("context_parallel_size=2", "max_seq_length=33"),
        ("expert_parallel_size=2",),
        ("moe.aux_loss_coef=1",),
        ("rope_parameters.rope_type=yarn",),
        ("partition_method=nonsense",),
        ("partition_method='type:nowhere'",),
        ("metric_for_best_model=eval_bliss", "eval_file=a.jsonl"),
        ("data=classification", "data.problem_type=regression", "eval_file=a.jsonl", "metric_for_best_model=mae"),
    ],
    ids=" ".join,
)
def test_what_the_model_and_the_keys_cannot_do_is_refused_by_both(
    folder: Path, on_gpus: None, overrides: tuple[str, ...]
) -> None:
    config = build_run(folder, *overrides)
    refused = find_refusal(config)
    assert refused is not None and find_planned_refusal(config) == refused


def list_out_of_range(config: RunConfig) -> Iterator[RunConfig]:
    """The config with one number out of the range that its field states, for each field that states one."""
    for key, allowed in list_ranges(config).items():
        wrong = next(number for number in (-1, 0, 1, 2, 7) if not allowed.holds(number))
        yield set_keys(config, f"{key}={wrong}")


def find_raising_line(config: RunConfig) -> tuple[str, int]:
    """The file and the line of training/config/ that refuse a run."""
    with pytest.raises(UserError) as caught:
        check_run(config, RANKS)
    frames = [frame for frame in traceback.extract_tb(caught.tb) if "training/config/" in frame.filename]
    return Path(frames[-1].filename).name, frames[-1].lineno or 0


def list_refusals() -> dict[tuple[str, int], range]:
    """The `raise UserError` of training/config/, by file and line, each with the lines that it spans."""
    found = {}
    for file in (ROOT / "training" / "config").glob("*.py"):
        functions = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
        for node in (node for each in functions if each.name not in BEFORE_BOTH for node in ast.walk(each)):
            if isinstance(node, ast.Raise) and "UserError" in ast.unparse(node):
                found[file.name, node.lineno] = range(node.lineno, (node.end_lineno or 0) + 1)
    return found


def test_every_refusal_of_the_config_is_walked(folder: Path, on_gpus: None) -> None:
    """The range of each field, and an example of each `raise`: by the run and its plan in the same words."""
    base = build_run(folder)
    ranges = list(list_out_of_range(base))
    examples = [build_run(folder, *overrides) for overrides in (*OTHERS, ("fused_kernels=auto", "compile=true"))]
    refusals = [(find_refusal(config), find_planned_refusal(config)) for config in (*ranges, *examples)]
    assert len(ranges) > 40 and None not in {refused for refused, _ in refusals}
    assert [refused for refused, _ in refusals] == [planned for _, planned in refusals]
    walked = {find_raising_line(config) for config in (ranges[0], *examples)}
    missed = [
        refusal for refusal, lines in list_refusals().items() if not any((refusal[0], line) in walked for line in lines)
    ]
    assert not missed
