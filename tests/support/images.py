"""Tiny vision-language models, records about images that are made on the spot, and the plain model of `transformers`
next to them."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from support.cases import Case
from support.tiny import VOCAB_SIZE, find_tokenized
from support.wrapped import WRAPPED, save_wrapped
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

from data.order import GlobalOrder
from data.storage.rows import Rows, count_rows
from data.storage.tokenized import TokenizedDataset
from training.inputs.datasets import build_row_plan

TEMPLATE = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ 'A: ' + m.content }}</s>{%- else -%}Q: {% \
if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}\
{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{%- endif -%}{%- endfor -%}\
{%- if add_generation_prompt -%}{{ 'A: ' }}{%- endif -%}"""
SPECIAL = ["<pad>", "<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
# model_type -> the token of an image's vectors, what the template writes, fields of the model, its image processor
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "[IMG]",
        "[IMG]",
        {"spatial_merge_size": 2, "vision_feature_layer": -1},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 8},
    ),
    "internvl": (
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>\\n",
        {},
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "min_patches": 1,
            "max_patches": 3,
        },
    ),
}
# With larger weights rounding grows a thousandfold through the recurrent layers of Qwen 3.5
_CALM = {"text_config": WRAPPED["qwen3_5"]["text_config"] | {"initializer_range": 0.04}}
for name in ("qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"):
    FAMILIES[name] = (
        "<|image_pad|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        _CALM if name == "qwen3_5" else {},
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 256, "longest_edge": 4096},
            "patch_size": 8,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    )


def save_model(folder: Path, model_type: str) -> None:
    """Save a model with its tokenizer, chat template and image processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 8, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(inspect.getsource(textwrap).splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    token, written, fields, processor = FAMILIES[model_type]
    fast.chat_template = TEMPLATE.replace("IMAGE", written.replace("\\n", "{{ '\\n' }}"))
    save_wrapped(folder, model_type, image_token_id=fast.convert_tokens_to_ids(token), **fields)
    fast.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def save_image_records(folder: Path, count: int, seed: int = 0) -> Path:
    """Save records with none to three images of several sizes, some of them in the layout of LLaMA-Factory."""
    words, draw = inspect.getsource(json).split(), np.random.default_rng(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    file = folder / "train.jsonl"
    with open(file, "w") as lines:
        for number in range(count):
            paths = []
            for place in range(number % 4):
                path = folder / "pictures" / f"{number}_{place}.png"
                size = (*draw.integers(20, 90, 2), 3)
                Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(path)
                paths.append(str(path))
            start = int(draw.integers(0, len(words) - 60))
            asked, answer = " ".join(words[start : start + 5]), " ".join(words[start + 5 : start + 5 + 2 + number % 9])
            if number % 2:
                user = {"content": " ".join(["<image>"] * len(paths)) + asked}
                extra = {"images": paths}
            else:
                parts = [{"type": "image", "image": path} for path in paths]
                user, extra = {"content": [{"type": "text", "text": asked}, *parts]}, {}
            messages = [{"role": "user", **user}, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": messages, **extra}) + "\n")
    return file


def list_images(record: dict[str, Any]) -> list[str]:
    """Return the paths of a record's images."""
    parts = [part for part in record["messages"][0]["content"] if isinstance(part, dict) and part["type"] == "image"]
    return record.get("images") or [part["image"] for part in parts]


def load_plain(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def process(folder: Path, paths: list[str], model: Any) -> dict[str, torch.Tensor]:
    """Return what the model takes of images, by its own image processor."""
    if not paths:
        return {}
    side = 16 if model.config.model_type == "mistral3" else 8
    options = {"mistral3": {"patch_size": {"height": side, "width": side}}, "internvl": {"crop_to_patches": True}}
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [Image.open(path).convert("RGB") for path in paths]
    given = processor(images, return_tensors="pt", **options.get(model.config.model_type, {}))
    return {name: torch.as_tensor(value) for name, value in given.items() if name != "num_patches"}


def train_plain(case: Case, model: Any) -> dict[str, Any]:
    """Train the plain model on the case's samples, with the exact loss of each global batch."""
    config, batches = case.config(), Batches(case)
    for name, parameter in model.named_parameters():
        is_tower = any(part in name for part in ("vision_tower", "multi_modal_projector", ".visual."))
        parameter.requires_grad_(not is_tower)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=config.learning_rate)
    model.train()
    losses, norms = [], []
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = batches.measure(model, batches.list_samples(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))))
        losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "norms": norms, "weights": {name: p.detach() for name, p in model.named_parameters()}}


@torch.no_grad()
def measure_plain(case: Case, model: Any) -> float:
    """Return the mean loss of a target of all samples."""
    batches = Batches(case)
    return batches.measure(model.eval(), list(range(len(batches.records)))).item()


class Batches:
    """The samples of a case, of which each is that of the record of its number, with the images of the record."""

    def __init__(self, case: Case) -> None:
        self._case, config = case, case.config()
        self.records = [json.loads(line) for line in Path(config.train_file).read_text().splitlines()]
        (folder,) = find_tokenized(case.workdir)
        plan = build_row_plan(config, "train_file")
        self._dataset, self._rows = TokenizedDataset(folder, True, True), Rows(folder, plan, True, True)
        assert len(self._dataset) == len(self.records)
        self._order = GlobalOrder(count_rows(folder, plan), config.global_batch_size, config.seed)

    def list_samples(self, step: int) -> list[int]:
        """Return the samples of a global batch."""
        return [sample for row in self._order.sample_ids(step) for sample, _, _ in self._rows.pieces(int(row))]

    def measure(self, model: Any, samples: list[int]) -> torch.Tensor:
        """Return the mean loss of a target of samples."""
        total, targets = torch.zeros(()), 0
        for sample in samples:
            read = (self._dataset.input_ids, self._dataset.labels)
            ids, labels = (torch.from_numpy(each(sample).astype("int64"))[None] for each in read)
            images = process(self._case.model, list_images(self.records[sample]), model)
            logits = model(input_ids=ids, **images, **name_kinds(ids, model, images)).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
            targets += int((labels[0, 1:] != -100).sum())
        return total / targets


def name_kinds(ids: torch.Tensor, model: Any, images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return which tokens are an image's, as models with positions in three rows want to know."""
    if "image_grid_thw" not in images:
        return {}
    return {"mm_token_type_ids": (ids == model.config.image_token_id).int()}
