"""The optimizers of `optimizer=...`: how each is built, and which state it keeps for each parameter."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from data.components import TARGET, find_component
from errors import UserError
from training.config.schema import Offload, OptimizerName, RunConfig, StateDtype
from training.optim import adamw, lion
from training.optim.adamw import AdamW
from training.optim.chunks import count_buffer_bytes
from training.optim.elementwise_probe import probe_optimizer
from training.optim.elementwise_update import ElementwiseOptimizer
from training.optim.lion import Lion
from training.optim.parameter_groups import LORA_PLUS, find_lora_plus_ratio, group_parameters
from training.optim.state_kinds import DeclaredState, StateKind, StateTensor, check_state

Groups = list[dict[str, Any]]
LORA_PLUS_RATIO = "adapter.loraplus_lr_ratio"

ELEMENTWISE = StateTensor(StateKind.elementwise)
STEP = StateTensor(StateKind.scalar)
ROUNDED = StateTensor(StateKind.elementwise, torch.bfloat16)
COUNT = StateTensor(StateKind.number, None)
SCALES = StateTensor(StateKind.scales)


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer of the table.

    build: from parameter groups, which have their own learning rates and decays. declare: the state it keeps.
    num_buffers: fp32 buffers of one chunk that an update needs (training/optim/chunks.py) which is not compiled.
    build_compiled: as `build`, with an update in one kernel; None where there is none.
    """

    build: Callable[[Groups, RunConfig], torch.optim.Optimizer]
    declare: Callable[[RunConfig], DeclaredState]
    num_buffers: int = 0
    build_compiled: Callable[[Groups, RunConfig], ElementwiseOptimizer] | None = None


def build_optimizer(groups: Groups, config: RunConfig, has_triton: bool = False) -> torch.optim.Optimizer:
    """Build the run's optimizer over `groups`, as `group_parameters` returns them. has_triton: whether the run has a
    GPU, and can compile for it."""
    kind = _choose(config)
    if kind.build_compiled is not None and compiles_update(config, has_triton):
        return kind.build_compiled(groups, config)
    return kind.build(groups, config)


def compiles_update(config: RunConfig, has_triton: bool) -> bool:
    """Returns whether an update is one kernel, where the optimizer has a formula."""
    kind, on_host = _choose(config), config.offload_optimizer is Offload.cpu
    if kind.build_compiled is None or (kind.num_buffers == 0 and not updates_at_once(config, has_triton)):
        return False  # torch's own kernel serves as well, where it does not clip and round too
    return config.compile or (has_triton and not on_host)


def updates_at_once(config: RunConfig, has_triton: bool) -> bool:
    """Returns whether the kernel of an update also clips gradients, and rounds the weights to those of 16 bits. It
    cannot where DeepSpeed's ZeRO-3, or the copy from the host, comes between."""
    is_whole = config.offload_optimizer is not Offload.cpu and not config.shards_weights
    return _choose(config).build_compiled is not None and is_whole and (config.compile or has_triton)


def declare_state(config: RunConfig) -> DeclaredState:
    """Return the state that the run's optimizer keeps for each parameter. Raises UserError for a user's optimizer that
    ZeRO cannot run."""
    return _choose(config).declare(config)


def keeps_blocks(config: RunConfig) -> bool:
    """Returns whether the state is quantized in blocks whose elements share a scale."""
    return any(kept.kind is StateKind.blockwise for kept in declare_state(config).values())


def _choose(config: RunConfig) -> OptimizerKind:
    if config.optimizer.rounds_state:
        return ROUNDED_ADAMW
    return OPTIMIZERS[config.optimizer.name]


def count_update_buffers(config: RunConfig, num_elements: int, has_triton: bool) -> int:
    """Return the bytes of the temporary buffers in an update of `num_elements` elements."""
    return 0 if compiles_update(config, has_triton) else count_buffer_bytes(num_elements, _choose(config).num_buffers)


def count_state_bytes(config: RunConfig) -> float:
    """Return the bytes of optimizer state per trained parameter, without its fp32 weight."""
    return sum(kept.bytes_per_parameter for kept in declare_state(config).values())


