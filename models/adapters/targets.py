"""Which parts of a model's layers get adapters: its projections, the stacked experts of a mixture and its routers.

Names are matched as in peft: a target is the end of a name, after a dot. `target_modules` are projections,
`target_parameters` the experts' stacked parameters ("mlp.experts.gate_up_proj") and the weights of other modules
("mlp.gate.weight", a router).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from errors import UserError
from models.experts.grouped import is_stack
from models.layers.layer import Layer, list_untrained
from models.layers.recurrent import list_read_weights

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterTargets:
    """Parts of a layer, by their names in its module. stacks: the experts' stacked parameters. routers: the
    routers' weights."""

    projections: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.projections or self.stacks or self.routers)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parts that peft calls target_parameters."""
        return (*self.stacks, *self.routers)

    @property
    def weights(self) -> set[str]:
        """The tensors that an adapter changes."""
        return {*(f"{name}.weight" for name in self.projections), *self.parameters}


def names_layers(config: LoraConfig) -> bool:
    """Return whether an adapter may treat layers of one kind differently: it has the number of one in a name, or keys
    of peft that choose among layers."""
    chosen = ("layers_to_transform", "rank_pattern", "alpha_pattern", "exclude_modules", "modules_to_save")
    if any(getattr(config, key, None) for key in chosen) or isinstance(config.target_modules, str):
        return True
    targets = (*(config.target_modules or ()), *(config.target_parameters or ()))
    return any(part.isdigit() for name in targets for part in name.split("."))


def list_projections(module: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """Returns the projections inside a decoder layer by name, except those on which an adapter has no effect."""
    others = {*_list_routers(module), *_list_read(module), *list_untrained(module)}
    return {
        name: child
        for name, child in module.named_modules()
        if name and isinstance(child, (nn.Linear, Conv1D)) and name not in others
    }


def _list_read(module: nn.Module) -> set[str]:
    return list_read_weights(module, getattr(module, "attention_type", ""))


def _list_routers(module: nn.Module) -> list[str]:
    """Returns the names of the modules next to a mixture's experts whose weight is a matrix and whose class is the
    family's own; some are subclasses of `nn.Linear` that return more than a product (phimoe).
    """
    blocks = {name.rpartition(".")[0] for name, child in module.named_modules() if is_stack(child)}
    return [
        name
        for name, child in module.named_modules()
        if name.rpartition(".")[0] in blocks
        and getattr(getattr(child, "weight", None), "ndim", 0) == 2
        and type(child).__module__.startswith(("transformers.models.", "models."))
    ]


def list_adaptable(module: nn.Module) -> AdapterTargets:
    """Returns all parts of a layer's module that can have an adapter."""
    stacks = (
        f"{name}.{stack}"
        for name, child in module.named_modules()
        if is_stack(child)
        for stack, parameter in child.named_parameters(recurse=False)
        if parameter.ndim == 3
    )
    return AdapterTargets(
        tuple(list_projections(module)), tuple(stacks), tuple(f"{name}.weight" for name in _list_routers(module))
    )


def list_targets(module: nn.Module, layer: Layer, config: LoraConfig) -> AdapterTargets:
    """Returns the parts of the layer's module that the config puts an adapter on. A projection may also be named as a
    parameter, by its weight. Lists that peft has written may name parts of a single layer.
    """
    modules, parameters = config.target_modules or (), config.target_parameters or ()
    known, prefix = list_adaptable(module), layer.hf_prefix
    return AdapterTargets(
        tuple(
            name
            for name in known.projections
            if is_named(prefix + name, modules) or is_named(f"{prefix}{name}.weight", parameters)
        ),
        tuple(name for name in known.stacks if is_named(prefix + name, parameters)),
        tuple(name for name in known.routers if is_named(prefix + name, parameters)),
    )


def is_saved(layer: Layer, config: LoraConfig) -> bool:
    """Returns whether the config trains and saves the layer's whole module (peft's `modules_to_save`), such as the
    embedding or the head."""
    return layer.owns_weights and is_named(layer.hf_prefix.rstrip("."), config.modules_to_save or ())


def list_full_names(layers: Sequence[Layer], config: LoraConfig) -> list[str]:
    """Returns the full names of the projections that the config targets, for a model with modules outside of these
    layers that the end of a name would match too."""
    return [
        layer.hf_prefix + name
        for layer in layers
        for name in list_targets(layer.build_on_meta(), layer, config).projections
    ]


def is_named(name: str, targets: Iterable[str]) -> bool:
    """Returns whether one of `targets` is the name, or its end after a dot."""
    return any(name == target or name.endswith("." + target) for target in targets)


