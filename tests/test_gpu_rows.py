"""The rows of `make gpu` against the table of keys: whatever a key may make a GPU do differently has a row of *right*,
or a reason here why it has none; and the rows' time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest

from benchmarks.gpu import _MINUTES
from benchmarks.gpu_parts.cases import CASES, FA3, SHARED, Case
from benchmarks.gpu_parts.fast import _FITTING, Fast
from benchmarks.gpu_parts.fast import CASES as SPEED_CASES
from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.measured_runs import MeasuredRuns
from benchmarks.gpu_parts.processes import Deadline
from benchmarks.gpu_parts.rows import NotRun, check_needs
from benchmarks.gpu_parts.shapes import find_shape
from training.config.key_table import GROUP_SECTION, list_keys, list_types
from training.config.schema import CONF
from training.objectives.registry import OBJECTIVES
from training.pipeline.schedules import SCHEDULES

# The sections of conf/base.yaml, and the groups, whose keys change what is computed
SECTIONS = (
    "Task and objectives",
    "Parallelism and batch",
    "Loss, learning rate and optimizer",
    "Memory and numerics",
    GROUP_SECTION.format("optimizer"),
    GROUP_SECTION.format("adapter"),
)
# Keys whose values are names in a table of the sources
NAMED = {
    "task": tuple(OBJECTIVES),
    "schedule": tuple(SCHEDULES),
    "zero_stage": ("1", "2", "3"),
    "optimizer": tuple(file.stem for file in (CONF / "optimizer").glob("*.yaml")),
    "adapter": tuple(file.stem for file in (CONF / "adapter").glob("*.yaml")),
}
DEFAULTS = {"task": "sft", "optimizer": "adamw", "adapter": "none"}
# Of each reason: what has no row for it
WITHOUT_ROW = {
    "numbers that the host computes before a step, or hands to an optimizer as they are": (
        "global_batch_size", "gradient_accumulation_steps", "max_seq_length", "num_workers", "seed", "weight_decay",
        "lr_scheduler_kwargs", "lr_scheduler_type=cosine_with_restarts", "lr_scheduler_type=linear",
        "lr_scheduler_type=polynomial", "lr_scheduler_type=wsd", "min_lr_ratio", "warmup_steps", "parameter_groups",
        "num_train_epochs", "stop_after_steps", "skip_data_intervals", "optimizer.betas",
    ),
    "which layers a stage has, and how far passes run ahead: the kernels are those of pp2": (
        "partition_method", "virtual_stages_per_rank", "schedule_memory_limit",
    ),
    "the passes and log-probabilities are those of dpo; the formula is a few numbers per pair": (
        "task=orpo", "task=simpo", "task=cpo", "label_smoothing",
    ),
    "the head and the positions are those of reward; the loss is a few numbers per document": (
        "task=classification", "task=token_classification", "task=process_reward", "task=rerank",
    ),
    "hidden states and passes are those of other rows and of evaluations; the loss is a few products of vectors": (
        "task=embedding",
    ),
    "plain tokens, as in sft; rows are packed as in the packed rows": ("task=pretrain",),
    "random numbers, which differ between a GPU and its oracle": (
        "neftune_noise_alpha", "adapter.lora_dropout",
    ),
    "each sign of a rounding error is a whole step: no bound tells right from wrong in another order of sums": (
        "optimizer=lion",
    ),
    "the user's own code": ("loss", "optimizer=custom", "optimizer.custom"),
    "the routers' losses are sums over a few numbers per token, from logits that the rows of experts have": ("moe",),
    "decoder layers and the loss once more, and the sums of tied weights": ("mtp",),
    "what a run does at a value that is not finite, which these runs have none of": ("on_nonfinite=skip",),
    "LoRA's own kernels are those of the LoRA rows: other numbers, targets or start": (
        "adapter.r", "adapter.lora_alpha", "adapter.target_modules", "adapter.use_dora=true",
        "adapter.target_parameters", "adapter.modules_to_save", "adapter.use_rslora=true", "adapter.name_or_path",
        "adapter.init_lora_weights", "adapter.loraplus_lr_ratio",
    ),
    "the products are those of LoRA on experts in 4 bits; weights are dequantized by torch's own operators": (
        "adapter.keep_quantized=true",
    ),
    "the same sums with other rounding": ("gradient_reduce_dtype=bf16",),
    "needs flash-attention's own build for this GPU": ("attn_implementation=flash_attention_3",),
    "what auto takes on a GPU": ("attn_implementation=varlen",),
    "whole scores, by matrix products alone": ("attn_implementation=eager",),
}  # fmt: skip
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", ("0",), 85_000_000_000, {})
H200 = Machine("cuda", "NVIDIA H200", ("0",), 150_000_000_000, {})


@cache
def find_features() -> frozenset[str]:
    """Returns `key=value` for each value but the default of a key that is a choice, and the key alone for others; of a
    section with keys of its own the section."""
    return frozenset(list_features())


def list_features() -> Iterator[str]:
    types, known = list_types(), list_keys()
    for key, values in NAMED.items():
        default = DEFAULTS.get(key) or known[key].default
        yield from (f"{key}={value}" for value in values if value != default)
    for key in known.values():
        parent = key.name.partition(".")[0]
        is_part = parent != key.name and parent in known
        if not key.section.startswith(SECTIONS) or key.name in NAMED or is_part:
            continue
        choices = list(list_choices(types.get(key.name)))
        yield from (f"{key.name}={value}" for value in choices if value != key.default)
        if not choices:
            yield key.name


def list_choices(hint: Any) -> Iterator[str]:
    """Yields what a key may be, where that is a choice."""
    if hint is bool:
        yield from ("true", "false")
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(member.value) for member in hint)
    else:
        for part in get_args(hint):
            if part is not NoneType:
                yield from list_choices(part)


def list_covered(cases: tuple[Case, ...]) -> set[str]:
    """Returns `key=value` and `key` of whatever a row sets."""
    given = {*SHARED, *(word for case in cases for word in case.list_keys())}
    return given | {word.partition("=")[0] for word in given}


def test_every_feature_has_a_row_or_a_reason() -> None:
    features, covered = find_features(), list_covered(CASES)
    exempt = [feature for group in WITHOUT_ROW.values() for feature in group]
    assert features - covered - set(exempt) == set()
    assert len(exempt) == len(set(exempt))
    assert set(exempt) - features == set(), "reasons for what is no feature"
    assert set(exempt) & covered == set(), "reasons for what has a row"


FIRST = (
    "schedule=zero_bubble", "context_parallel_mode=ulysses", "context_parallel_mode=ring", "sequence_parallel=true",
    "expert_parallel_size", "zero_stage=2", "zero_stage=3", "sharding_parallel_size", "activation_offload=true",
    "fused_kernels=auto", "optimizer=adamw_8bit", "optimizer.state_dtype=bf16", "task=kto", "task=reward",
)  # fmt: skip


@pytest.mark.parametrize("feature", FIRST)
def test_a_row_that_is_left_out_is_missed(feature: str) -> None:
    rest = tuple(case for case in CASES if not any(feature in (key, key.split("=")[0]) for key in case.list_keys()))
    assert len(rest) < len(CASES) and feature in find_features() - list_covered(rest)


def test_what_no_gpu_has_run_comes_first() -> None:
    """A part that runs out of time has then run it."""
    names = [case.name for case in CASES]
    seen = read_seen() & {*names}
    assert seen
    assert {*names[-len(seen) :]} == seen


def read_seen() -> set[str]:
    """The rows that a report of a GPU calls right."""
    lines = [
        line for file in CONF.parent.glob("benchmarks/results/*/report.md") for line in file.read_text().splitlines()
    ]
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {name for name, *rest in cells if "OK" in rest}


def test_a_mixture_of_experts_has_a_row() -> None:
    assert {case.precision for case in CASES if case.model == "mixtral"} == {"fp32", "bf16"}


@pytest.mark.parametrize(("capability", "needed"), [("", True), ("8.0", True), ("9.0", False), ("10.0", True)])
def test_rows_of_hopper_kernels_are_left_out_elsewhere(
    capability: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu_parts.rows.is_installed", lambda _: True)
    machine = dataclasses.replace(H100, capability=capability)
    for case in (case for case in CASES if FA3 in case.overrides):
        with pytest.raises(NotRun, match=r"^needs a GPU of compute capability 9\.0$") if needed else nullcontext():
            check_needs(case.needs, machine)


def test_rows_that_compile_are_left_out_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.layers.fused_kernels.find_triton_obstacle", lambda: "triton needs a C compiler")
    for case in (case for case in (*CASES, *SPEED_CASES) if "compile=true" in case.overrides):
        with pytest.raises(NotRun, match="^triton needs a C compiler$"):
            check_needs(case.needs, H100)


def test_fast_fits_its_time() -> None:
    """Each of its rows runs on a machine with two GPUs and all packages."""
    rows = Fast(H200, Path(), Path(), tiny=False).list_rows()
    assert sum(row.expected for row in rows) <= _MINUTES["cuda"] * 60


def test_all_of_8b_is_given_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan: 8B with fp32 states on neither, in 8 bits on the larger one."""
    from benchmarks.gpu_parts.material import save_tokenizer
    from benchmarks.workload import build_llama

    (case,) = (case for case in SPEED_CASES if case.name == "8b full")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 1024 * 2**30}))
    chosen = {}
    for machine in (H100, H200):
        runs = MeasuredRuns(machine, tmp_path, tmp_path / "logs", tiny=False)
        folder = tmp_path / "models" / "8b"
        build_llama(**find_shape("8b", False, runs.seq_length)).save_pretrained(folder)
        save_tokenizer(folder)
        runs.prepare_records(packed=False)
        chosen[machine.name] = runs.choose_fitting("8b", case.overrides, case.choices, Deadline(60), 1)
    assert chosen[H100.name] == ("offload_optimizer=cpu",)
    assert chosen[H200.name] in _FITTING[:3]
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 8 * 2**30}))
    with pytest.raises(NotRun, match="too large for this machine by the plan"):
        MeasuredRuns(H100, tmp_path, tmp_path / "logs", tiny=False).choose_fitting(
            "8b", case.overrides, case.choices, Deadline(60), 1
        )
