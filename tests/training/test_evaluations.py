"""Named evaluation files, the best checkpoint and the end of a run, through the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import BOUND, mean_loss
from support.runs import list_tokenized, read_metrics
from support.tiny import save_records
from transformers import AutoModelForCausalLM

from data.storage.tokenized import TokenizedDataset


@pytest.fixture
def files(root: Path) -> str:
    """11 samples, and 4 others."""
    save_records(root / "other.jsonl", 4, seed=2)
    return f"{{math: {root}/eval.jsonl, code: [{root}/other.jsonl]}}"


def find_tokens(root: Path, num_samples: int) -> TokenizedDataset:
    return next(data for data in list_tokenized(root) if len(data) == num_samples)


def saved_steps(out: Path) -> list[int]:
    return sorted(int(path.name[11:]) for path in (out / "checkpoints").glob("global_step*"))


# Forty samples in global batches of 8: an epoch is 5 steps. At this learning rate each file's loss has a turning point.
KEYS = ("max_steps=20", "lr_scheduler_type=constant", "learning_rate=3e-2", "eval_epochs=0.4", "logging_steps=20")
BEST = ("load_best_model_at_end=true", "keep_last=1", "early_stopping_patience=2", "metric_for_best_model=code_loss")


@pytest.mark.parametrize(
    ("num_stages", "world_size", "zero_stage"),
    [(2, 2, 1), *(pytest.param(*layout, marks=pytest.mark.full) for layout in ((2, 4, 1), (1, 2, 2), (1, 2, 3)))],
    ids=["pp2", "pp2xdp2", "zero2", "zero3"],
)
def test_the_best_of_one_of_two_files_is_what_the_run_ends_with(
    run: Callable[..., Path], root: Path, files: str, num_stages: int, world_size: int, zero_stage: int
) -> None:
    out = run("best", num_stages, world_size, *KEYS, *BEST, f"eval_file={files}", f"zero_stage={zero_stage}")
    lines = [line for line in read_metrics(out) if "eval_loss" in line]
    assert [list(line) for line in lines] == [
        [
            "step",
            "eval_loss",
            "eval_math_loss",
            "eval_math_token_accuracy",
            "eval_math_tokens",
            "eval_code_loss",
            "eval_code_token_accuracy",
            "eval_code_tokens",
            "eval_tokens",
        ]
    ] * len(lines)
    losses = {line["step"]: line["eval_code_loss"] for line in lines}
    assert list(losses) == list(range(2, max(losses) + 1, 2)), "every 0.4 epochs of 5 steps"
    best = min(losses, key=losses.__getitem__)
    assert max(losses) == best + 4 < 20, "two evaluations after the best one; else the case shows nothing"
    assert saved_steps(out) == [best, best + 4]
    completed = json.loads((out / "completed.json").read_text())
    assert (completed["ended_by"], completed["step"], completed["best_step"]) == ("early stopping", best + 4, best)

    model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    (line,) = (line for line in lines if line["step"] == best)
    for name, num_samples in (("math", 11), ("code", 4)):
        loss, num_targets = mean_loss(model, find_tokens(root, num_samples))
        assert (
            line[f"eval_{name}_loss"] == pytest.approx(loss, rel=BOUND) and line[f"eval_{name}_tokens"] == num_targets
        )
    tokens = [line["eval_math_tokens"], line["eval_code_tokens"]]
    mean = (line["eval_math_loss"] * tokens[0] + line["eval_code_loss"] * tokens[1]) / sum(tokens)
    assert line["eval_loss"] == pytest.approx(mean) and line["eval_tokens"] == sum(tokens)


@pytest.mark.full
def test_the_best_is_known_after_a_resume_at_another_layout(run: Callable[..., Path], files: str) -> None:
    """Stopped before its patience is used up, the run ends at the same step, with the same export."""
    whole = run("whole", 2, 2, *KEYS, *BEST, f"eval_file={files}")
    ended = json.loads((whole / "completed.json").read_text())
    last, best = ended["step"], ended["best_step"]
    run("parts", 2, 2, *KEYS, *BEST, f"eval_file={files}", f"stop_after_steps={last - 2}")
    parts = run("parts", 1, 2, *KEYS, *BEST, f"eval_file={files}", "micro_batch_size=1", "resume=latest")
    assert json.loads((parts / "completed.json").read_text())["step"] == last
    assert saved_steps(parts) == [best, last]
    before = read_metrics(parts)
    run("parts", 2, 2, *KEYS, *BEST, f"eval_file={files}", "resume=latest")
    assert read_metrics(parts) == before, "it had finished"
    (parts / "completed.json").unlink()
    run("parts", 2, 2, *KEYS, *BEST, f"eval_file={files}", "resume=latest")
    assert json.loads((parts / "completed.json").read_text())["ended_by"] == "early stopping", "its export was left"
    exported, expected = (load_file(out / "hf" / "model.safetensors") for out in (parts, whole))
    for name, tensor in expected.items():
        assert ((exported[name] - tensor).abs().max() / tensor.abs().max()) < BOUND, name


@pytest.mark.full
def test_the_best_adapter_is_exported(run: Callable[..., Path], files: str) -> None:
    given = (*KEYS, "adapter=lora", "adapter.target_modules=[q_proj,v_proj]", "load_best_model_at_end=true")
    out = run("lora", 2, 2, *given, f"eval_file={files}", "greater_is_better=true", "max_steps=6")
    completed = json.loads((out / "completed.json").read_text())
    assert completed["best_step"] == 2 < completed["step"], "the worst; else the case shows nothing"
    exported = load_file(out / "hf" / "adapter_model.safetensors")
    saved = torch.load(out / "checkpoints" / "global_step2" / "layer_01-model_states.pt", weights_only=True)
    (name,) = (name for name in saved if "q_proj" in name and "lora_B" in name)
    (same,) = (key for key in exported if "layers.0." in key and "q_proj" in key and "lora_B" in key)
    assert torch.equal(exported[same], saved[name].to(exported[same].dtype))


@pytest.mark.full
def test_named_files_are_evaluated_alone(run: Callable[..., Path], root: Path, files: str) -> None:
    out = run("alone", 2, 2, "evaluate_only=true", f"eval_file={files}")
    found = json.loads((out / "evaluation.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(root / "tiedFalse", dtype=torch.float32)
    for name, num_samples in (("math", 11), ("code", 4)):
        assert found[f"eval_{name}_loss"] == pytest.approx(
            mean_loss(model, find_tokens(root, num_samples))[0], rel=BOUND
        )
