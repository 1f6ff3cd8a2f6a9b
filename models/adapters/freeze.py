"""Which parameters of a model are trained: all of them, all except those that `freeze` names, or an adapter's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from errors import UserError
from models.adapters.adapter import Adapter
from models.layers.frozen import FrozenStack
from models.layers.layer import Layer
from models.parallel.shard import NO_EP, NO_TP, ExpertParallel, TensorParallel


def choose_trained(
    module: nn.Module,
    index: int,
    layer: Layer,
    adapter: Adapter | None,
    freeze: Sequence[str],
    parallel: TensorParallel = NO_TP,
    expert_parallel: ExpertParallel = NO_EP,
    kept: Mapping[str, FrozenStack] | None = None,
) -> None:
    """Set which parameters in the module of layer `index` are trained: those of the adapter, which is attached here, or
    all of them without one; and of these none whose full name a pattern of `freeze` matches. kept: as `attach` takes
    them."""
    if adapter is not None:
        adapter.attach(module, index, layer, parallel, expert_parallel, kept)
    for name, parameter in module.named_parameters():
        if any(re.search(pattern, layer.hf_prefix + name) for pattern in freeze):
            parameter.requires_grad_(False)


def check_freeze(freeze: Sequence[str], layers: Sequence[Layer]) -> None:
    """Raises UserError for a pattern that is not a valid regular expression or matches nothing, and for patterns that
    leave nothing to train: buffers and indexers never are trained."""
    if not freeze:
        return
    names, trainable = set[str](), set[str]()
    for layer in layers:
        module = layer.build_on_meta()
        names |= {layer.hf_prefix + name for name in module.state_dict().keys() - layer.kept}
        trainable |= {layer.hf_prefix + name for name, weight in module.named_parameters() if weight.requires_grad}
    frozen: set[str] = set()
    for pattern in freeze:
        try:
            matched = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise UserError(f"freeze: '{pattern}' is not a valid regular expression ({error})") from None
        if not matched:
            raise UserError(f"freeze: '{pattern}' matches no weight; they are named like '{min(names)}'")
        frozen |= matched
    if trainable & names <= frozen:
        raise UserError(f"freeze={list(freeze)} leaves nothing to train")
