"""A small model that is trained on conversations ends each turn by itself, where the turn ends.

Templates of which earlier turns are rewritten, or end where the next one begins. Plain PyTorch in one process: what is
under test are the samples.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.chat_families import FAMILIES, assistant, calls, judge, result, user
from test_template_families import build_tokenizer
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from data.encoders.chat import ChatEncoder
from data.sample import IGNORE_INDEX, Sample

STEPS = 200
WORDS = ("Oslo", "Rome", "Bern", "Lima", "Kyiv", "Riga", "Doha", "Baku", "Cork", "Perm")


def build_called(word: str) -> list[dict]:
    return [user(f"{word}?"), calls("here"), result("rain"), assistant("Rain."), user("Thanks."), assistant("Bye.")]


def build_thoughts(word: str) -> list[dict]:
    return [user(f"{word}?"), assistant("Yes.", "It is."), user("Thanks."), assistant("Bye.", "It ends.")]


def train(samples: list[Sample], vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    model, length, draw = LlamaForCausalLM(config), max(len(each["input_ids"]) for each in samples), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        chosen = [draw.choice(samples) for _ in range(4)]
        input_ids = torch.tensor([pad(each["input_ids"], 0, length) for each in chosen])  # [B, T]
        labels = torch.tensor([pad(each["labels"], IGNORE_INDEX, length) for each in chosen])
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def pad(tokens: list[int], value: int, length: int) -> list[int]:
    return tokens + [value] * (length - len(tokens))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "build"), [("Qwen3", build_thoughts), ("gpt-oss", build_thoughts), ("GLM-4.5", build_called)]
)
def test_generation_ends_where_the_turn_ends(name: str, build: Any) -> None:
    family, tokenizer = FAMILIES[name], build_tokenizer(name)
    samples: list[Sample] = []
    for word in WORDS:
        made = ChatEncoder(stop_tokens=family.stops).encode({"messages": build(word)}, "a.jsonl:1", tokenizer)
        samples += made if isinstance(made, list) else [made]
    model = train(samples, len(tokenizer))
    ends = tokenizer.convert_tokens_to_ids([family.eos, *family.stops])
    for word in WORDS:
        prompt, expected = judge(family, {"messages": build(word)}, tokenizer)[0]
        input_ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=150,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        assert tokenizer.decode(output[0, input_ids.shape[1] :]) == expected
