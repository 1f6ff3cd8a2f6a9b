"""Runs that are saved at one layout and continue at another: layouts, models, and what must be equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import CONTEXT_PARALLEL, Case, train_run
from support.families import save_family
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

LAYOUTS = {"pp1": (1, 1), "pp2": (2, 2), "pp4": (4, 4), "pp1xdp2": (1, 2), "pp2xdp2": (2, 4)}  # stages, ranks
TENSOR_PARALLEL = {"tp2": (1, 2), "tp2xpp2": (2, 4)}  # each layer on two ranks
SHARDED = {f"stage{stage}xdp{ranks}": (1, ranks) for stage in (2, 3) for ranks in (2, 4)}  # zero_stage
SHARDED["stage2xpp2xdp2"] = (2, 4)
SHARDED |= {"stage1xdp4 by 2": (1, 4), "stage2xdp4 by 2": (1, 4)}  # sharding_parallel_size
STEPS_BEFORE, STEPS_AFTER = 2, 5
BOUND = 1e-5  # relative, fp32
IN_RING = {f"{layout} in a ring": sizes for layout, sizes in CONTEXT_PARALLEL.items()}  # context_parallel_mode=ring
IN_PARTS = {"tp2 in parts": (1, 2), "tp2xpp2 in parts": (2, 4)}  # sequence_parallel=true
# with expert_parallel_size=2 or 4, and where the name says so other keys; in "ep2xdp2" experts have two replicas
EXPERT_PARALLEL = {"ep2": (1, 2), "ep2xpp2": (2, 4), "ep2xcp2": (1, 2), "ep2xtp2": (1, 4), "stage2xep2": (1, 2)}
EXPERT_PARALLEL |= {"ep4": (1, 4), "ep2xdp2": (1, 4), "stage2xep2xdp2": (1, 4)}
ALL_LAYOUTS = LAYOUTS | TENSOR_PARALLEL | IN_PARTS | CONTEXT_PARALLEL | IN_RING | SHARDED | EXPERT_PARALLEL
# At 1e-2 whole runs at two layouts already differ by 7e-5 after seven steps: B starts at zero, and Adam makes steps of
# the noise in A's gradient.
LORA = ("adapter=lora", "adapter.r=4", "learning_rate=1e-3")
# None of these parameters is on every stage
GROUPS = ("parameter_groups=[{pattern: embed, learning_rate: 3e-3}, {pattern: 'layers[.][34]', weight_decay: 0}]",)
STATE_IN_BF16 = "optimizer.state_dtype=bf16"
RADAM = "+optimizer.custom={_target_: torch.optim.RAdam, betas: [0.9, 0.95]}"
OPTIMIZERS = {
    "adamw in bf16": ("tiedTrue", (STATE_IN_BF16,)),
    "lion": ("tiedTrue", ("optimizer=lion", "learning_rate=1e-4")),
    "radam": ("tiedTrue", ("optimizer=custom", RADAM)),
}
KINDS = {
    "untied": ("tiedFalse", ()),
    "tied": ("tiedTrue", ()),
    "lora": ("tiedFalse", LORA),
    "tied lora": ("tiedTrue", LORA),
    "groups": ("tiedTrue", GROUPS),
}  # model, overrides
EXPERTS = {"lora on experts": ("deepseek_v3", LORA), "experts": ("deepseek_v3", ()), "gpt_oss": ("gpt_oss", ())}
INDEXED = {"an indexer": ("glm_moe_dsa", ()), "an indexer in each layer": ("deepseek_v32", ())}
ROUNDED = {"experts in bf16": ("deepseek_v3", (STATE_IN_BF16,))}


@pytest.fixture(scope="module")
def layout_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    for family in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss"):
        save_tokenizer(save_family(root / family, family))
    save_records(root / "train.jsonl", 40)
    return root


@pytest.fixture(scope="module")
def run_at(workers: Callable[[int], WorkerGroup], layout_root: Path) -> Callable[..., Path]:
    """run_at(name, layout, model, *overrides): its output_dir. The same run is not repeated."""
    done: dict[str, Path] = {}

    def start(name: str, layout: str, model: str, *overrides: str) -> Path:
        if name not in done:
            done[name] = layout_root / name
            num_stages, world_size = ALL_LAYOUTS[layout]
            defaults = (
                f"tensor_parallel_size={2 if 'tp2' in layout else 1}",
                f"expert_parallel_size={divide_experts(layout)}",
                f"sequence_parallel={str(layout in IN_PARTS).lower()}",
                f"context_parallel_size={2 if 'cp2' in layout else 1}",
                f"context_parallel_mode={'ring' if layout in IN_RING else 'auto'}",
                f"zero_stage={layout[len('stage')] if layout.startswith('stage') else 1}",
                f"sharding_parallel_size={2 if layout.endswith('by 2') else 'null'}",
                f"output_dir={layout_root / name}",
                "optimizer=adamw",
                "learning_rate=1e-3",
                "weight_decay=0.1",
                "max_grad_norm=1.0",
                "lr_scheduler_type=cosine",
                "warmup_ratio=0.2",
                "logging_steps=1",
                f"save_steps={STEPS_BEFORE}",
            )
            steps = STEPS_BEFORE + STEPS_AFTER
            case = Case(
                layout_root / model,
                layout_root / "train.jsonl",
                layout_root,
                num_stages,
                world_size,
                steps,
                (*defaults, *overrides),
            )
            workers(world_size).run(train_run, case)
        return done[name]

    return start


def divide_experts(layout: str) -> int:
    """The expert_parallel_size of a layout."""
    return (4 if "ep4" in layout else 2) if layout in EXPERT_PARALLEL else 1


def read_steps(output_dir: Path, first: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step from `first` on."""
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if record["step"] >= first]


def check_continues(run_at: Callable[..., Path], saved: str, resumed: str, kind: str) -> None:
    model, overrides = (KINDS | OPTIMIZERS | EXPERTS | INDEXED | ROUNDED)[kind]
    whole = run_at(f"{saved}-{kind}-whole", saved, model, *overrides)
    begun = whole / "checkpoints" / f"global_step{STEPS_BEFORE}"
    ended = run_at(f"{saved}-{kind}-at-{resumed}", resumed, model, *overrides, f"resume={begun}")
    expected, found = read_steps(whole, STEPS_BEFORE + 1), read_steps(ended, 1)
    assert len(found) == STEPS_AFTER  # it started where the other was saved
    for step, (a, b) in enumerate(zip(found, expected, strict=True), start=STEPS_BEFORE + 1):
        assert a == pytest.approx(b, rel=BOUND), f"step {step}"
