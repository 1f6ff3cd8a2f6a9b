"""From the data keys of a run to its tokenized rows: what `conf/data/` says, in the words of `data/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.length import LengthPolicy
from data.rows import Packing, RowPlan, prepare_rows
from data.sample import Encoder
from data.sft import SFTEncoder
from data.tokenizing import Encoding, OnBadRecord, prepare_dataset
from training.config import DataConfig, RunConfig


def prepare_file(config: RunConfig, key: str, tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]) -> Path:
    """The tokenized folder of `train_file` or `eval_file`, with the index of its rows; made by whoever comes first.

    Raises UserError for whatever is wrong with the files or a record.
    """
    data = config.data
    plan = build_row_plan(config, key)
    files = getattr(config, key)
    encoding = Encoding(
        encoder=build_encoder(data),
        tokenizer=tokenizer,
        max_seq_length=config.max_seq_length,
        length_policy=LengthPolicy(data.length_policy.value),
        on_bad_record=OnBadRecord(data.on_bad_record.value),
    )
    entries = [files] if isinstance(files, str) else files
    path = prepare_dataset(entries, key=key, encoding=encoding, cache_dir=data.cache_dir, num_proc=data.num_proc, log=log)
    prepare_rows(path, plan, key, log)
    return path


def build_encoder(data: DataConfig) -> Encoder:
    return SFTEncoder(data.prompt_field, data.completion_field, data.messages_field, data.prompt_template)


def build_row_plan(config: RunConfig, key: str) -> RowPlan:
    """How the samples of `train_file` or `eval_file` become rows."""
    return RowPlan(config.max_seq_length, Packing.BEST_FIT if config.data.packing else Packing.NONE)
