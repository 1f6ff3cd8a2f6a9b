"""Steps of each optimizer through stages and replicas against its reference on the plain Hugging Face model.

The references are torch's optimizers, and bitsandbytes' for Lion. They see whole weights; here ZeRO gives each rank a
flat part. The epsilon of Adam is larger than usual: with a small one, Adam scales up gradients that are only rounding
noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.adapters import make_adapter, to_peft_weights
from support.cases import BOUND, ZERO_LAYOUTS, Case, merge, train_case, train_oracle, worst_difference
from support.combination_runs import round_averages
from support.tiny import VOCAB_SIZE, save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import get_linear_schedule_with_warmup

from training.engine import pipeline_engine
from training.optim.elementwise_update import ElementwiseOptimizer

STEPS = 4
LAYOUTS = {  # stages, ranks, tensor_parallel_size
    "pp2": (2, 2, 1),
    "dp2": (1, 2, 1),
    "tp2": (1, 2, 2),
    "pp2xdp2": (2, 4, 1),
    **{name: (*layout, 1) for name, layout in ZERO_LAYOUTS.items()},
    "dp4-zero2": (1, 4, 1),
    "dp4-zero3": (1, 4, 1),
}
BLOCKS = {**LAYOUTS, "pp2xdp2-zero2": (2, 4, 1)}  # where 8 bits are compared
DECAY = "weight_decay=0.1"
ADAMW = ("optimizer=adamw", "optimizer.eps=1e-2", "learning_rate=1e-2", DECAY)
Groups = list[dict]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("optimizers")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_llama(root / "odd", hidden_size=40, intermediate_size=76)  # weights are no multiples of a block
    save_tokenizer(root / "odd")
    save_llama(root / "odd tied", tied=True, hidden_size=40, intermediate_size=76, vocab_size=VOCAB_SIZE + 1)
    save_tokenizer(root / "odd tied")
    save_records(root / "train.jsonl", 40)
    return root


@pytest.fixture
def train(workers: Callable[[int], WorkerGroup], root: Path) -> Callable[..., tuple[Case, dict]]:
    """train(layout, *overrides): the case, and the results of all its ranks."""

    def run(
        layout: str, *overrides: str, model: str = "tiedFalse", function: Callable[[Case], dict] = train_case
    ) -> tuple[Case, dict]:
        num_stages, world_size, parallel = BLOCKS[layout]
        zero = (f"zero_stage={layout[-1]}", "micro_batch_size=1") if "zero" in layout else ()
        keys = (*zero, f"tensor_parallel_size={parallel}", "max_grad_norm=1.0", *overrides)
        case = Case(root / model, root / "train.jsonl", root, num_stages, world_size, STEPS, keys)
        return case, merge(workers(world_size).run(function, case))

    return run


def split_decayed(model: torch.nn.Module, weight_decay: float) -> Groups:
    """Matrices decay, vectors do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def by_adamw(groups: Groups, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-2)


def by_rounded_adamw(groups: Groups) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups, lr=2e-4, betas=(0.9, 0.95), eps=1e-2)
    optimizer.register_step_post_hook(round_averages)
    return optimizer


def by_lion(groups: Groups) -> torch.optim.Optimizer:
    optim = pytest.importorskip("bitsandbytes.optim")
    return optim.Lion32bit(groups, lr=1e-3, betas=(0.9, 0.99))


