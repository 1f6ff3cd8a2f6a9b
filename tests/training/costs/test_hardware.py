"""The machines: every file of conf/hardware is complete or measured."""

from __future__ import annotations

import pytest
from support.configs import CONF, build_config

from errors import UserError
from training.config.schema import Precision
from training.costs.hardware import UNMEASURED, complete_hardware

NAMES = sorted(file.stem for file in (CONF / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_is_known_by_its_files_name_and_complete(name: str) -> None:
    hardware = complete_hardware(build_config(f"hardware={name}").hardware, Precision.fp32, 2)
    assert hardware.name == name
    unknown = {field for field, value in vars(hardware).items() if value is None}
    assert "price_per_hour" in unknown <= {*UNMEASURED}
    assert 0 < hardware.efficiency <= 1 and 0 < hardware.usable_memory <= 1 and hardware.peak_flops["fp32"] > 0


def test_this_machine_is_shared_by_its_ranks() -> None:
    one, many = (
        complete_hardware(build_config("hardware=here").hardware, Precision.fp32, ranks) for ranks in (1, 1000)
    )
    assert many.memory == pytest.approx(one.memory / 1000) and many.host_memory == one.host_memory
    assert many.peak_flops["fp32"] < one.peak_flops["fp32"]
    assert many.cards_per_node == 1000


def test_what_is_stated_is_not_measured() -> None:
    hardware = complete_hardware(build_config("hardware=here", "hardware.memory=3").hardware, Precision.fp32, 2)
    assert hardware.memory == 3


def test_a_precision_without_a_peak() -> None:
    hardware = build_config("hardware=h100").hardware
    hardware.peak_flops = {"bf16": 1.0}
    with pytest.raises(
        UserError, match=r"precision=fp32: hardware=h100 has no peak for it; add it to conf/hardware/h100.yaml"
    ):
        complete_hardware(hardware, Precision.fp32, 1)
