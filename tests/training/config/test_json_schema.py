"""The JSON Schema of a run's config: every shipped config is one, and what a run would refuse is not."""

from __future__ import annotations

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.configs import CONF
from support.json_schemas import find_errors

from extension import list_conf_folders
from training.config.json_schema import build_json_schema
from training.config.key_table import list_types
from training.config.ranges import list_ranges
from training.config.schema import RunConfig, build_schema

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = [file for folder in (CONF, *list_conf_folders()) for file in sorted(folder.glob("*.yaml"))]
RANGES = list_ranges(build_schema()())


@cache
def load_schema() -> dict[str, Any]:
    return build_json_schema()


def find_property(key: str) -> dict[str, Any]:
    found = load_schema()
    for name in key.split("."):
        found = found["properties"][name]
    return found


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_config_is_valid(file: Path) -> None:
    config = OmegaConf.to_container(OmegaConf.load(file))
    assert not list(find_errors(config, load_schema()))


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({"num_stage": 2}, [".num_stage"]),
        ({"num_stages": "two", "data": {"packing": 1}}, [".num_stages", ".data.packing"]),
        ({"hub": {"every": 0}, "inspect_data": "yes"}, [".hub.every", ".inspect_data"]),
        ({"precision": "fp8", "zero_stage": 4, "freeze": "norm"}, [".precision", ".zero_stage", ".freeze"]),
        ({"activation_checkpoint_interval": "most"}, [".activation_checkpoint_interval"]),
        ({"world_size": [8, 0]}, [".world_size"]),
        ({"parameter_groups": [{"pattern": "norm", "rate": 1}]}, [".parameter_groups[0].rate"]),
        ({"hardware": {"peak_flops": {"bf16": -1}}}, [".hardware.peak_flops"]),
    ],
)  # fmt: skip
def test_what_a_run_would_refuse_is_not_valid(config: dict[str, Any], places: list[str]) -> None:
    assert [error.partition(":")[0] for error in find_errors(config, load_schema())] == places


def test_every_key_is_there_with_its_meaning_and_default() -> None:
    assert all(map(find_property, list_types()))
    assert find_property("learning_rate")["description"] and find_property("optimizer.betas")["default"] == [0.9, 0.95]
    assert "default" not in find_property("train_file") and "default" not in find_property("data")


@given(st.sampled_from(sorted(RANGES)), st.integers(-3, 20) | st.floats(-2, 30))
def test_its_ranges_are_those_of_a_run(key: str, number: float) -> None:
    allowed, is_whole = RANGES[key], list_types()[key] in (int, int | None)
    value = {"bf16": number} if key == "hardware.peak_flops" else number
    if isinstance(number, int) or not (is_whole or allowed.checks_anything):
        assert allowed.holds(number) == (not any(find_errors(value, find_property(key))))


def test_the_script_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schema.json"
    monkeypatch.setattr(sys, "argv", ["list_keys.py", "--json_schema", str(file)])
    runpy.run_path(str(ROOT / "scripts" / "list_keys.py"), run_name="__main__")
    assert json.loads(file.read_text()) == load_schema()
    assert load_schema()["properties"].keys() >= {*vars(RunConfig()), "defaults", "hydra", "hub"}
