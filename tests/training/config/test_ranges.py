"""Ranges of numbers, stated by the fields of a dataclass."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.configs import build_config

from errors import UserError
from training.config.ranges import (
    at_least,
    below,
    check_ranges,
    fraction,
    list_ranges,
    one_of,
    positive,
    share,
    zero_or_more,
)
from training.config.schema import RunConfig


@dataclass
class Inner:
    count: int = at_least(2, note="1 is something else", default=2)
    ratio: float | None = share(default=None)


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    rate: float = positive(default=1.0)
    any_number: float = -1.0
    peaks: dict[str, float] | None = positive(default=None)  # noqa: RUF009 (a field)


def test_a_number_is_checked_however_deep_its_group() -> None:
    check_ranges(Outer())
    assert list(list_ranges(Outer())) == ["inner.count", "inner.ratio", "rate", "peaks"]
    with pytest.raises(UserError, match="^inner.count=1: at least 2; 1 is something else$"):
        check_ranges(Outer(Inner(count=1)))
    with pytest.raises(UserError, match="^inner.ratio=1.5: a share between 0 and 1$"):
        check_ranges(Outer(Inner(ratio=1.5)))
    with pytest.raises(UserError, match="^rate=0.0: more than 0$"):
        check_ranges(Outer(rate=0.0))
    with pytest.raises(UserError, match="^rate=inf: a finite number, more than 0$"):
        check_ranges(Outer(rate=math.inf))
    check_ranges(Outer(peaks={"bf16": 1.0}))
    with pytest.raises(UserError, match="^peaks={'bf16': 1.0, 'fp32': 0}: more than 0$"):
        check_ranges(Outer(peaks={"bf16": 1.0, "fp32": 0}))


@pytest.mark.parametrize(
    ("declared", "inside", "outside"),
    [
        (at_least(1), (1, 10**9), (0, -1)),
        (positive(), (1e-30, 5), (0.0, -1.0, math.inf)),
        (zero_or_more(), (0.0, 5), (-1e-30, math.inf)),
        (share(), (0.0, 1.0), (-0.1, 1.1)),
        (fraction(), (0.01, 1.0), (0.0, 1.1, 95)),
        (below(0.5), (0.0, 0.49), (-0.1, 0.5)),
        (one_of(1, 3), (1, 3), (0, 2, 4)),
    ],
)
def test_the_ends_of_a_range(declared: Any, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    allowed = declared.metadata["range"]
    assert all(map(allowed.holds, inside))
    assert not any(map(allowed.holds, (*outside, math.nan)))


@pytest.mark.parametrize("key", list_ranges(RunConfig()))
def test_every_range_of_a_run_is_checked(key: str) -> None:
    config = build_config()
    *groups, name = key.split(".")
    setattr(functools.reduce(getattr, groups, config), name, -1)
    with pytest.raises(UserError, match=f"^{key}=-1: "):
        check_ranges(config)


def test_a_structured_config_has_the_default_of_a_field_with_a_range() -> None:
    node = OmegaConf.structured(Outer)
    assert OmegaConf.to_container(node) == {
        "inner": {"count": 2, "ratio": None},
        "rate": 1.0,
        "any_number": -1.0,
        "peaks": None,
    }
    assert OmegaConf.is_missing(OmegaConf.structured(RunConfig), "learning_rate")
