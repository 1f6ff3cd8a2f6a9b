"""Process rewards through real pipeline stages against transformers' own class and loss in one process; their tokens
against those of steps that are tokenized one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import objective_runs
from support.cases import CHECKPOINTED, Case, merge
from support.head_runs import (
    check_adapter_steps,
    load_oracle,
    load_with_adapter,
    read_token_batch,
    save_steps,
    train_token_oracle,
)
from support.objective_runs import PACKED_LAYOUTS, check_resumed, check_steps, find_dataset, start_runs, train_answers
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerGroup
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification

from errors import UserError
from extensions.classification.token_encoders import ProcessRewardEncoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    save_llama(root / "tiedFalse")
    save_tokenizer(root / "tiedFalse")
    save_steps(root / "train.jsonl", 30)
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 5) -> Case:
    given = ("data=process_reward", "learning_rate=0.1", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=steps)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        pytest.param(layout, overrides, marks=pytest.mark.full)
        for layout, *overrides in (
            ("pp1",),
            ("pp2", CHECKPOINTED),
            ("pp2", "schedule=zero_bubble"),
            ("pp2xdp2", "data.packing=true", "learning_rate=0.01"),
            ("tp2",),
            ("cp2",),
            ("zero3",),
            *(
                (layout, "data.packing=true", "learning_rate=0.01", *given)
                for layout, given in (("pp1", ()), ("pp2", (CHECKPOINTED,)), ("cp2", ()), *PACKED_LAYOUTS)
            ),
        )
    ],
)
def test_five_sgd_steps_equal_transformers(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str, overrides: list[str]
) -> None:
    case = build_case(root, tmp_path, layout, *overrides)
    model = load_oracle(case)
    check_steps(merge(workers(case.world_size).run(train_answers, case)), train_token_oracle(case, model))


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), ("data.packing=true",)], ids=["unpacked", "packed"])
def test_three_sgd_steps_with_adapters_equal_peft(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """From an exported adapter, so that its matrices and its head have gradients in the first step."""
    run = start_runs(workers, root, tmp_path, build_case)
    run("first", "pp1", "adapter=lora", "adapter.r=4", "learning_rate=1e-2", "max_steps=2")
    adapter = tmp_path / "first" / "hf"
    lora = ("adapter=lora", f"adapter.name_or_path={adapter}", "learning_rate=0.003")
    # in more steps rounding grows: plain fp32 is 7e-5 from fp64 at the fifth
    case = replace(build_case(root, tmp_path, "pp2", *lora, CHECKPOINTED, *overrides), steps=3)
    model = load_with_adapter(root / "tiedFalse", adapter, 2, AutoModelForTokenClassification)
    check_adapter_steps(merge(workers(case.world_size).run(train_answers, case)), train_token_oracle(case, model))


@pytest.mark.full
@pytest.mark.parametrize("adapter", [(), ("adapter=lora", "adapter.r=4")], ids=["whole", "lora"])
@pytest.mark.parametrize("packed", [(), ("data.packing=true", "micro_batch_size=1")], ids=["unpacked", "packed"])
def test_a_run_continues_at_another_layout_and_is_exported(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, adapter: tuple[str, ...], packed: tuple[str, ...]
) -> None:
    run = start_runs(workers, root, tmp_path, build_case, "learning_rate=3e-3", *adapter, *packed)
    _, ended = check_resumed(run, tmp_path, ("pp2", "cp2"))
    if adapter:
        auto = AutoModelForTokenClassification
        model = load_with_adapter(root / "tiedFalse", tmp_path / "ended" / "hf", 2, auto)
    else:
        model = AutoModelForTokenClassification.from_pretrained(tmp_path / "ended" / "hf", dtype=torch.float32).eval()
        assert model.config.id2label == {0: "false", 1: "true"}
    dataset = find_dataset(tmp_path)
    batch = read_token_batch(dataset, list(range(len(dataset))))
    with torch.no_grad():
        scores = model(**batch).logits[batch["labels"] != -100]
    labels = batch["labels"][batch["labels"] != -100]
    found = {name: ended[-1][f"eval_{name}"] for name in ("loss", "accuracy")}
    expected = {"loss": F.cross_entropy(scores, labels).item(), "accuracy": (scores.argmax(1) == labels).float().mean()}
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)
    run("again", "pp2", "evaluate_only=true", f"resume={tmp_path}/ended/checkpoints")
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    names = ("eval_loss", "eval_accuracy", "eval_f1", "eval_auc")
    assert {name: again[name] for name in names} == pytest.approx({name: ended[-1][name] for name in names}, rel=1e-4)


RECORD = {"prompt": "1 + 1 = ?", "completions": ["Count one.", "Then two."], "labels": [True, False]}


def test_the_last_token_of_each_separator_has_the_label(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    sample = ProcessRewardEncoder(step_separator=" ##\n").encode(RECORD, "a.jsonl:1", tokenizer)
    prompt, separator, *steps = tokenizer(["1 + 1 = ?\n", " ##\n", *RECORD["completions"]])["input_ids"]
    expected = [*prompt, *steps[0], *separator, *steps[1], *separator, tokenizer.eos_token_id]
    assert sample["input_ids"] == expected
    places = [len(prompt) + len(steps[0]) + len(separator) - 1, len(expected) - 2]
    labels = [*sample["labels"][1:], -100]  # each at its own token
    assert {place: label for place, label in enumerate(labels) if label != -100} == dict(zip(places, (1, 0)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": [True]}, "steps: 2, labels: 1; fix or remove the record"),
        ({"labels": [1, 0]}, "field 'labels' must be a list of true and false, not [1, 0]; fix or remove the record"),
        ({"completions": []}, "field 'completions' must be a list of texts; fix or remove the record"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(UserError) as raised:
        ProcessRewardEncoder().encode(RECORD | changed, "a.jsonl:1", save_tokenizer(tmp_path))
    assert str(raised.value) == f"a.jsonl:1: {message}"
