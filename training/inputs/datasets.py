"""The tokenizer and the tokenized rows of a run, from its data keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import xxhash
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from data.encoders.chat_templates import ChatTemplate, load_chat_template
from data.encoders.kinds import find_keys, find_kind
from data.encoders.rendering import DATE, read_template_kwargs
from data.encoders.turns import find_stop_tokens
from data.options import Packing, ProblemType
from data.order import VERSION as ORDER_VERSION
from data.order import GlobalOrder
from data.sample import Encoder
from data.sources.records import resolve_sources
from data.sources.selection import HoldOut, Selection, build_filter
from data.storage.encoding import Encoding
from data.storage.rows import GroupLengths, RowPlan, copy_rows, prepare_rows
from data.storage.token_ids import check_token_ids
from data.storage.tokenized import TokenizedDataset, load_summary
from data.storage.tokenizing import prepare_dataset
from data.streaming.blocks import Cursor
from data.streaming.shards import list_shards
from data.streaming.stream import VERSION as STREAM_VERSION
from data.streaming.stream import StreamPlan
from errors import UserError
from models.heads.table import find_head
from models.weights.source import WeightSource
from models.weights.vocabulary import open_tokenizer
from training.config.schema import DataConfig, RunConfig
from training.config.sources import HELD_OUT, list_evaluations, list_file_keys, parse_key
from training.inputs.custom import build_user_encoder
from training.inputs.labels import check_names, find_labels
from training.inputs.stream import SHARDS, StreamStart, compare_shards
from training.objectives.registry import choose_packing, get_objective


def load_tokenizer(config: RunConfig, source: WeightSource) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer. Raises UserError when there is none, when it has more tokens than the embedding has
    rows, and when the objective cannot be trained with it."""
    tokenizer = load_extended(config, str(source.path))
    if len(tokenizer) > source.config.vocab_size:
        raise UserError(
            f"the tokenizer of {config.tokenizer_name_or_path or source.path} has {len(tokenizer)} tokens, the "
            f"embedding {source.config.vocab_size} rows; grow it with convert2ckpt.py --add_special_tokens, or give "
            "the tokenizer of this model"
        )
    get_objective(config).check(tokenizer)
    return tokenizer


