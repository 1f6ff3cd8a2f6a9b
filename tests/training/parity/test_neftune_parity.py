"""Three steps of SGD with noise on embeddings, against the plain Hugging Face model with the same noise after its
embedding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CONTEXT_PARALLEL,
    LAYOUTS,
    RING,
    SELECTIVE,
    ZERO_LAYOUTS,
    Case,
    mean_loss,
    merge,
    train_case,
    train_oracle,
    worst_difference,
)
from support.configs import build_config
from support.families import save_family
from support.runs import eval_dataset, read_metrics
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

from models.layers.neftune import compute_uniform, identify_tokens
from training.objectives.registry import describe_objective

ALPHA = 15.0
NOISY = f"neftune_noise_alpha={ALPHA:g}"
ALL_LAYOUTS = LAYOUTS | CONTEXT_PARALLEL | {"tp2": (1, 2)} | ZERO_LAYOUTS


def make_noisy(model: torch.nn.Module, seed: int, pad_token_id: int) -> None:
    """Adds the noise of each step where the hook of transformers does; one pass is one step."""
    steps = iter(range(100))

    def add(module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        step, noise = next(steps), torch.zeros_like(output)
        for row, ids in enumerate(args[0]):
            tokens = ids[: int((ids != pad_token_id).sum())].unsqueeze(0)
            places = torch.arange(tokens.shape[1]).unsqueeze(0)
            keys, _ = identify_tokens(tokens, places, torch.ones_like(places), hash((seed, step)) & 0xFFFFFFFF)
            scale = ALPHA / (tokens.shape[1] * output.shape[-1]) ** 0.5
            noise[row, : tokens.shape[1]] = scale * compute_uniform(keys[0], output.shape[-1])
        return output + noise

    model.get_input_embeddings().register_forward_hook(add)


def compare(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = merge(workers(case.world_size).run(train_case, case))
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    make_noisy(model, case.config().seed, pad_token_id=0)
    oracle = train_oracle(case, model)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    plain = train_oracle(case, AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32))
    assert worst_difference(plain["weights"], oracle["weights"])[0] > 1e-3


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", True, (CHECKPOINTED,)),
        pytest.param("cp2", False, (RING,), marks=pytest.mark.full),
        *(
            pytest.param(layout, tied, overrides, marks=pytest.mark.full)
            for layout in ("pp1", "pp2", "pp2xdp2", "tp2", "cp2", "cp2xpp2", *ZERO_LAYOUTS)
            for tied, overrides in ((False, ()), (True, (CHECKPOINTED,)), (False, SELECTIVE))
            if (layout, tied) != ("pp2", True)
        ),
    ],
)
def test_three_sgd_steps(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    num_stages, world_size = ALL_LAYOUTS[layout]
    sharded = ("tensor_parallel_size=2",) if layout == "tp2" else ()
    sharded += ("context_parallel_size=2",) if layout in CONTEXT_PARALLEL else ()
    zero = (f"zero_stage={layout[-1]}",) if layout in ZERO_LAYOUTS else ()
    keys = (NOISY, *sharded, *zero, *overrides)
    compare(workers, Case(root / f"tied{tied}", root / "train.jsonl", tmp_path, num_stages, world_size, 3, keys))


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt2", "granite"])
def test_families_that_scale_embeddings(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    """Noise comes after a scale of the embedding, and before any other operation of the model on embeddings."""
    save_family(tmp_path / "model", family, tied=True)
    keys = (NOISY, f"tokenizer_name_or_path={root}/tiedFalse", "learning_rate=0.05")
    compare(workers, Case(tmp_path / "model", root / "train.jsonl", tmp_path, 1, 1, 3, keys))


@pytest.mark.full
def test_evaluations_have_no_noise(run, root: Path) -> None:
    out = run("run", 2, 2, NOISY, "data.packing=true")
    loss, _ = mean_loss(AutoModelForCausalLM.from_pretrained(out / "hf"), eval_dataset(root))
    assert read_metrics(out)[-1]["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_noise_is_a_part_of_what_a_run_keeps() -> None:
    assert "neftune_noise_alpha" not in describe_objective(build_config())
    assert describe_objective(build_config(NOISY))["neftune_noise_alpha"] == "15"