def build_lora_config(
    layers: Sequence[Layer],
    target_modules: str | Sequence[str],
    target_parameters: Sequence[str] | None = None,
    **options: Any,
) -> LoraConfig:
    """Build peft's config for the model that has these layers.

    target_modules: names of projections, or "all-linear" for all of them in the decoder layers (not the head), and for
    the experts of a mixture unless `target_parameters` names some. target_parameters: names of stacked parameters of
    experts, or of routers' weights. options: further fields of `peft.LoraConfig`.
    Raises UserError for a name that matches nothing.
    """
    from peft import LoraConfig

    modules = [(layer.hf_prefix, layer.build_on_meta()) for layer in layers]
    known = [(prefix, list_adaptable(module)) for prefix, module in modules]
    projections = {prefix + name for prefix, targets in known for name in targets.projections}
    parameters = {prefix + name for prefix, targets in known for name in targets.parameters}
    stacks = sorted({name for _, targets in known for name in targets.stacks})
    routers = sorted({name for _, targets in known for name in targets.routers})
    short = sorted({name.rsplit(".", 1)[-1] for name in projections})
    takes_all = target_modules == ALL_LINEAR
    targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    targets = short if takes_all else targets
    if target_parameters is None:
        target_parameters = stacks if takes_all else []
    for target in targets:
        if not any(is_named(name, [target]) for name in projections):
            if any(is_named(prefix + name, [target]) for prefix, module in modules for name in _list_read(module)):
                raise UserError(
                    f"adapter.target_modules: an adapter on '{target}' would have no effect, because the state-space "
                    f"layers of this model read its weight themselves; leave it out, or give {ALL_LINEAR}"
                )
            raise _no_projection(target, short, stacks)
    for target in target_parameters:
        if not any(is_named(name, [target]) for name in parameters):
            raise _no_parameter(target, [*stacks, *routers])
    if not targets and not target_parameters:
        raise UserError("adapter.target_modules and adapter.target_parameters name nothing; give one of them")
    transposed = any(isinstance(p, Conv1D) for _, module in modules for p in list_projections(module).values())
    return LoraConfig(
        target_modules=targets,
        target_parameters=list(target_parameters) or None,
        fan_in_fan_out=transposed,
        **{"task_type": "CAUSAL_LM", **options},
    )


def _no_projection(target: str, short: Sequence[str], stacks: Sequence[str]) -> UserError:
    hint = f"; experts are named by adapter.target_parameters: {', '.join(stacks)}" if stacks else ""
    return UserError(
        f"adapter.target_modules: no projection of the model is named '{target}'; "
        f"there are {', '.join(short)}, or {ALL_LINEAR} for all{hint}"
    )


def _no_parameter(target: str, known: Sequence[str]) -> UserError:
    there = f"there are {', '.join(known)}" if known else "this model has no experts"
    return UserError(
        f"adapter.target_parameters: no parameter of experts or of a router is named '{target}'; {there}. "
        "Projections are named by adapter.target_modules"
    )


def describe_targets(layers: Sequence[Layer], config: LoraConfig) -> str:
    """Returns one line that counts what has adapters and what has none, and says which key would add routed experts and
    routers."""
    adapted, others = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for layer in layers:
        module = layer.build_on_meta()
        known, targets = list_adaptable(module), list_targets(module, layer, config)
        for kind in ("projections", "stacks", "routers"):
            adapted.update((kind, name) for name in getattr(targets, kind))
            others.update((kind, name) for name in set(getattr(known, kind)) - set(getattr(targets, kind)))
    text = f"rank {config.r} on {' and '.join(_list_counts(adapted))}"
    if not others:
        return text
    parameters = {name for kind, name in adapted if kind != "projections"}
    return f"{text}; none on {', '.join(_list_counts(others, parameters))}"


def _list_counts(parts: Counter[tuple[str, str]], parameters: set[str] | None = None) -> list[str]:
    """parts: (kind, name in the layer) -> number of layers that have it. parameters: those that have adapters already,
    for a hint at the key that includes the parts too; the key replaces the default, so it has to name both.
    """
    counted = []
    for kind, called in (
        ("projections", "projections"),
        ("stacks", "stacks of routed experts"),
        ("routers", "routers"),
    ):
        names = sorted(name for part_kind, name in parts if part_kind == kind)
        if not names:
            continue
        hint = ""
        if parameters is not None and kind != "projections":
            hint = f" (adapter.target_parameters=[{','.join(sorted({*parameters, *names}))}] includes them)"
        counted.append(f"{sum(parts[kind, name] for name in names)} {called}{hint}")
    return counted
