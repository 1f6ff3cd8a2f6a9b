"""A small model that is trained on conversations ends each turn by itself, where the turn ends.

Templates of which earlier turns are rewritten, or end where the next one begins. Plain PyTorch in one process, where
the samples are under test; and once from records to answers, through the launcher and scripts/generate.py.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_families import FAMILIES, Family, assistant, build_tokenizer, calls, judge, result, user
from support.launching import ROOT, run, run_deepspeed
from support.tiny import save_llama
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


def encode(family: Family, build: Any, tokenizer: Any) -> list[Sample]:
    samples: list[Sample] = []
    for word in WORDS:
        made = ChatEncoder(stop_tokens=family.stops).encode({"messages": build(word)}, "a.jsonl:1", tokenizer)
        samples += made if isinstance(made, list) else [made]
    return samples


def generate(model: LlamaForCausalLM, prompt: str, tokenizer: Any, ends: list[int]) -> str:
    """Returns what the model writes, with the token at which it stopped."""
    input_ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=150,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    return tokenizer.decode(output[0, input_ids.shape[1] :])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "build"), [("Qwen3", build_thoughts), ("gpt-oss", build_thoughts), ("GLM-4.5", build_called)]
)
def test_generation_ends_where_the_turn_ends(name: str, build: Any) -> None:
    family, tokenizer = FAMILIES[name], build_tokenizer(name)
    model = train(encode(family, build, tokenizer), len(tokenizer))
    ends = tokenizer.convert_tokens_to_ids([family.eos, *family.stops])
    for word in WORDS:
        for prompt, expected in judge(family, {"messages": build(word)}, tokenizer):
            assert generate(model, prompt, tokenizer, ends) == expected


@pytest.mark.full
def test_a_model_that_is_not_trained_on_stop_tokens_does_not_end() -> None:
    """As before the rule, when what begins the next turn of GLM was no target of the turn before."""
    family, tokenizer = FAMILIES["GLM-4.5"], build_tokenizer("GLM-4.5")
    ends = tokenizer.convert_tokens_to_ids([family.eos, *family.stops])
    samples = encode(family, build_called, tokenizer)
    for sample in samples:
        sample["labels"] = [IGNORE_INDEX if label in ends else label for label in sample["labels"]]
    model = train(samples, len(tokenizer))
    for word in WORDS:
        prompt, expected = judge(family, {"messages": build_called(word)}, tokenizer)[0]
        written = generate(model, prompt, tokenizer, ends)
        assert written.startswith(expected.removesuffix(family.call_stop)) and not written.startswith(expected)


@pytest.mark.full
def test_a_launched_run_exports_a_model_that_ends_its_turns(tmp_path: Path) -> None:
    """No generation_config.json says where GLM's turns end: the run finds it out, trains on it and exports it."""
    family, tokenizer = FAMILIES["GLM-4.5"], build_tokenizer("GLM-4.5")
    save_llama(
        tmp_path / "base",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        bos_token_id=None,
    )
    (tmp_path / "base" / "generation_config.json").unlink()
    tokenizer.save_pretrained(tmp_path / "base")
    conversations = [build_called(word) for word in WORDS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    paths = (f"model_name_or_path={tmp_path}/base", f"train_file={tmp_path}/train.jsonl", f"output_dir={tmp_path}/out")
    keys = ("-cn", "llama_tiny_pp2", "num_stages=2", "data=chat", "eval_file=null", "max_seq_length=512")
    keys += ("micro_batch_size=2", "global_batch_size=4", f"max_steps={STEPS}", "learning_rate=5e-3", "warmup_ratio=0")
    keys += ("lr_scheduler_type=constant", f"data.cache_dir={tmp_path}/cache", "precision=fp32")
    ended = run_deepspeed([*keys, *paths], tmp_path)
    assert ended.code == 0, ended.output

    turns = [index for index, turn in enumerate(conversations[0]) if turn["role"] == "assistant"]
    prompts = [{"messages": each[:index]} for each in conversations for index in turns]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    asked = ["--model_name_or_path", f"{tmp_path}/out/hf", "--prompt_file", f"{tmp_path}/prompts.jsonl"]
    asked += ["--output", f"{tmp_path}/answers.jsonl", "--template_kwargs", "{enable_thinking: false}"]
    answered = run([sys.executable, str(ROOT / "scripts" / "generate.py"), *asked, "--max_new_tokens", "150"], tmp_path)
    assert answered.code == 0, answered.output
    found = [json.loads(line)["messages"][-1]["content"] for line in (tmp_path / "answers.jsonl").open()]
    expected = [target for each in conversations for _, target in judge(family, {"messages": each}, tokenizer)]
    ids = [tokenizer(target, add_special_tokens=False)["input_ids"] for target in expected]
    assert found == [tokenizer.decode(each, skip_special_tokens=True).strip() for each in ids]