def load_extended(config: RunConfig, path: str) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer, by default that of the folder `path`, with the chat template and the tokens of `data`.
    Raises UserError when there is none.
    """
    tokenizer = open_tokenizer(config.tokenizer_name_or_path or path)
    build_chat_template(config.data).apply_to(tokenizer)
    return tokenizer


def has_tokenizer(config: RunConfig, path: str) -> bool:
    """Return whether the run's tokenizer lies on this machine. path: the model's folder."""
    return any(Path(config.tokenizer_name_or_path or path).expanduser().glob("tokenizer*"))


def list_new_tokens(config: RunConfig, path: str) -> list[str]:
    """Return the tokens of `data` that the tokenizer (by default of the folder `path`) does not have."""
    tokens = build_chat_template(config.data).tokens
    if not tokens:
        return []
    return sorted(tokens - open_tokenizer(config.tokenizer_name_or_path or path).get_vocab().keys())


def count_added_rows(config: RunConfig, model: PretrainedConfig, path: str) -> int:
    """Return how many rows the embedding must have for the tokens that `data` adds; 0 when it has them already.

    path: the folder of the model that `model` describes. A tokenizer that does not fit even without those tokens gives
    0 too: `load_tokenizer` refuses it. Raises UserError when there is no tokenizer.
    """
    template = build_chat_template(config.data)
    if not template.tokens:
        return 0
    vocabulary = load_extended(config, path).get_vocab()
    own = max((index for token, index in vocabulary.items() if token not in template.tokens), default=0)
    needed = max(vocabulary.values()) + 1
    return needed if own < model.vocab_size < needed else 0


def build_chat_template(data: DataConfig) -> ChatTemplate:
    """Load the chat template of `data`. Raises UserError when it cannot be loaded."""
    return load_chat_template(data.chat_template, data.special_tokens, data.eos_token)


def tokenize(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    log: Callable[[str], None] | None = None,
    compares_bytes: bool = False,
) -> dict[str, Path]:
    """Tokenize all files, unless another process has, and return key of the files -> folder of tokenized samples.

    compares_bytes: of what is cached; one process of a host asks for it, once a run.
    Raises UserError as `prepare_file` does; for a file that is missing before any other is tokenized.
    """
    keys = list_file_keys(config)
    for key in keys:
        for entry in parse_key(config, key).entries:
            resolve_sources(entry, key)
    return {key: prepare_file(config, key, tokenizer, log, compares_bytes) for key in keys}


def check_ids(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, datasets: Mapping[str, Path], vocab_size: int
) -> None:
    """Raise UserError for a tokenized file with an id that the embedding has no row for. vocab_size: its rows. Nothing
    is read where all ids are those of a tokenizer that fits."""
    if config.data.encoder is None and max(tokenizer.get_vocab().values()) < vocab_size:
        return
    for key, path in datasets.items():
        check_token_ids(path, key, vocab_size)


def prepare_file(
    config: RunConfig,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    log: Callable[[str], None] | None,
    compares_bytes: bool = False,
) -> Path:
    """Return the tokenized folder of `train_file` or an evaluation file, with the index of its rows; the first caller
    builds both.

    log: None on a rank that prints nothing. compares_bytes: as of `tokenize`.
    Raises UserError for any error in the files or a record.
    """
    data = config.data
    plan = build_row_plan(config, key)
    files = parse_key(config, key)
    path = prepare_dataset(
        files.entries,
        key=key,
        encoding=build_encoding(config, key, tokenizer),
        cache_dir=data.cache_dir,
        num_proc=data.num_proc,
        log=log,
        compares_bytes=compares_bytes,
    )
    objective = get_objective(config)
    if objective.companion:
        objective.prepare_companion(config, path, key, log, compares_bytes)
    prepare_rows(path, plan, key, log, names=files.entries, compares_bytes=compares_bytes)
    if objective.companion:
        copy_rows(path, path / objective.companion, plan, compares_bytes)
    if objective.needs_labels and TokenizedDataset(path, False, False).sample_labels is None:
        raise UserError(
            f"{key}: data={data.name} needs a label of each sample, of as many numbers; data.encoder must set it"
        )
    return path


def build_encoding(config: RunConfig, key: str, tokenizer: PreTrainedTokenizerBase) -> Encoding:
    """Return how the records of `train_file` or an evaluation file become samples. Raises UserError for a user-defined
    encoder or filter that cannot be built."""
    data, plan = config.data, build_row_plan(config, key)
    return Encoding(
        encoder=build_encoder(data, list_stop_tokens(config, tokenizer)),
        tokenizer=tokenizer,
        max_seq_length=None if plan.packing is Packing.CONCATENATE else config.max_seq_length,
        length_policy=data.length_policy,
        on_bad_record=data.on_bad_record,
        samples_per_record=find_kind(data.name).count_samples(data),
        shares_rows=plan.rows_per_group < plan.group_size,
        selection=build_selection(data, key),
        label_key=find_kind(data.name).label_key,
    )


def describe_data(config: RunConfig, path: Path) -> dict[str, str]:
    """Return what determines the samples of each row of `train_file`: name -> value.

    It holds hashes of the tokens and no paths, so a file may be moved or copied. path: the tokenized folder.
    """
    fingerprints = load_summary(path).fingerprints
    return (
        describe_choices(config)
        | {"the way the order of samples is drawn": str(ORDER_VERSION)}
        | {
            f"the hash of the tokens of train_file entry {number}": each
            for number, each in enumerate(fingerprints, start=1)
        }
    )


def describe_choices(config: RunConfig) -> dict[str, str]:
    """Return the keys that determine the rows of `train_file`, whatever its records are: name -> value."""
    plan = build_row_plan(config, "train_file")
    described = {
        "packing": "none" if plan.packing is Packing.NONE else f"{plan.packing} in rows of {plan.max_seq_length}",
        "mixture": "none" if plan.mixture is None else str(plan.mixture),
    }
    if template := build_chat_template(config.data):
        described["the chat template with its tokens"] = template.describe()
    if date := read_template_kwargs(config.data.template_kwargs, "data.template_kwargs").get(DATE):
        described["the date in data.template_kwargs"] = date
    for key in ("max_samples", "filter", "eval_fraction", "eval_samples"):
        if (value := getattr(config.data, key)) is not None:
            described[f"data.{key}"] = str(value)
    if config.data.group_by_length:
        described["data.group_by_length"] = "true"
    return described


def open_stream(config: RunConfig) -> StreamStart | None:
    """Return the beginning of the run's stream, None for a run that streams nothing. Raises UserError for shards that
    cannot be opened."""
    if not config.data.streaming or config.evaluate_only:
        return None
    return StreamStart(tuple(list_shards(list_entries(config, "train_file"), "train_file")), Cursor())


def describe_stream(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return what determines the rows of a stream beyond its shards: name -> value."""
    return describe_choices(config) | {
        "data.streaming": f"true, order {STREAM_VERSION}",
        "data.shuffle_block": str(config.data.shuffle_block),
        "the hash of encoder, tokenizer and their options": build_encoding(config, "train_file", tokenizer).compute_key(
            []
        ),
    }


