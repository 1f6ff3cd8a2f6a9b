"""Makes the small model of a proof, an adapter of it, and tokens: at random, and the same on every host."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from data.encoders.kinds import find_kind
from data.options import Packing
from data.sample import IGNORE_INDEX
from data.storage.cache import lock_folder
from data.storage.rows import RowPlan, prepare_rows
from data.storage.summary import Summary
from data.storage.tokenized import TokenizedWriter
from extensions.proof.small_run import derive_config
from filesystem import make_temporary, publish_folder
from models.adapters.build import build_adapter
from models.adapters.folder import name_for_peft
from models.adapters.options import AdapterOptions
from models.architecture.lookup import build_layers
from models.generic.shrink import build_small
from training.config.schema import RunConfig
from training.inputs.datasets import build_row_plan

VERSION = 1  # raise it when the same config gives other files
FIRST_TOKEN = 3  # those before it are often special
MIN_TOKENS = 8  # of a sample


def find_material(config: RunConfig, num_ranks: int, small: PretrainedConfig) -> Path:
    """Return the folder with model, adapter and tokens of a proof, next to the tokenized data. config: the user's.
    small: the config of the small model."""
    plan, rows = _plan_rows(config, num_ranks)
    state = (VERSION, small.to_json_string(use_diff=False), repr(plan), rows, repr(config.adapter), config.data.name)
    return Path(config.data.cache_dir).expanduser() / "proofs" / hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def write_material(folder: Path, config: RunConfig, num_ranks: int, small: PretrainedConfig) -> None:
    """Write the folder of `find_material`, unless another process has. Called before the ranks join: in a process group
    `transformers` saves on rank 0 alone."""
    plan, rows = _plan_rows(config, num_ranks)
    with lock_folder(folder, lambda text: None):
        if not folder.is_dir():
            temporary = make_temporary(folder)
            save_model(temporary, small, config.adapter)
            save_tokens(temporary / "tokens", plan, rows, small.vocab_size, find_kind(config.data.name).concatenates)
            publish_folder(temporary, folder)


def _plan_rows(config: RunConfig, num_ranks: int) -> tuple[RowPlan, int]:
    """Return how samples make rows, and how many a step has at most."""
    derived = derive_config(config, num_ranks, Path())
    assert derived.micro_batch_size is not None and derived.gradient_accumulation_steps is not None
    rows = derived.micro_batch_size * derived.gradient_accumulation_steps * num_ranks
    return build_row_plan(derived, "train_file"), rows


def save_model(folder: Path, small: PretrainedConfig, options: AdapterOptions) -> None:
    """Save a model with random weights and a tokenizer, and an adapter. Both matrices of it are random: in a new one B
    is 0, and so is the gradient of A."""
    model, _ = build_small(copy.deepcopy(small))
    model.save_pretrained(folder / "model")
    build_tokenizer(small.vocab_size).save_pretrained(folder / "model")
    adapter = build_adapter(options, build_layers(copy.deepcopy(small)), seed=0, base_name="model")
    if adapter is not None:
        from peft import get_peft_model  # it takes seconds

        lora = name_for_peft(adapter.config, model.config)
        lora.init_lora_weights = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            get_peft_model(model, lora).save_pretrained(str(folder / "adapter"))


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are the numbers of its tokens."""
    words = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2")


def save_tokens(folder: Path, plan: RowPlan, num_rows: int, vocab_size: int, is_text: bool) -> None:
    """Write samples of many lengths that make at least so many rows, or groups of rows, and the index of the rows.
    is_text: all tokens are targets, not those of an answer alone; samples that stay together have the same prompt."""
    draw = np.random.default_rng(0)
    per_row = 1 if plan.packing is Packing.NONE else plan.max_seq_length // MIN_TOKENS + 1
    columns: dict[str, Any] = {name: [] for name in ("input_ids", "labels", "length", "num_targets", "num_prompt")}
    for _ in range(num_rows * per_row):
        lengths = draw.integers(MIN_TOKENS, plan.max_seq_length // max(2, plan.group_size), plan.group_size)
        num_prompt = 0 if is_text else int(draw.integers(1, MIN_TOKENS // 2))
        prompt = draw.integers(FIRST_TOKEN, vocab_size, num_prompt)
        for length in lengths:
            tokens = np.concatenate([prompt, draw.integers(FIRST_TOKEN, vocab_size, length - num_prompt)])
            columns["input_ids"].append(tokens)
            columns["labels"].append(np.where(np.arange(length) < num_prompt, IGNORE_INDEX, tokens))
            columns["length"].append([length])
            columns["num_targets"].append([length - max(1, num_prompt)])
            columns["num_prompt"].append([num_prompt])
    folder.mkdir()
    written = {name: np.concatenate(parts).astype(np.int32) for name, parts in columns.items()}
    with TokenizedWriter(folder, 1) as writer:
        writer.append(written, 0)
        counts = {name: getattr(writer, name) for name in ("num_samples", "num_tokens", "num_targets")}
        writer.finish(Summary(**counts, fingerprints=writer.fingerprints))
    prepare_rows(folder, plan, "train_file", None)
