"""Models whose experts cannot be divided are refused with the reason."""

from __future__ import annotations

import re

import pytest
from support.families import build_family_config
from support.published import build_published_config

from errors import UserError
from models.architecture.lookup import build_layers
from models.generic.shrink import shrink
from models.sharding.expert_parallel import check_expert_parallel, find_stack_sizes

MIXTURE = build_family_config("deepseek_v3")


def test_every_layer_counts() -> None:
    """A size has to divide the experts of all layers, whichever comes first or last."""
    layers = [*build_layers(MIXTURE), *build_layers(build_family_config("deepseek_v3", n_routed_experts=12))]
    assert find_stack_sizes(layers) == {8, 12}
    check_expert_parallel(MIXTURE, layers, 4)
    for order in (layers, layers[::-1]):
        with pytest.raises(UserError, match="does not divide the model's 8 and 12 experts; sizes that do: 1, 2, 4$"):
            check_expert_parallel(MIXTURE, order, 8)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("deepseek_v3", "=3 does not divide the model's 8 experts; sizes that do: 1, 2, 4, 8"),
        ("llama", "=3: this 'llama' model has no experts; leave it at 1"),
        ("dbrx", "=3: the experts of a 'dbrx' are not in the stacked form"),
        ("jetmoe", "=3: the experts of a 'jetmoe' are not in the stacked form"),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, message: str) -> None:
    is_published = family in ("dbrx", "jetmoe")
    config = shrink(build_published_config(family)) if is_published else build_family_config(family)
    layers = build_layers(config)
    with pytest.raises(UserError, match=re.escape(message)):
        check_expert_parallel(config, layers, 3)
    check_expert_parallel(config, layers, 1)
