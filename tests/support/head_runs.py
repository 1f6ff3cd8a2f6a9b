"""Models with another head than the LM head, in tests: the class of transformers that a run starts from, with the head
that the run draws; and documents with labels."""

from __future__ import annotations

import calendar
import inspect
import json
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from support.cases import BOUND, Case, worst_difference
from support.objective_runs import check_steps, find_dataset, train_plainly
from support.tiny import save_pairs
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from data.storage.tokenized import TokenizedDataset
from models.architecture.lookup import build_layers
from models.weights.edits import edit_weights
from models.weights.new_head import choose_head
from models.weights.sources import open_weights
from training.inputs.datasets import complete_labels
from training.objectives.registry import get_objective

NAMES = ("calendar", "json", "textwrap")  # modules, by whose source a text is labelled
WORDS = ("return", "self")  # by which a text has one of two other labels, or both
KEYWORDS = ("the", "a", "is", "if", "for", "of")  # with the word after it, an entity
AUTO = {auto.__name__: auto for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification)}


def load_oracle(case: Case) -> PreTrainedModel:
    """Load transformers' own class, with the head that the run initializes."""
    source = open_weights(case.config().model_name_or_path)
    config = complete_labels(case.config(), source.config)
    objective = get_objective(config)
    assert objective.head is not None
    labels = objective.name_labels(config.data)
    with_head = edit_weights(source, choose_head(source, objective.head, labels, config.seed))
    tensors = {
        layer.hf_prefix + name: tensor.clone()
        for index, layer in enumerate(build_layers(with_head.config))
        for name, tensor in with_head.read_layer(index, layer).items()
    }
    auto = AUTO[objective.head.loaded_with]
    model = auto.from_config(with_head.config, dtype=torch.float32)
    model.load_state_dict(tensors)
    return model


def load_with_adapter(
    base: Path, folder: Path, num_labels: int, auto: Any = AutoModelForSequenceClassification
) -> torch.nn.Module:
    """Load an exported adapter as users of peft do: on the base model, whose new head it replaces."""
    torch.manual_seed(7)
    model = auto.from_pretrained(base, num_labels=num_labels, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def save_documents(file: Path, count: int, seed: int = 0) -> Path:
    """Real text of very different lengths from three modules. label: the module; labels: which words it has, maybe
    none; number: the share of its spaces."""
    modules = [inspect.getsource(module).split() for module in (calendar, json, textwrap)]
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    with open(file, "w") as handle:
        for number in range(count):
            kind = number % len(NAMES)
            start = draw(0, len(modules[kind]) - 40)
            text = " ".join(modules[kind][start : start + draw(1, 40)])
            record = {
                "text": text,
                "label": NAMES[kind],
                "labels": [word for word in WORDS if word in text],
                "number": text.count(" ") / 20,
                "numbers": [text.count(" ") / 20, kind],
            }
            handle.write(json.dumps(record) + "\n")
    return file


def save_words(file: Path, count: int, seed: int = 0) -> Path:
    """Real text in words: a keyword and the word after it are an entity."""
    text = inspect.getsource(json).split()
    generator = torch.Generator().manual_seed(seed)
    with open(file, "w") as handle:
        for _ in range(count):
            start, length = (
                int(torch.randint(low, high, (), generator=generator)) for low, high in ((0, 900), (2, 30))
            )
            words = text[start : start + length]
            keys = [word in KEYWORDS for word in words]
            labels = [
                "B-KEY" if is_key else "I-KEY" if number and keys[number - 1] else "O"
                for number, is_key in enumerate(keys)
            ]
            handle.write(json.dumps({"words": words, "labels": labels}) + "\n")
    return file


def save_steps(file: Path, count: int) -> Path:
    """Prompts, each with steps of real text, of which the last is from elsewhere, and wrong."""
    with open(file, "w") as handle:
        for line in save_pairs(file.with_suffix(".pairs"), count).read_text().splitlines():
            pair = json.loads(line)
            right, wrong = (pair[name].split()[:9] for name in ("chosen", "rejected"))
            steps = [" ".join(words) for words in (right[:3], right[3:], wrong) if words]
            labels = [True] * (len(steps) - 1) + [False]
            record = {"prompt": pair["prompt"][:60], "completions": steps, "labels": labels}
            handle.write(json.dumps(record) + "\n")
    return file


def pad_documents(rows: Sequence[Any], pad: int) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask [B, T] of documents, padded on the right. rows: token ids of each."""
    tensors = [torch.as_tensor(row.astype("int64")) for row in rows]
    stack = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": stack(tensors, batch_first=True, padding_value=pad),
        "attention_mask": stack([torch.ones_like(row) for row in tensors], batch_first=True),
    }


def read_token_batch(dataset: TokenizedDataset, ids: list[int]) -> dict[str, torch.Tensor]:
    """Return a padded batch whose labels are where transformers has them: at the tokens themselves."""
    batch = pad_documents([dataset.input_ids(i) for i in ids], 0)
    labels = torch.full_like(batch["input_ids"], -100)
    for row, i in enumerate(ids):
        own = torch.from_numpy(dataset.labels(i)[1:].astype("int64"))
        labels[row, : len(own)] = own
    return batch | {"labels": labels}


def train_documents(
    case: Case,
    model: torch.nn.Module,
    compute_step: Callable[[TokenizedDataset, list[int]], tuple[torch.Tensor, dict[str, float]]],
) -> dict[str, Any]:
    """`train_plainly` on the documents of all rows of a global batch at once, packed or not."""
    return train_plainly(case, model, partial(compute_step, find_dataset(case.workdir)))


def train_token_oracle(case: Case, model: torch.nn.Module) -> dict[str, Any]:
    """Without the dropout before the scores."""

    def compute_step(dataset: TokenizedDataset, ids: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
        batch = read_token_batch(dataset, ids)
        found, has_label = model.eval()(**batch), batch["labels"] != -100
        is_right = (found.logits.argmax(dim=2) == batch["labels"])[has_label]
        return found.loss, {"accuracy": is_right.double().mean().item()}

    return train_documents(case, model, compute_step)


def check_adapter_steps(result: dict[str, Any], oracle: dict[str, Any]) -> None:
    """`check_steps`, and the weights of an adapter and of the head that is trained with it. oracle: of peft's model."""
    check_steps(result, oracle, weights=False)
    expected = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): tensor
        for name, tensor in oracle["weights"].items()
        if "lora_" in name or "modules_to_save" in name
    }
    worst, name = worst_difference({name: result["weights"][name] for name in expected}, expected)
    assert worst < BOUND, name


def save_queries(file: Path, count: int, seed: int = 0) -> Path:
    """Real text of very different lengths: some words of a text as the query, the text, and texts from elsewhere."""
    words = inspect.getsource(json).split()
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def cut() -> list[str]:
        start = draw(0, len(words) - 60)
        return words[start : start + draw(4, 30)]

    with open(file, "w") as handle:
        for _ in range(count):
            text = cut()
            record = {
                "query": " ".join(text[: draw(2, len(text))]),
                "positive": " ".join(text),
                "negatives": [" ".join(cut()) for _ in range(3)],
            }
            handle.write(json.dumps(record) + "\n")
    return file


def read_text(dataset: TokenizedDataset, number: int) -> torch.Tensor:
    """Return the tokens of a sample, [1, T]."""
    return torch.from_numpy(dataset.input_ids(number).astype("int64"))[None]
