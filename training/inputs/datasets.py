"""From the data keys of a run to its tokenizer and its tokenized rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.encoders.encoding import Encoding
from data.encoders.kinds import find_kind
from data.encoders.sample import Encoder
from data.options import Packing
from data.order import VERSION as ORDER_VERSION
from data.storage.rows import RowPlan, prepare_rows
from data.storage.tokenized import load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from models.weights.source import WeightSource
from training.config.schema import DataConfig, RunConfig
from training.config.sources import TrainFiles, list_file_keys, parse_files, read_files
from training.inputs.custom import build_user_encoder
from training.objectives.registry import get_objective


def load_tokenizer(config: RunConfig, source: WeightSource) -> PreTrainedTokenizerBase:
    """Raises UserError when there is none, or when it has more tokens than the embedding has rows."""
    path = config.tokenizer_name_or_path or str(source.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer in {path} ({str(error).splitlines()[0]}); set tokenizer_name_or_path") from None
    if len(tokenizer) > source.config.vocab_size:
        raise UserError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the embedding {source.config.vocab_size} rows; "
            "grow it with convert2ckpt.py --add_special_tokens, or give the tokenizer of this model"
        )
    return tokenizer


def tokenize(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None] | None = None
) -> dict[str, Path]:
    """Key of the files -> folder of the tokenized samples, which the first process that asks for it makes."""
    return {key: prepare_file(config, key, tokenizer, log) for key in list_file_keys(config)}


def prepare_file(
    config: RunConfig, key: str, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None] | None
) -> Path:
    """The tokenized folder of `train_file` or an evaluation file, with the index of its rows; the first to ask makes
    it.

    log: None on a rank that prints nothing. Raises UserError for whatever is wrong with the files or a record.
    """
    data = config.data
    plan = build_row_plan(config, key)
    files = _parse_files(config, key)
    encoding = Encoding(
        encoder=build_encoder(data),
        tokenizer=tokenizer,
        max_seq_length=None if plan.packing is Packing.CONCATENATE else config.max_seq_length,
        length_policy=data.length_policy,
        on_bad_record=data.on_bad_record,
        samples_per_record=find_kind(data.name).samples_per_record,
    )
    path = prepare_dataset(
        files.entries, key=key, encoding=encoding, cache_dir=data.cache_dir, num_proc=data.num_proc, log=log
    )
    prepare_rows(path, plan, key, log, names=files.entries)
    return path


def describe_data(config: RunConfig, path: Path) -> dict[str, str]:
    """What decides the samples of a row of `train_file`: name -> value. The tokens, so a file may move or be copied.

    path: its tokenized folder.
    """
    plan = build_row_plan(config, "train_file")
    described = {
        "packing": "none" if plan.packing is Packing.NONE else f"{plan.packing} in rows of {plan.max_seq_length}",
        "mixture": "none" if plan.mixture is None else str(plan.mixture),
        "the way the order of samples is drawn": str(ORDER_VERSION),
    }
    fingerprints = load_summary(path).fingerprints
    return described | {
        f"the hash of the tokens of train_file entry {number}": each
        for number, each in enumerate(fingerprints, start=1)
    }


def build_encoder(data: DataConfig) -> Encoder:
    """What makes samples of records: that of the kind (`conf/data/NAME.yaml`), or the user's.

    Raises UserError for what is not an encoder.
    """
    if data.encoder is not None:
        return build_user_encoder(data)
    encoder: Any = find_kind(data.name).encoder
    return encoder(**{field.name: getattr(data, field.name) for field in fields(encoder)})


def build_row_plan(config: RunConfig, key: str) -> RowPlan:
    """How the samples of `train_file` or an evaluation file become rows."""
    data = config.data
    return RowPlan(
        max_seq_length=config.max_seq_length,
        packing=find_kind(data.name).choose_packing(data.packing),
        mixture=_parse_files(config, key).mixture,
        group_size=get_objective(config).rows_per_sample,
    )


def list_entries(config: RunConfig, key: str) -> list[str]:
    """The files, globs and hub names of `train_file` or an evaluation file."""
    return _parse_files(config, key).entries


def _parse_files(config: RunConfig, key: str) -> TrainFiles:
    return parse_files(read_files(config, key), key, config.data.mixture_by)
