"""One key changed at a time, and the direction that each figure of the plan takes.

A row of `CHANGES` is the keys before, the keys that are added to them, and what becomes of the figures that are named:
"<" and ">" strictly, "<=" and ">=" within rounding, "=" the same, a number that many times, and a range of factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.configs import build_config

from training.disk_space import count_disk_bytes
from training.plan_command import run
from training.planner.plan import Plan

LINES = 6400
BASE = (
    "model=llama_8b", "model.num_hidden_layers=8", "model_name_or_path=none", "plan=true", "world_size=8",
    "hardware=h100", "hardware.price_per_hour=2", "num_stages=2", "max_seq_length=2048", "micro_batch_size=1",
    "global_batch_size=64", "activation_checkpoint_interval=0", "keep_last=2", "save_steps=10",
    "num_train_epochs=1", "learning_rate=1e-5", "warmup_ratio=0", "eval_file=null",
)  # fmt: skip
ONE_STAGE = ("num_stages=1",)
RECOMPUTED = ("activation_checkpoint_interval=1",)
SELECTIVE = (*RECOMPUTED, "activation_checkpoint_mode=selective")
SHARDED = (*ONE_STAGE, "zero_stage=3", *RECOMPUTED)
PAIRS = ("data=preference", "task=orpo")
EXPERTS = (
    "model=mixtral_8x7b", "model.num_hidden_layers=2", "model.hidden_size=1024", "model.intermediate_size=2048",
    *ONE_STAGE, *RECOMPUTED, "expert_parallel_size=4",
)  # fmt: skip
TAUGHT = ("+model@distill.model=llama_8b", "distill.teacher=teacher", "distill.model.num_hidden_layers=2")
EVALUATED = ("eval_file=eval.jsonl", "eval_steps=10")


def freeze(*numbers: int) -> str:
    return f"freeze=[embed_tokens,'layers\\.({'|'.join(map(str, numbers))})\\.']"


Direction = str | float | tuple[float, float]
Keys = tuple[str, ...] | str
NO_OTHER = {"gpu": "=", "host": "=", "disk": "="}
CHANGES: list[tuple[Keys, Keys, dict[str, Direction]]] = [
    # what is trained
    ((), freeze(0, 1), {"step": "<=", "gpu": "<", "disk": "<", "host": "="}),
    (freeze(0, 1), freeze(0, 1, 2, 3), {"step": "<=", "gpu": "<=", "disk": "<"}),
    (ONE_STAGE, freeze(0, 1, 2, 3), {"step": (0.5, 0.8), "gpu": "<", "disk": "<"}),
    ((*ONE_STAGE, *RECOMPUTED), freeze(0, 1, 2, 3), {"step": (0.4, 0.7), "gpu": "<", "disk": "<"}),
    ((*ONE_STAGE, *RECOMPUTED), freeze(0, 2, 4, 6), {"step": "<", "gpu": "<", "disk": "<"}),
    ((*ONE_STAGE, freeze(0, 1, 2, 3)), freeze(4, 5, 6, 7), {"step": ">"}),  # as many, above the others
    ((), "adapter=lora", {"step": "<", "gpu": "<", "disk": "<"}),
    ("adapter=lora", "adapter.load_in_4bit=true", {"step": ">", "gpu": "<", "disk": "="}),
    ("adapter=lora", "adapter.r=64", {"step": ">=", "gpu": ">", "disk": ">"}),
    # recomputation: less memory, more time, from step to step
    ((), SELECTIVE, {"step": ">", "gpu": "<", "host": "=", "disk": "="}),
    (SELECTIVE, "activation_checkpoint_mode=grouped", {"gpu": "<"}),
    ((*SELECTIVE, "compile=true"), "activation_checkpoint_mode=grouped", {"step": ">", "gpu": "<"}),
    (SELECTIVE, "compile=true", {"step": "<"}),  # eager, the host is slow to run every operator under two modes
    ((), ("activation_checkpoint_interval=4", "activation_checkpoint_mode=every"), {"step": ">", "gpu": "<"}),
    (RECOMPUTED, "activation_checkpoint_interval=2", {"step": (1, 1.05), "host": "="}),  # it stops early less often
    ("attn_implementation=eager", SELECTIVE, {"step": ">", "gpu": "<"}),
    (("attn_implementation=eager", *SELECTIVE), "activation_checkpoint_mode=grouped", {"step": ">", "gpu": "<"}),
    # experts
    (EXPERTS, "moe.imbalance=2", {"step": (1, 2), "gpu": ">=", "host": "=", "disk": "="}),
    (EXPERTS, "moe.imbalance=4", {"step": (1, 4), "gpu": ">="}),
    ((*EXPERTS, "moe.imbalance=2"), "moe.imbalance=4", {"step": (1, 2), "gpu": ">="}),
    ((*EXPERTS, *SELECTIVE), "moe.imbalance=4", {"step": (1, 4), "gpu": ">="}),
    (EXPERTS, "expert_parallel_size=8", {"gpu": "<"}),
    # the whole run
    ((), f"data.max_samples={LINES // 2}", {"run": 0.5, "price": 0.5, "step": "=", **NO_OTHER}),
    ((), "data.eval_fraction=0.5", {"run": 0.5, "price": 0.5, "step": "=", **NO_OTHER}),
    ((), f"data.eval_samples={LINES // 4}", {"run": 0.75, "price": 0.75}),
    ((), "num_train_epochs=2", {"run": 2, "price": 2}),
    ((), f"stop_after_steps={LINES // 64 // 4}", {"run": 0.25, "price": 0.25}),
    ((), "stop_after_steps=100000", {"run": "=", "price": "="}),
    ((), "skip_data_intervals=[[1,30],[21,50]]", {"run": 0.5, "price": 0.5}),
    ((), "max_steps=25", {"run": 0.25, "price": 0.25}),
    ((), "hardware.price_per_hour=4", {"run": "=", "price": 2}),
    ((), "world_size=16", {"step": "<", "run": "<", "price": ">="}),
    (PAIRS, "task=dpo", {"step": "=", "run": (1.1, 1.6), "price": (1.1, 1.6)}),
    ((*PAIRS, "task=dpo"), "max_steps=200", {"run": (1.5, 2)}),  # the reference's scores are computed once
    (PAIRS, f"data.max_samples={LINES // 2}", {"run": 0.5}),
    ((*PAIRS, "task=dpo"), f"data.max_samples={LINES // 2}", {"run": (0.5, 0.51)}),
    ((), (*TAUGHT, "distill.top_k=16"), {"step": "=", "run": (1.03, 1.3), "price": (1.03, 1.3)}),
    ((), (*TAUGHT, "distill.online=true"), {"step": ">", "run": ">", "gpu": ">"}),
    # the layout
    ((), "global_batch_size=128", {"bubble": "<", "idle": "<", "step": (1, 2), "gpu": "=", "run": "<"}),
    ((), "num_stages=4", {"bubble": ">", "gpu": "<"}),
    ((), "schedule=interleaved", {"bubble": "<", "step": "<", "gpu": ">"}),
    ((), "micro_batch_size=2", {"bubble": ">", "gpu": ">"}),
    ((), "max_seq_length=4096", {"step": (1.5, 3), "gpu": ">", "run": (1.5, 3)}),
    (ONE_STAGE, ("tensor_parallel_size=2",), {"gpu": "<"}),
    (ONE_STAGE, "context_parallel_size=2", {"gpu": "<"}),
    ((*ONE_STAGE, *RECOMPUTED), "zero_stage=2", {"gpu": "<=", "step": ">=", "disk": "="}),
    ((*ONE_STAGE, *RECOMPUTED, "zero_stage=2"), "zero_stage=3", {"gpu": "<=", "disk": "="}),
    # where state is, and what it is
    ((), "offload_optimizer=cpu", {"gpu": "<", "host": ">", "step": ">", "disk": "="}),
    (RECOMPUTED, "activation_offload=true", {"gpu": "<", "host": ">", "step": ">="}),
    (SHARDED, "offload_parameters=cpu", {"gpu": "<", "host": ">", "step": ">="}),
    ((), "optimizer.state_dtype=bf16", {"gpu": "<", "step": "<", "disk": "<"}),
    ("offload_optimizer=cpu", "optimizer.state_dtype=bf16", {"host": "<", "step": ">", "disk": "<"}),  # many operators
    ((), "optimizer=adamw_8bit", {"gpu": "<", "step": ">=", "disk": "<"}),  # its kernel neither clips nor rounds
    ((), "precision=fp32", {"step": ">", "gpu": ">"}),
    ((), "gradient_reduce_dtype=bf16", {"step": "<="}),
    ((), "attn_implementation=eager", {"step": ">", "gpu": ">"}),
    ((), "compile=true", {"step": "<"}),
    # the disk
    ((), "keep_last=3", {"disk": ">", "gpu": "=", "step": "="}),
    ((), "export_steps=[10,20]", {"disk": ">"}),
    ("export_steps=[10,20]", "export_steps=[10,20,30]", {"disk": ">"}),
    ("hub.repo_id=me/it", "hub.every=20", {"disk": ">"}),
    ((), "save_weights_only=true", {"disk": "<"}),
    (EVALUATED, "keep_best=1", {"disk": ">"}),
    (EVALUATED, "load_best_model_at_end=true", {"disk": ">"}),
    (("save_steps=null", "keep_last=null"), "export_steps=[10]", {"disk": ">"}),
    # the machine
    ((), "hardware.efficiency=0.9", {"step": "<", **NO_OTHER}),
    ((), "hardware.memory_bandwidth=10000", {"step": "<", **NO_OTHER}),
    ((), "hardware.intra_node_bandwidth=10000", {"step": "<", **NO_OTHER}),
    (SELECTIVE, "hardware.memory_bandwidth=10000", {"step": "<", **NO_OTHER}),
    ("offload_optimizer=cpu", "hardware.host_link_bandwidth=1000", {"step": "<", **NO_OTHER}),
]  # fmt: skip


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], dict[str, float]]:
    """Returns what the report of a plan is made from, by keys."""
    folder, known = tmp_path_factory.mktemp("directions"), dict[tuple[str, ...], dict[str, float]]()
    (folder / "train.jsonl").write_text("{}\n" * LINES)
    given = (*BASE, f"train_file={folder}/train.jsonl", f"output_dir={folder}/out")

    def read(keys: tuple[str, ...]) -> dict[str, float]:
        if keys not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run, "save_picture", lambda plan, config: "")
                patch.setattr(run, "advise", lambda *_: [])
                patch.setattr(run, "render_plan", lambda *shown, **also: known.update({keys: measure(*shown, **also)}))
                [*run.plan_run(build_config(*given, *keys))]
        return known[keys]

    return read


def measure(plan: Plan, steps: int, earlier: dict[str, float], **also: Any) -> dict[str, float]:
    seconds = steps * plan.step_seconds + sum(earlier.values())
    price, disk = plan.price(seconds), count_disk_bytes(plan.run.config, plan.checkpoint)
    assert price is not None and disk is not None
    return {
        "step": plan.step_seconds,
        "gpu": plan.fullest.memory.peak,
        "host": plan.host_bytes,
        "bubble": plan.schedule.bubble_share,
        "idle": plan.idle,
        "disk": disk,
        "run": seconds,
        "price": price,
    }


@pytest.mark.parametrize(("before", "change", "directions"), CHANGES, ids=[f"{row[0]} {row[1]}" for row in CHANGES])
def test_a_key_changes_each_figure_in_its_direction(
    before: Keys,
    change: Keys,
    directions: dict[str, Direction],
    figures: Callable[[tuple[str, ...]], dict[str, float]],
) -> None:
    keys = (before,) if isinstance(before, str) else before
    changed = figures((*keys, *((change,) if isinstance(change, str) else change)))
    for name, direction in directions.items():
        was, now = figures(keys)[name], changed[name]
        assert goes(direction, was, now), f"{name}: {was} before, {now} after, which is not {direction}"


def goes(direction: Direction, before: float, after: float) -> bool:
    if isinstance(direction, tuple):
        return direction[0] * before < after <= direction[1] * before
    if isinstance(direction, int | float):
        return after == pytest.approx(direction * before, rel=0.01)
    near = after == pytest.approx(before, rel=1e-6)
    return {"<": after < before, "<=": near or after < before, "=": near, ">=": near or after > before}.get(
        direction, after > before
    )
