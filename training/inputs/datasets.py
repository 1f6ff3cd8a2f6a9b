"""From the data keys of a run to its tokenizer and its tokenized rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from data.encoders.chat_templates import ChatTemplate, load_chat_template
from data.encoders.kinds import find_kind
from data.options import Packing
from data.order import VERSION as ORDER_VERSION
from data.sample import Encoder
from data.storage.encoding import Encoding
from data.storage.mismatched import check_labels, prepare_mismatched
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
    """Raises UserError when there is none, when it has more tokens than the embedding has rows, and when the objective
    cannot be trained with it."""
    tokenizer = load_extended(config, str(source.path))
    if len(tokenizer) > source.config.vocab_size:
        raise UserError(
            f"the tokenizer of {config.tokenizer_name_or_path or source.path} has {len(tokenizer)} tokens, the "
            f"embedding {source.config.vocab_size} rows; grow it with convert2ckpt.py --add_special_tokens, or give "
            "the tokenizer of this model"
        )
    get_objective(config).check_tokenizer(tokenizer)
    return tokenizer


def load_extended(config: RunConfig, path: str) -> PreTrainedTokenizerBase:
    """The run's tokenizer, where the config names none that of the folder `path`, with the chat template and the tokens
    of `data`. Raises UserError when there is none.
    """
    tokenizer = _load_own(config, path)
    build_chat_template(config.data).apply_to(tokenizer)
    return tokenizer


def _load_own(config: RunConfig, path: str) -> PreTrainedTokenizerBase:
    path = config.tokenizer_name_or_path or path
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer in {path} ({str(error).splitlines()[0]}); set tokenizer_name_or_path") from None


def has_tokenizer(config: RunConfig, path: str) -> bool:
    """Return whether the run's tokenizer lies on this machine. path: the model's folder."""
    return any(Path(config.tokenizer_name_or_path or path).expanduser().glob("tokenizer*"))


def list_new_tokens(config: RunConfig, path: str) -> list[str]:
    """The tokens that `data` brings and the tokenizer (of the folder `path`, by default) does not have."""
    tokens = build_chat_template(config.data).tokens
    return sorted(tokens - _load_own(config, path).get_vocab().keys()) if tokens else []


def count_added_rows(config: RunConfig, model: PretrainedConfig, path: str) -> int:
    """How many rows the embedding must have for the tokens that `data` adds; 0 where it has them.

    path: the folder of the model that `model` describes. A tokenizer that did not fit before is left for
    `load_tokenizer` to refuse. Raises UserError when there is none.
    """
    template = build_chat_template(config.data)
    if not template.tokens:
        return 0
    vocabulary = load_extended(config, path).get_vocab()
    own = max((index for token, index in vocabulary.items() if token not in template.tokens), default=0)
    needed = max(vocabulary.values()) + 1
    return needed if own < model.vocab_size < needed else 0


def build_chat_template(data: DataConfig) -> ChatTemplate:
    """Raises UserError for a template that cannot be had."""
    return load_chat_template(data.chat_template, data.special_tokens, data.eos_token)


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
    if get_objective(config).needs_first_pass:
        per_record = find_kind(data.name).samples_per_record
        check_labels(path, key, per_record, trains=key == "train_file")
        prepare_mismatched(path, plan, key, per_record, log)
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
    if template := build_chat_template(config.data):
        described["the chat template with its tokens"] = template.describe()
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
