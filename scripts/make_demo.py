"""Makes what the demo trains: a small Llama with random weights, its tokenizer, and real text to learn from.

The text is question and answer pairs from the docstrings of Python's own library, read as source: nothing is imported,
nothing downloaded.

    python scripts/make_demo.py --output_dir outputs/demo      # model/ train.jsonl eval.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

os.environ["DS_ACCELERATOR"] = (
    "cpu"  # transformers imports DeepSpeed when it saves, which otherwise warns that it found no GPU
)
MODEL_CONFIG = Path(__file__).resolve().parent.parent / "conf" / "model" / "llama_tiny.yaml"
EVAL_RECORDS = 200
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "pydoc_data"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    output_dir = parser.parse_args().output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # of a file that takes no time

    records = list(read_docstrings(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(0).shuffle(records)
    write_jsonl(output_dir / "eval.jsonl", records[:EVAL_RECORDS])
    write_jsonl(output_dir / "train.jsonl", records[EVAL_RECORDS:])

    fields = yaml.safe_load(MODEL_CONFIG.read_text())
    tokenizer = train_tokenizer(records, fields["vocab_size"])
    tokenizer.save_pretrained(output_dir / "model")
    save_model(fields, tokenizer, output_dir / "model")
    print(f"{len(records):,} question and answer pairs from Python's docstrings, and a random Llama, in {output_dir}")


def read_docstrings(library: Path) -> Iterator[dict[str, str]]:
    """Yields {"prompt": "What does json.loads do?", "completion": first sentence of its docstring}."""
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS & set(parts) or any(part.startswith(("_", "config-")) for part in parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:
            continue
        yield from _describe(tree, ".".join(parts))


def _describe(node: ast.AST, name: str) -> Iterator[dict[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            child_name = f"{name}.{child.name}"
            sentence = first_sentence(ast.get_docstring(child) or "")
            if sentence:
                question = "What is" if isinstance(child, ast.ClassDef) else "What does"
                ending = "?" if isinstance(child, ast.ClassDef) else " do?"
                yield {"prompt": f"{question} {child_name}{ending}", "completion": sentence}
            yield from _describe(child, child_name)


def first_sentence(docstring: str) -> str:
    """Returns the first sentence in one line, without markup; empty if it is too short or too long to be an answer."""
    text = re.sub(r"\s+", " ", docstring.split("\n\n")[0]).strip()
    sentence = re.split(r"(?<=[.!?]) ", text)[0]
    return sentence if 15 <= len(sentence) <= 300 else ""


def write_jsonl(file: Path, records: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def train_tokenizer(records: list[dict[str, str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # it prints empty lines without a terminal
    )
    tokenizer.train_from_iterator((text for record in records for text in record.values()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def save_model(fields: dict[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **fields,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