def build_stream_plan(config: RunConfig, start: StreamStart, tokenizer: PreTrainedTokenizerBase) -> StreamPlan:
    """Return what the rows of the stream depend on. Raises UserError where this rank finds other shards than the main
    one, or cannot open them."""
    own = open_stream(config)
    assert own is not None
    before, after = compare_shards(start.to_json(), own)
    if before != after:
        raise UserError(
            f"train_file: this host has other shards than the main one: {before[SHARDS]} there, {after[SHARDS]} here; "
            "give all hosts the same files"
        )
    return StreamPlan(
        shards=own.shards,
        encoding=build_encoding(config, "train_file", tokenizer),
        row_plan=build_row_plan(config, "train_file"),
        seed=config.seed,
        block_records=config.data.shuffle_block,
    )


def hash_evaluations(config: RunConfig, datasets: Mapping[str, Path]) -> str:
    """Return a hash of the names and the tokens of the evaluation files, whose results can be compared where it is the
    same; empty where there is none. datasets: key of the files -> tokenized folder."""
    named = {name: load_summary(datasets[key]).fingerprints for name, key in list_evaluations(config).items()}
    return xxhash.xxh3_64_hexdigest(json.dumps(named, sort_keys=True).encode()) if named else ""


def list_stop_tokens(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens at which the model stops in addition to the tokenizer's eos token, by generation_config.json
    next to its tokenizer or its weights, and by the chat template."""
    return find_stop_tokens((tokenizer.name_or_path, config.model_name_or_path or ""), tokenizer)


def list_trained_stops(config: RunConfig, tokenizer: PreTrainedTokenizerBase, path: Path | None) -> list[str]:
    """Return those of `list_stop_tokens` that end turns of a tokenized folder. With `rewritten_turns=keep` a turn may
    also end at another token, where the history shows it so and generation goes on. path: None for data that is
    streamed, whose turns are not known beforehand: all of them."""
    if path is None:
        return list(list_stop_tokens(config, tokenizer))
    trained = load_summary(path).content.stop_tokens
    return [token for token in list_stop_tokens(config, tokenizer) if token in trained]


def find_prompt_template(config: RunConfig, tokenizer: PreTrainedTokenizerBase, path: Path | None) -> str | None:
    """Return the template that the prompts of a tokenized folder are in; None for data without prompts, and where the
    chat template made some. path: None for data that is streamed, whose prompts are not known beforehand: the chat
    template, where there is one."""
    if "prompt_template" not in find_keys(find_kind(config.data.name)):
        return None
    if path is None:
        return None if tokenizer.chat_template else config.data.prompt_template
    content = load_summary(path).content
    return config.data.prompt_template if content.num_text_turns == content.num_turns > 0 else None


def build_encoder(data: DataConfig, stop_tokens: tuple[str, ...] = ()) -> Encoder:
    """Build the encoder from records to samples: that of the kind (`conf/data/NAME.yaml`), or a user-defined one.

    stop_tokens: see `list_stop_tokens`. Raises UserError for an object that is not an encoder.
    """
    if data.encoder is not None:
        return build_user_encoder(data)
    encoder: Any = find_kind(data.name).encoder
    given: dict[str, Any] = {
        "stop_tokens": stop_tokens,
        "template_kwargs": read_template_kwargs(data.template_kwargs, "data.template_kwargs"),
    }
    hints = get_type_hints(encoder)
    given |= {field.name: getattr(data, field.name) for field in fields(encoder) if field.name not in given}
    for name, value in given.items():
        if value is None and hints.get(name) is str:
            raise UserError(f"data.{name}=null: data={data.name} needs it; omit the key, or give a text")
    return encoder(**{field.name: given[field.name] for field in fields(encoder)})


def build_selection(data: DataConfig, key: str) -> Selection:
    """Return which records of the files of a key are taken; of an evaluation file all that the filter keeps.

    Raises UserError for a filter that cannot be called.
    """
    keeps = None if data.filter is None else build_filter(data.filter)
    if key not in ("train_file", HELD_OUT):
        return Selection(keeps)
    hold_out = HoldOut(data.eval_fraction, data.eval_samples) if data.holds_out else None
    return Selection(keeps, data.max_samples, hold_out, takes_held_out=key == HELD_OUT)


def build_row_plan(config: RunConfig, key: str) -> RowPlan:
    """Return the plan by which the samples of `train_file` or an evaluation file become rows."""
    objective, packing = get_objective(config), choose_packing(config)
    return RowPlan(
        max_seq_length=config.max_seq_length,
        packing=packing,
        mixture=parse_key(config, key).mixture,
        group_size=objective.group_size(config.data),
        companion="" if packing is Packing.NONE else objective.companion,
    )


def build_order(config: RunConfig, path: Path, num_samples: int, global_batch_size: int) -> GlobalOrder:
    """Return the order of the rows of `train_file`. path: its tokenized folder. num_samples: what the order shuffles,
    see `count_rows`."""
    lengths = GroupLengths(path, build_row_plan(config, "train_file")) if config.data.group_by_length else None
    return GlobalOrder(num_samples, global_batch_size, config.seed, lengths=lengths)


def complete_labels(config: RunConfig, model: PretrainedConfig) -> RunConfig:
    """Return the config with the names of all labels in `data.labels`, where its kind of data has some: those given, or
    the model's, or those in the records of `train_file`. model: that the run starts from.

    Raises UserError where they cannot be found, or are not names of two labels at least.
    """
    data = config.data
    has_labels = "labels" in find_keys(find_kind(data.name)) and data.problem_type is not ProblemType.regression
    if not has_labels:
        return config
    if data.labels is not None:
        check_names(data)
        return config
    if find_head(model) is not None:
        names = [model.id2label[index] for index in range(model.num_labels)]
    elif config.evaluate_only:  # which needs a model that has them
        return config
    elif data.encoder is not None:
        raise UserError(f"data.encoder makes the labels of data={data.name}; name all of them in data.labels")
    else:
        names = find_labels(list_entries(config, "train_file"), data, build_selection(data, "train_file"))
    return replace(config, data=replace(data, labels=names))


def list_entries(config: RunConfig, key: str) -> list[str]:
    """Return the files, globs and hub names of `train_file` or an evaluation file."""
    return parse_key(config, key).entries
