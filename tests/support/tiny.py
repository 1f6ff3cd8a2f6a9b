"""Tiny models, tokenizers and data sets for tests: random weights, real text."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.sample import IGNORE_INDEX, Sample

VOCAB_SIZE = 320


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the source of a standard module."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(inspect.getsource(textwrap).splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return fast


def save_llama(folder: Path, tied: bool = False, seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and rope scaling, in fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            **fields,
        }
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def find_tokenized(workdir: Path) -> list[Path]:
    """The folders of the data that the runs of `workdir` have tokenized; compiled code lies next to them."""
    return [file.parent for file in (workdir / "cache").glob("*/offset.bin")]


def save_records(file: Path, count: int, seed: int = 0) -> Path:
    """Prompt/completion records of very different lengths, from real text."""
    words = inspect.getsource(json).split()
    generator = torch.Generator().manual_seed(seed)
    with open(file, "w") as handle:
        for _ in range(count):
            start, prompt, completion = (
                int(torch.randint(low, high, (), generator=generator))
                for low, high in [(0, len(words) - 60), (1, 10), (1, 24)]
            )
            record = {
                "prompt": " ".join(words[start : start + prompt]),
                "completion": " ".join(words[start + prompt : start + prompt + completion]),
            }
            handle.write(json.dumps(record) + "\n")
    return file


def save_pairs(file: Path, count: int, seed: int = 0) -> Path:
    """Preferences of very different lengths, from real text: the text after a prompt against text from elsewhere."""
    words = inspect.getsource(json).split()
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    with open(file, "w") as handle:
        for _ in range(count):
            start, prompt, elsewhere = draw(0, len(words) - 60), draw(1, 10), draw(0, len(words) - 60)
            record = {
                "prompt": " ".join(words[start : start + prompt]),
                "chosen": " ".join(words[start + prompt : start + prompt + draw(1, 24)]),
                "rejected": " ".join(words[elsewhere : elsewhere + draw(1, 24)]),
            }
            handle.write(json.dumps(record) + "\n")
    return file


def read_runs(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """Returns the sample as runs of ("masked" or "loss", decoded text). Labels are -100 or the token itself."""
    runs: list[tuple[str, list[int]]] = []
    for token, label in zip(sample["input_ids"], sample["labels"], strict=True):
        assert label in (IGNORE_INDEX, token)
        kind = "masked" if label == IGNORE_INDEX else "loss"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(token)
    return [(kind, tokenizer.decode(tokens)) for kind, tokens in runs]