def describe_optimizer(config: RunConfig) -> str:
    """Return the optimizer's name; for a user's, the path of its class."""
    optimizer = config.optimizer
    return optimizer.name.value if optimizer.name is not OptimizerName.custom else str(optimizer.custom[TARGET])


def describe_updates(config: RunConfig) -> dict[str, str]:
    """Return the settings that a run must keep, in addition to the optimizer, to continue with the same loss:
    name -> value. Its learning rate may change, and what LoRA+ multiplies with it."""
    entries = [[each.pattern, each.learning_rate, each.weight_decay] for each in config.parameter_groups]
    ratio = find_lora_plus_ratio(config)
    return (
        ({"parameter_groups": json.dumps(entries)} if entries else {})
        | ({} if ratio is None else {LORA_PLUS_RATIO: f"{ratio:g}"})
        | ({"optimizer.state_dtype": StateDtype.bf16.value} if config.optimizer.rounds_state else {})
    )


def recall_updates(saved: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return what a checkpoint says of the run that saved it in the form of `describe_updates`. Version 1.1 wrote
    LoRA+'s rate as an entry of `parameter_groups`; its ratio is not known, so the one of the current run is assumed."""
    entries = json.loads(saved.get("parameter_groups", "[]"))
    if not entries or entries[-1][0] != LORA_PLUS:
        return dict(saved)
    others = {name: value for name, value in saved.items() if name != "parameter_groups"}
    given = {"parameter_groups": json.dumps(entries[:-1])} if entries[:-1] else {}
    return others | given | {LORA_PLUS_RATIO: current.get(LORA_PLUS_RATIO, "another number")}


def check_optimizer(config: RunConfig) -> None:
    """Check the declared state of the run's optimizer against the state after one step on a matrix and a vector of two
    elements. Raises UserError when they differ."""
    weights = [torch.nn.Parameter(torch.zeros(2, 1)), torch.nn.Parameter(torch.zeros(2))]
    declared = declare_state(config)
    optimizer = build_optimizer(group_parameters([("", weight) for weight in weights], config), config)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight in weights:
        check_state(weight, optimizer.state[weight], declared)


def _build_adamw(groups: Groups, config: RunConfig) -> torch.optim.Optimizer:
    """torch's: its fused kernels run on a GPU and, when the state is offloaded, on the host; nothing is compiled on
    first use."""
    return torch.optim.AdamW(groups, betas=_betas(config), eps=config.optimizer.eps, fused=True)


def _build_adamw_8bit(groups: Groups, config: RunConfig) -> torch.optim.Optimizer:
    """bitsandbytes', without its exception for small tensors: ZeRO's flat partitions hold many tensors, so the state
    would depend on the layout."""
    from training.optim.adamw_8bit import AdamW8bit  # imported on use: it takes a second

    return AdamW8bit(groups, betas=_betas(config), eps=config.optimizer.eps, min_8bit_size=0)


def _build_table(signed: bool) -> torch.Tensor:
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=signed)


def _declare_adamw_8bit(config: RunConfig) -> DeclaredState:
    def codes(number: int) -> StateTensor:
        return StateTensor(StateKind.blockwise, torch.uint8, scales=f"absmax{number}", table=f"qmap{number}")

    def table(signed: bool) -> StateTensor:
        return StateTensor(StateKind.table, build_table=partial(_build_table, signed))

    tables = {"qmap1": table(signed=True), "qmap2": table(signed=False)}
    return {"state1": codes(1), "state2": codes(2), "absmax1": SCALES, "absmax2": SCALES, "step": COUNT} | tables


def _build_custom(groups: Groups, config: RunConfig) -> torch.optim.Optimizer:
    """The optimizer of `optimizer.custom`. Raises UserError when it is not an optimizer or does not take its fields."""
    optimizer = _make_custom(groups, config.optimizer.custom, config.learning_rate)
    decays = {group["weight_decay"] for group in groups} - {0.0}
    if "weight_decay" not in optimizer.defaults and decays:
        raise UserError(
            f"weight_decay={max(decays):g}: {describe_optimizer(config)} has none; give weight_decay=0, and none in "
            "parameter_groups"
        )
    return optimizer


