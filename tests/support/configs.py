"""A run's config for a test: `conf/base.yaml`, or another primary config, with overrides."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from training.config.schema import RunConfig, register_schema

CONF = Path(__file__).resolve().parents[2] / "conf"
REQUIRED = ("model_name_or_path=model", "train_file=train.jsonl", "output_dir=out")


def compose_config(name: str, *overrides: str) -> DictConfig:
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(overrides))


def build_config(*overrides: str) -> RunConfig:
    return OmegaConf.to_object(compose_config("base", *REQUIRED, *overrides))