def by_radam(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.RAdam(groups, lr=1e-2, eps=1e-2)


def by_momentum(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


KINDS: dict[str, tuple[tuple[str, ...], Callable[[Groups], torch.optim.Optimizer]]] = {
    "adamw": (ADAMW, by_adamw),
    "adamw in bf16": ((*ADAMW, "learning_rate=2e-4", "optimizer.state_dtype=bf16"), by_rounded_adamw),
    "lion": (("optimizer=lion", "learning_rate=1e-3", DECAY), by_lion),
    "radam": (
        ("optimizer=custom", "+optimizer.custom={_target_: torch.optim.RAdam, eps: 0.01}", "learning_rate=1e-2", DECAY),
        by_radam,
    ),
    "momentum": (
        (
            "optimizer=custom",
            "+optimizer.custom={_target_: torch.optim.SGD, momentum: 0.9, nesterov: true}",
            "learning_rate=0.05",
            DECAY,
        ),
        by_momentum,
    ),
}
FAST = {("lion", "dp2")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in FAST else pytest.mark.full)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_steps_equal_the_reference(train, kind: str, layout: str) -> None:
    overrides, build = KINDS[kind]
    case, result = train(layout, *overrides)
    oracle = train_oracle(case, build_optimizer=lambda model: (build(split_decayed(model, 0.1)), None))
    compare(result, oracle)
    if "bf16" in kind:
        exact = train_oracle(case, build_optimizer=lambda model: (by_adamw(split_decayed(model, 0.1), 2e-4), None))
        assert worst_difference(oracle["weights"], exact["weights"])[0] > BOUND  # rounding would be seen


def train_at_once(case: Case) -> dict:
    """`train_case` as on a GPU, where the update is one kernel that also clips and rounds. Only the update is compiled,
    for the CPU."""
    update, at_once = ElementwiseOptimizer.update, []

    def note(*given: Any) -> None:
        at_once.append(given[-1] is not None)  # the copy
        update(*given)

    with patch.object(pipeline_engine, "has_triton", lambda: True), patch.object(ElementwiseOptimizer, "update", note):
        result = train_case(case)
    assert at_once and all(at_once)
    return result


AT_ONCE = {("adamw", "pp2xdp2"), ("lion", "tp2"), *((kind, "dp4-zero2") for kind in ("adamw", "adamw in bf16", "lion"))}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout"), sorted(AT_ONCE))
def test_steps_in_one_pass_equal_the_reference(train, kind: str, layout: str) -> None:
    overrides, build = KINDS[kind]
    case, result = train(layout, *overrides, "max_grad_norm=0.05", function=train_at_once)
    assert min(result["norms"]) > 0.05, "else nothing is clipped"
    compare(result, train_oracle(case, build_optimizer=lambda model: (build(split_decayed(model, 0.1)), None)))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("adamw in bf16", ("precision=bf16",)),
        pytest.param("adamw", ("precision=bf16",), marks=pytest.mark.full),
        pytest.param("lion", ("precision=bf16",), marks=pytest.mark.full),
        pytest.param("adamw", ("precision=bf16", "adapter=lora", "adapter.r=4"), marks=pytest.mark.full),
    ],
)
def test_a_step_in_one_pass_is_that_in_several(train, kind: str, keys: tuple[str, ...]) -> None:
    """In 16 bits, whose weights the pass rounds too; they may round either way where fp32 differs by its last bit."""
    given = (*KINDS[kind][0], "max_grad_norm=0.05", *keys)
    _, result = train("dp2", *given, function=train_at_once)
    _, expected = train("dp2", *given)
    assert min(expected["norms"]) > 0.05
    torch.testing.assert_close(result["norms"], expected["norms"], rtol=5e-3, atol=0)
    torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-3, atol=0)
    equal = [(result["weights"][name] == tensor).float().mean() for name, tensor in expected["weights"].items()]
    assert min(equal) > 0.9


def compare(result: dict, oracle: dict) -> None:
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


# The first pattern that matches counts; biases and norms decay where an entry sets weight_decay.
GROUPS = (
    ("embed_tokens|lm_head", 3e-3, 0.0),
    (r"layers\.[12]\.", None, 0.3),
    ("norm", 2e-2, 0.05),
    (r"layers\.\d+\.mlp", 5e-3, None),
)
LORA_GROUPS = (("lora_B", 4e-2, None), (r"layers\.0\.", None, 0.2))
SCHEDULED = ("lr_scheduler_type=linear", "min_lr_ratio=0", "warmup_steps=1", "warmup_ratio=null")


def write_groups(entries: tuple[tuple[str, float | None, float | None], ...]) -> str:
    keys = ("pattern", "learning_rate", "weight_decay")
    written = (
        ", ".join(
            f"{key}: '{value}'" if key == "pattern" else f"{key}: {value}"
            for key, value in zip(keys, entry, strict=True)
            if value is not None
        )
        for entry in entries
    )
    return f"parameter_groups=[{', '.join('{' + entry + '}' for entry in written)}]"


def build_grouped(
    model: torch.nn.Module, entries: tuple[tuple[str, float | None, float | None], ...]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """One group for each parameter, and the schedule of transformers."""
    groups = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.1 if parameter.ndim > 1 else 0.0
            entry = next((each for each in entries if re.search(each[0], name)), (None, None, None))
            groups.append(
                {
                    "params": [parameter],
                    "lr": 1e-2 if entry[1] is None else entry[1],
                    "weight_decay": decay if entry[2] is None else entry[2],
                }
            )
    optimizer = by_adamw(groups)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    schedule.step()  # transformers' first step has a rate of 0
    return optimizer, schedule


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(layout, tied, marks=() if (layout, tied) == ("pp2", True) else pytest.mark.full)
        for layout in LAYOUTS
        for tied in (False, True)
    ],
)
def test_groups_have_rates_and_decays_of_their_own(train, layout: str, tied: bool) -> None:
    case, result = train(layout, *ADAMW, *SCHEDULED, write_groups(GROUPS), model=f"tied{tied}")
    oracle = train_oracle(case, build_optimizer=partial(build_grouped, entries=GROUPS))
    compare(result, oracle)
    alike = train_oracle(case, build_optimizer=partial(build_grouped, entries=()))
    assert worst_difference(oracle["weights"], alike["weights"])[0] > 1e-2  # the groups do something


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_an_adapter(train, root: Path, tmp_path: Path, layout: str) -> None:
    model = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    adapter = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter")
    case, result = train(layout, *ADAMW, *SCHEDULED, *adapter, write_groups(LORA_GROUPS))
    oracle = train_oracle(case, model, partial(build_grouped, entries=LORA_GROUPS))
    worst, name = worst_difference(*to_peft_weights(result, oracle, model.config))
    assert worst < BOUND, name


