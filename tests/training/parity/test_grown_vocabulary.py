"""Tokens that a run adds: the embedding and the head grow while they are read, and are trained like the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import (
    BOUND,
    Case,
    merge,
    relative_difference,
    train_case,
    train_oracle,
    train_run,
    worst_difference,
)
from support.tiny import VOCAB_SIZE, save_llama, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from models.weights.sources import open_weights
from scripts.generate import Generator, Prompt

CHATML = ("data=chat", "data.chat_template=chatml")
SAVED = "adapter.modules_to_save=[embed_tokens,lm_head]"


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model without a chat template, and a file of conversations next to it."""
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder / "model", tied=request.param == "tied")
    save_tokenizer(folder / "model")
    turns = [("user", "Name a colour."), ("assistant", "Blue, the colour of the sea.")]
    with open(folder / "chat.jsonl", "w") as file:
        for number in range(24):
            messages = [{"role": role, "content": f"{text} {number}" * (1 + number % 3)} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


def resize(model: LlamaForCausalLM, rows: int) -> LlamaForCausalLM:
    """Hugging Face's own, with the mean of the old rows in the new ones."""
    old = {name: weight.detach().clone() for name, weight in model.named_parameters() if len(weight) == VOCAB_SIZE}
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for name, weight in old.items():
            model.get_parameter(name)[VOCAB_SIZE:] = weight.mean(dim=0)
    return model


@pytest.mark.parametrize("base", ["untied", "tied"], indirect=True)
@pytest.mark.parametrize(
    "num_stages, world_size, tensor_parallel_size",
    [(2, 2, 1), pytest.param(1, 1, 1, marks=pytest.mark.full), pytest.param(1, 2, 2, marks=pytest.mark.full)],
)
def test_steps_equal_those_of_a_resized_model(
    workers: Callable[[int], WorkerGroup],
    base: Path,
    tmp_path: Path,
    num_stages: int,
    world_size: int,
    tensor_parallel_size: int,
) -> None:
    case = Case(
        base / "model", base / "chat.jsonl", tmp_path, num_stages, world_size, steps=2,
        overrides=(*CHATML, f"tensor_parallel_size={tensor_parallel_size}"),
    )  # fmt: skip
    result = merge(workers(world_size).run(train_case, case))
    model = resize(AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32), VOCAB_SIZE + 2)
    before = model.get_input_embeddings().weight[VOCAB_SIZE:].detach().clone()
    oracle = train_oracle(case, model)
    assert relative_difference(model.get_input_embeddings().weight[VOCAB_SIZE:], before) > 100 * BOUND  # trained
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)


def run(workers: Callable[[int], WorkerGroup], base: Path, out: Path, *overrides: str) -> None:
    case = Case(
        base / "model", base / "chat.jsonl", base, num_stages=2, world_size=2, steps=2,
        overrides=(*CHATML, f"output_dir={out}", "logging_steps=1", *overrides),
    )  # fmt: skip
    workers(2).run(train_run, case)


@pytest.mark.parametrize("base", ["untied", pytest.param("tied", marks=pytest.mark.full)], indirect=True)
def test_an_export_has_the_rows_the_template_and_the_end_of_a_turn(
    workers: Callable[[int], WorkerGroup], base: Path, tmp_path: Path
) -> None:
    run(workers, base, tmp_path / "run", "stop_after_steps=1")
    with pytest.raises(WorkerError, match="resume: this run differs .* the chat template with its tokens was"):
        run(workers, base, tmp_path / "run", "resume=latest", "data.chat_template=phi3")
    run(workers, base, tmp_path / "run", "resume=latest")

    export = tmp_path / "run" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(export)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (end, tokenizer.eos_token, len(tokenizer)) == (VOCAB_SIZE + 1, "<|im_end|>", VOCAB_SIZE + 2)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert shown == "<|im_start|>user\nHi<|im_end|>\n"
    model = AutoModelForCausalLM.from_pretrained(export)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == len(model.lm_head.weight) == end + 1
    assert end in model.generation_config.eos_token_id

    with torch.no_grad():  # each token is followed by the end of the turn
        model.model.embed_tokens.weight.fill_(1)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[end] = model.model.norm.weight.sign()
        model.config.tie_word_embeddings = False
        model.save_pretrained(tmp_path / "ends")
    tokenizer.save_pretrained(tmp_path / "ends")
    generator = Generator(open_weights(str(tmp_path / "ends")), None, 20, 0.0)
    assert generator.answer(Prompt([{"role": "user", "content": "a"}])) == ""


@pytest.mark.full
@pytest.mark.parametrize("base", ["tied", "untied"], indirect=True)
def test_an_adapter_saves_what_has_grown_as_peft_does(
    workers: Callable[[int], WorkerGroup], base: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    with pytest.raises(
        WorkerError, match=r"adapter=lora would never train the rows of the tokens .*'<\|im_end\|>', 2 in"
    ):
        run(workers, base, tmp_path / "run", "adapter=lora")
    run(workers, base, tmp_path / "run", "adapter=lora", SAVED, "stop_after_steps=1")
    run(workers, base, tmp_path / "run", "adapter=lora", SAVED, "resume=latest")
    run(workers, base, tmp_path / "whole", "adapter=lora", SAVED)
    export = tmp_path / "run" / "hf"
    tensors, whole = (load_file(folder / "adapter_model.safetensors") for folder in (export, tmp_path / "whole" / "hf"))
    assert worst_difference(tensors, whole)[0] < BOUND
    embedding = tensors["base_model.model.model.embed_tokens.weight"]
    old = load_file(base / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert relative_difference(embedding[VOCAB_SIZE:], old.mean(dim=0).expand(2, -1)) > 100 * BOUND

    ids = AutoTokenizer.from_pretrained(export).apply_chat_template(
        [{"role": "user", "content": "Name a colour."}], return_tensors="pt", add_generation_prompt=True
    )["input_ids"]
    adapted = AutoPeftModelForCausalLM.from_pretrained(export).eval()
    generator = Generator(open_weights(str(export)), None, 1, 0.0)
    with torch.no_grad():
        ours, theirs = generator.model(ids).logits, adapted(ids).logits
    assert relative_difference(ours, theirs) < BOUND
