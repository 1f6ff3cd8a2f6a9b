"""Models with another head than the LM head, in tests: the class of transformers that a run starts from, with the head
that the run draws; and documents with labels."""

from __future__ import annotations

import calendar
import inspect
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from support.cases import Case
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from models.architecture.lookup import build_layers
from models.weights.new_head import add_head
from models.weights.sources import open_weights
from training.inputs.datasets import complete_labels
from training.objectives.registry import get_objective

NAMES = ("calendar", "json", "textwrap")  # modules, by whose source a text is labelled
WORDS = ("return", "self")  # by which a text has one of two other labels, or both


def load_oracle(case: Case) -> PreTrainedModel:
    """Load transformers' own class, with the head that the run initializes."""
    source = open_weights(case.config().model_name_or_path)
    config = complete_labels(case.config(), source.config)
    objective = get_objective(config)
    assert objective.head is not None
    labels = objective.name_labels(config.data)
    with_head = add_head(source, objective.head, labels, config.seed)
    tensors = {
        layer.hf_prefix + name: tensor.clone()
        for index, layer in enumerate(build_layers(with_head.config))
        for name, tensor in with_head.read_layer(index, layer).items()
    }
    model = AutoModelForSequenceClassification.from_config(with_head.config, dtype=torch.float32)
    model.load_state_dict(tensors)
    return model


def load_with_adapter(base: Path, folder: Path, num_labels: int) -> torch.nn.Module:
    """Load an exported adapter as users of peft do: on the base model, whose new head it replaces."""
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder).eval()


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


def pad_documents(rows: Sequence[Any], pad: int) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask [B, T] of documents, padded on the right. rows: token ids of each."""
    tensors = [torch.as_tensor(row.astype("int64")) for row in rows]
    stack = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": stack(tensors, batch_first=True, padding_value=pad),
        "attention_mask": stack([torch.ones_like(row) for row in tensors], batch_first=True),
    }