class FlatAdamW8bit:
    """bitsandbytes' optimizer in one process, on the blocks of an engine: the concatenated weights of each stage and
    group, split into one part per replica."""

    def __init__(self, stages: list[Groups], num_replicas: int) -> None:
        optim = pytest.importorskip("bitsandbytes.optim")
        self._groups = [group for groups in stages for group in groups if group["params"]]
        self._num_replicas = num_replicas
        self._flats = [self._cut([p.detach() for p in group["params"]]) for group in self._groups]
        self._inner = optim.AdamW8bit(
            [
                {"params": [torch.nn.Parameter(part) for part in parts], "weight_decay": group["weight_decay"]}
                for group, parts in zip(self._groups, self._flats, strict=True)
            ],
            lr=LR_8BIT, betas=(0.9, 0.95), eps=1e-2, min_8bit_size=0,
        )  # fmt: skip

    def _cut(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        size = -(-flat.numel() // (2 * self._num_replicas)) * 2  # DeepSpeed aligns parts to two numbers
        padded = torch.zeros(size * self._num_replicas)
        padded[: flat.numel()] = flat
        return [part.clone() for part in padded.split(size)]

    def zero_grad(self) -> None:
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group, inner in zip(self._groups, self._inner.param_groups, strict=True):
            for part, gradient in zip(inner["params"], self._cut([p.grad for p in group["params"]]), strict=True):
                part.grad = gradient
        self._inner.step()
        for group, inner in zip(self._groups, self._inner.param_groups, strict=True):
            flat, start = torch.cat([part.detach() for part in inner["params"]]), 0
            for parameter in group["params"]:
                parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()


LR_8BIT = 5e-5


def split_stages(model: torch.nn.Module, bounds: list[int]) -> list[Groups]:
    """The groups of each stage: the embedding is layer 0, the norm and the head are the last two."""
    num_layers = model.config.num_hidden_layers
    stages: list[Groups] = [
        [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}] for _ in bounds[1:]
    ]
    for name, parameter in model.named_parameters():
        number = re.search(r"layers\.(\d+)\.", name)
        index = int(number[1]) + 1 if number else {"embed": 0, "norm": num_layers + 1}.get(name[6:11].strip("."), -1)
        layer = index if index >= 0 else num_layers + 2
        stage = next(stage for stage, stop in enumerate(bounds[1:]) if layer < stop)
        stages[stage][parameter.ndim <= 1]["params"].append(parameter)
    return stages


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("dp2", "pp2xdp2", "zero2", "pp2xdp2-zero2"))],
)
def test_8_bits_equal_the_same_blocks_in_one_process(train, layout: str) -> None:
    keys = ("optimizer=adamw_8bit", "optimizer.eps=1e-2", f"learning_rate={LR_8BIT}", DECAY)
    case, result = train(layout, *keys, model="odd")
    num_replicas = case.world_size // case.num_stages
    oracle = train_oracle(
        case, build_optimizer=lambda model: (FlatAdamW8bit(split_stages(model, result["bounds"]), num_replicas), None)
    )
    compare(result, oracle)
    exact = train_oracle(case, build_optimizer=lambda model: (by_adamw(split_decayed(model, 0.1), LR_8BIT), None))
    assert worst_difference(oracle["weights"], exact["weights"])[0] > 2 * BOUND  # what 8 bits do would be seen


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2xdp2"])  # its stages split their parts at different points
def test_8_bits_leave_both_copies_of_a_tied_weight_alike(workers, root: Path, layout: str) -> None:
    """Their blocks hold nothing else: with other elements in them each stage would round them differently."""
    num_stages, world_size, _ = LAYOUTS[layout]
    keys = ("optimizer=adamw_8bit", "optimizer.eps=1e-2", "learning_rate=1e-2", DECAY)
    case = Case(root / "odd tied", root / "train.jsonl", root, num_stages, world_size, STEPS, keys)
    first, *others = (copy for copies in workers(world_size).run(train_tied, case) for copy in copies)
    assert len(others) == world_size - 1 and all(torch.equal(first, other) for other in others)


def train_tied(case: Case) -> list[torch.Tensor]:
    """This rank's part of tied weights after the run."""
    from support.cases import build_engine

    engine, loader, *_ = build_engine(case)
    micro_batches = loader.iterate(0, case.steps)
    for step in range(case.steps):
        engine.train_step(micro_batches, step, case.steps)
    return [weight.detach().clone() for weight, _ in engine.module.get_tied_weights_and_groups()]