def _make_custom(groups: Groups, spec: dict[str, Any], learning_rate: float) -> torch.optim.Optimizer:
    name, target = spec[TARGET], find_component(spec[TARGET], "optimizer.custom")
    arguments = {field: value for field, value in spec.items() if field != TARGET} | {"lr": learning_rate}
    try:
        inspect.signature(target).bind(groups, **arguments)
    except TypeError as error:
        raise UserError(
            f"optimizer.custom: {name} does not take these fields: {error}; it is called with parameter groups and "
            f"{sorted(arguments)}"
        ) from None
    optimizer = target(groups, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer.custom: {name} must be a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.Adagrad):  # 0.19.8, runtime/zero/stage_1_and_2.py: one group of all weights
        raise UserError(
            f"optimizer.custom: DeepSpeed makes {name} anew and drops its groups, so vectors would decay as matrices "
            "do; give another optimizer, such as torch.optim.RMSprop"
        )
    return optimizer


def _declare_custom(config: RunConfig) -> DeclaredState:
    spec = config.optimizer.custom
    if not isinstance(spec, dict) or TARGET not in spec:
        raise UserError(
            f"optimizer.custom={spec}: give a mapping, such as {{_target_: torch.optim.RAdam, betas: [0.9,0.95]}}"
        )
    for key in ("lr", "weight_decay"):
        if key in spec:
            own = "learning_rate" if key == "lr" else key
            raise UserError(f"optimizer.custom: {key} is the run's {own}; give {own}={spec[key]} instead")
    return _probe_custom(json.dumps(spec))


@lru_cache
def _probe_custom(spec: str) -> DeclaredState:
    """spec: as JSON. Cached, because a plan asks for it once for each layout."""
    fields = json.loads(spec)
    return probe_optimizer(partial(_make_custom, spec=fields, learning_rate=1.0), fields[TARGET])


def _build_own_adamw(
    groups: Groups, config: RunConfig, averages: torch.dtype = torch.float32, compiles: bool = True
) -> AdamW:
    return AdamW(
        groups, config.learning_rate, _betas(config), config.optimizer.eps, averages=averages, compiles=compiles
    )


def _build_lion(groups: Groups, config: RunConfig, compiles: bool = True) -> Lion:
    return Lion(groups, betas=_betas(config), compiles=compiles)


ROUNDED_ADAMW = OptimizerKind(
    partial(_build_own_adamw, averages=torch.bfloat16, compiles=False),
    lambda config: {"exp_avg": ROUNDED, "exp_avg_sq": ROUNDED, "step": COUNT},
    adamw.NUM_BUFFERS,
    partial(_build_own_adamw, averages=torch.bfloat16),
)
OPTIMIZERS: dict[OptimizerName, OptimizerKind] = {
    OptimizerName.adamw: OptimizerKind(
        _build_adamw,
        lambda config: {"exp_avg": ELEMENTWISE, "exp_avg_sq": ELEMENTWISE, "step": STEP},
        build_compiled=_build_own_adamw,
    ),
    OptimizerName.adamw_8bit: OptimizerKind(_build_adamw_8bit, _declare_adamw_8bit),
    OptimizerName.lion: OptimizerKind(
        partial(_build_lion, compiles=False), lambda config: {"exp_avg": ELEMENTWISE}, lion.NUM_BUFFERS, _build_lion
    ),
    OptimizerName.sgd: OptimizerKind(lambda groups, config: torch.optim.SGD(groups), lambda config: {}),
    OptimizerName.custom: OptimizerKind(_build_custom, _declare_custom),
}

_MOMENTS = ["optimizer.betas", "optimizer.eps"]
# The keys that each optimizer reads
OPTIMIZER_KEYS = {
    "adamw": [*_MOMENTS, "optimizer.state_dtype"],
    "adamw_8bit": _MOMENTS,
    "lion": ["optimizer.betas"],
    "custom": ["optimizer.custom"],
}


def _betas(config: RunConfig) -> tuple[float, float]:
    first, second = config.optimizer.betas
    return first, second
