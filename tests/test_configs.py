"""Every config that ships: it composes, its first line starts it, it fits on a screen, and nothing is left unsaid."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf
from support.configs import CONF, compose_config
from support.published import GLM_5_2

from training.cli.command_line import check_command_line
from training.config.incompatible import CheckedConfig
from training.config.schema import RunConfig, register_schema, to_typed
from training.config.validate import check_config
from training.distributed.topology import build_layout
from training.objectives.registry import check_objective
from training.plan_command.run import ModelFolder
from training.resolution.architecture import check_stated_fields
from training.resolution.readers import check_read

PRIMARY = sorted(file.stem for file in CONF.glob("*.yaml") if file.stem != "base")
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
OPTIONS = sorted(f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml"))
SCREEN = 60  # lines
COMMAND = re.compile(r"# (deepspeed .*trainer_base_ds_mp\.py -cn (\S+).*)")
GIVEN_BY_THE_USER = {"model_name_or_path", "train_file", "output_dir"}


def first_line(name: str) -> str:
    return (CONF / f"{name}.yaml").read_text().splitlines()[0]


def overrides_of(name: str) -> list[str]:
    """Returns the overrides of the config's own command line, such as the user's data."""
    return [argument for argument in shlex.split(first_line(name)) if "=" in argument]


@cache
def build(name: str) -> RunConfig:
    return OmegaConf.to_object(compose_config(name, *overrides_of(name)))


@pytest.mark.parametrize("name", PRIMARY)
def test_a_primary_config_composes_and_passes_the_checks(name: str) -> None:
    config = build(name)
    assert isinstance(config, RunConfig)
    check_config(config, has_accelerator=True)
    check_objective(config)
    assert check_read(CheckedConfig(config), (), continues=False) == []


@pytest.mark.parametrize("name", PRIMARY)
def test_its_first_line_is_its_command_line(name: str) -> None:
    match = COMMAND.fullmatch(first_line(name))
    assert match is not None and match[2] == name, first_line(name)
    launcher, _, arguments = match[1].partition("trainer_base_ds_mp.py")
    register_schema()
    check_command_line(shlex.split(arguments), CONF, "no default")
    if started := re.search(r"--num_(?:gpus|nodes) (\d+)(?:.*--num_gpus (\d+))?", launcher):
        world_size = int(started[1]) * int(started[2] or 1)
        build_layout(build(name), world_size, num_layers=1000, has_accelerator=True)


@pytest.mark.parametrize("name", PRIMARY)
def test_it_fits_on_a_screen(name: str) -> None:
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= SCREEN


def test_no_line_is_wider_than_120_columns() -> None:
    texts = {file.relative_to(CONF): file.read_text().splitlines() for file in CONF.rglob("*.yaml")}
    assert not [
        (file, number) for file, lines in texts.items() for number, line in enumerate(lines, 1) if len(line) > 120
    ]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_leaves_only_the_users_own_keys_open(option: str) -> None:
    composed = compose_config("base", option)
    assert OmegaConf.missing_keys(composed) == GIVEN_BY_THE_USER
    assert isinstance(to_typed(composed, unread=list(GIVEN_BY_THE_USER)), RunConfig)


def test_base_states_every_key_and_no_other() -> None:
    stated = OmegaConf.load(CONF / "base.yaml")
    chosen = {next(iter(entry)) for entry in stated.defaults if not isinstance(entry, str)}
    assert chosen == set(GROUPS)
    assert set(stated) - {"defaults", "hydra"} == {field.name for field in fields(RunConfig)} - chosen


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_a_key_of_the_schema(group: str) -> None:
    assert group in get_type_hints(RunConfig)


@pytest.mark.parametrize("name", [option.partition("=")[2] for option in OPTIONS if option.startswith("model=")])
def test_a_size_is_a_config_of_transformers(name: str) -> None:
    """`transformers` accepts the fields of `conf/model/`, and layers can be built from them."""
    from models.architecture.lookup import build_layers
    from models.weights.config_file import parse_config

    stated = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    if not stated:
        return
    config = parse_config(stated, CONF / "model" / f"{name}.yaml")
    stated.pop("quantization_config", None)  # of the published weights, not of the layers
    assert all(getattr(config, key) == value for key, value in stated.items())
    assert (
        sum(layer.module_class.__name__ == "DecoderLayer" for layer in build_layers(config)) == config.num_hidden_layers
    )


def test_a_published_glm_5_2_is_the_size_that_ships(tmp_path: Path) -> None:
    """A run compares each field of `conf/model/` with the folder's. Fields that `transformers` ignores change nothing,
    and layers keep the pattern that follows from two of them."""
    from models.weights.config_file import parse_config

    config = parse_config(GLM_5_2, tmp_path / "config.json")
    check_stated_fields(build("glm_5_2_lora_8xh200"), ModelFolder(tmp_path, config))
    assert config.head_dim == config.qk_rope_head_dim == 64 and config.max_position_embeddings == 2**20
    full = [index for index, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert hasattr(config, "num_nextn_predict_layers") and not hasattr(config, "index_topk_freq")
