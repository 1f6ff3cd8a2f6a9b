"""From the data keys of a run to its tokenizer and its tokenized rows: what `conf/data/` says, in the words of `data/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.encoders.chat import ChatEncoder
from data.encoders.encoding import Encoding, OnBadRecord
from data.encoders.length import LengthPolicy
from data.encoders.preference import PreferenceEncoder
from data.encoders.pretrain import PretrainEncoder
from data.encoders.sample import Encoder
from data.encoders.sft import SFTEncoder
from data.order import VERSION as ORDER_VERSION
from data.sources.mixture import MixtureUnit
from data.storage.rows import Packing, RowPlan, prepare_rows
from data.storage.tokenized import load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from models.weights.source import WeightSource
from training.config.schema import DataConfig, DataKind, RunConfig, rows_per_sample
from training.config.sources import TrainFiles, parse_files
from training.inputs.custom import build_user_encoder


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
    """Key of the files -> folder of the tokenized samples, which whoever comes first makes."""
    return {
        key: prepare_file(config, key, tokenizer, log)
        for key in ("train_file", "eval_file")
        if getattr(config, key) is not None
    }


def prepare_file(
    config: RunConfig, key: str, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None] | None
) -> Path:
    """The tokenized folder of `train_file` or `eval_file`, with the index of its rows; made by whoever comes first.

    log: None on a rank that keeps quiet.
    Raises UserError for whatever is wrong with the files or a record.
    """
    data = config.data
    plan = build_row_plan(config, key)
    files = _parse_files(config, key)
    encoding = Encoding(
        encoder=build_encoder(data),
        tokenizer=tokenizer,
        max_seq_length=None if plan.packing is Packing.CONCATENATE else config.max_seq_length,
        length_policy=LengthPolicy(data.length_policy.value),
        on_bad_record=OnBadRecord(data.on_bad_record.value),
        samples_per_record=plan.group_size,
    )
    path = prepare_dataset(
        files.entries, key=key, encoding=encoding, cache_dir=data.cache_dir, num_proc=data.num_proc, log=log
    )
    prepare_rows(path, plan, key, log, names=files.entries)
    return path


def describe_data(config: RunConfig, path: Path) -> dict[str, str]:
    """What decides the samples of a row of `train_file`, tokenized in `path`: by the tokens themselves, so a file may move or be copied."""
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


_ENCODERS: dict[DataKind, type[SFTEncoder | ChatEncoder | PretrainEncoder | PreferenceEncoder]] = {
    DataKind.sft: SFTEncoder,
    DataKind.chat: ChatEncoder,
    DataKind.pretrain: PretrainEncoder,
    DataKind.preference: PreferenceEncoder,
}  # their fields are keys of `data`


def build_encoder(data: DataConfig) -> Encoder:
    """What makes samples of records: that of the kind (`conf/data/NAME.yaml`), or one's own. Raises UserError for no encoder."""
    if data.encoder is not None:
        return build_user_encoder(data)
    encoder = _ENCODERS[data.name]
    return encoder(**{field.name: getattr(data, field.name) for field in fields(encoder)})


def build_row_plan(config: RunConfig, key: str) -> RowPlan:
    """How the samples of `train_file` or `eval_file` become rows."""
    data = config.data
    packing = Packing.BEST_FIT if data.packing else Packing.NONE
    if data.name is DataKind.pretrain:
        packing = Packing.CONCATENATE
    return RowPlan(config.max_seq_length, packing, _parse_files(config, key).mixture, rows_per_sample(config))


def list_entries(config: RunConfig, key: str) -> list[str]:
    """The files, globs and hub names of `train_file` or `eval_file`."""
    return _parse_files(config, key).entries


def _parse_files(config: RunConfig, key: str) -> TrainFiles:
    return parse_files(getattr(config, key), key, MixtureUnit(config.data.mixture_by.value))
