"""The names of tokenized folders: our encoders are named by their kind and a format version, not by their source.

`formats.json` holds, of each kind, the version of its format, the defaults of its options and a hash of the samples
that it makes of the records below. Where a change gives other samples, raise `format_version` of the kind
(`data/encoders/kinds.py`) and write the file again, from the repository's folder:

    PYTHONPATH=.:tests python tests/data/encoders/test_encoder_formats.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.encoders.kinds import KINDS, describe_encoder
from data.sources.formats import RawRecord
from data.storage.cache import FORMAT_VERSION
from data.storage.encoding import Encoding, encode_batch

ROOT = Path(__file__).parents[3]
FORMATS = Path(__file__).with_name("formats.json")
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGES_TOO = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text or '<pad>' }}{% endfor %}{% endif %}",
)
QUESTION, ANSWER = "How many legs has a spider?", "Eight."
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
ANSWERED = [*ASKED, {"role": "assistant", "content": ANSWER}]
LONGER = [
    *ANSWERED,
    {"role": "user", "content": "And an ant? <|im_end|>"},
    {"role": "assistant", "content": "<think>insect</think>Six."},
]
PIXELS = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAwAAAAICAIAAABChommAAAAHklEQVR42mM8IWfDQAgwMRABaKHI4uERXIoY"
    "6etwANJuBDCm8bnPAAAAAElFTkSuQmCC"
)
SEEN = [{"type": "text", "text": "What is it? "}, {"type": "image", "image": PIXELS}]
PAIR = {"prompt": QUESTION, "chosen": ANSWER, "rejected": "Nine."}
FOUND = {"query": QUESTION, "positive": ANSWER}
RECORDS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": QUESTION, "completion": ANSWER}, {"messages": LONGER}],
    "chat": [{"messages": ANSWERED}, {"messages": LONGER}, {"prompt": ASKED, "completion": ANSWERED[-1:]}],
    "image_chat": [{"messages": ANSWERED}, {"messages": [{"role": "user", "content": SEEN}, ANSWERED[-1]]}],
    "pretrain": [{"text": QUESTION}, {"text": "a</s>b"}],
    "preference": [PAIR, {"prompt": ASKED, "chosen": ANSWERED[-1:], "rejected": LONGER[-1:]}],
    "unpaired_preference": [{"prompt": QUESTION, "completion": ANSWER, "label": label} for label in (True, False)],
    "classification": [{"text": QUESTION, "label": "large"}, {"text": ANSWER, "label": "small"}],
    "process_reward": [{"prompt": QUESTION, "completions": ["Count them.", ANSWER], "labels": [False, True]}],
    "embedding": [FOUND, {"query": ANSWER, "positive": "Six."}],
    "rerank": [FOUND, {"query": ANSWER, "positive": "Six."}],
    "token_classification": [{"words": ["A", "spider", "runs"], "labels": ["small", "large", "small"]}],
}
NAMED = {"classification", "token_classification"}  # kinds that need the names of their classes


def build_tokenizer(folder: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, which no library has to train. folder: of a model that reads images, to be made; empty for
    none."""
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHATML
    )
    if folder:
        config = {"model_type": "qwen2_5_vl", "image_token_id": SPECIAL_TOKENS.index("<pad>")}
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 784, "longest_edge": 3136},
        }
        for name, content in (("config", config), ("preprocessor_config", processor)):
            (Path(folder) / f"{name}.json").write_text(json.dumps(content))
        tokenizer.name_or_path, tokenizer.chat_template = folder, IMAGES_TOO
    return tokenizer


def build_encoder(name: str) -> Any:
    return KINDS[name].encoder(**({"labels": ("small", "large")} if name in NAMED else {}))


def build_encodings() -> dict[str, Encoding]:
    with_images = build_tokenizer(tempfile.mkdtemp())
    tokenizers = {name: with_images if name == "image_chat" else build_tokenizer() for name in KINDS}
    return {
        name: Encoding(
            encoder,
            tokenizers[name],
            4096,
            samples_per_record=KINDS[name].count_samples(encoder),
            label_key=KINDS[name].label_key,
        )
        for name, encoder in ((name, build_encoder(name)) for name in KINDS)
    }


def describe_format(name: str, encoding: Encoding) -> dict[str, Any]:
    kind, encoder = KINDS[name], encoding.encoder
    raw = [RawRecord(f"{name}:{number}", json.dumps(each)) for number, each in enumerate(RECORDS[name], start=1)]
    columns = encode_batch(raw, encoding).columns
    content = [f"{column} {values.dtype} {values.tolist()}" for column, values in sorted(columns.items())]
    defaults: dict[str, Any] = {}
    for option in fields(encoder):  # type: ignore[arg-type]
        default = option.default if option.default_factory is MISSING else option.default_factory()
        defaults[option.name] = str(default)
    return {
        "version": f"{FORMAT_VERSION}.{kind.format_version}",
        "options": defaults,
        "samples": xxhash.xxh3_64_hexdigest("\n".join(content).encode()),
    }


@pytest.mark.parametrize("name", KINDS)
def test_a_format_changes_with_its_version_alone(name: str) -> None:
    found, stored = describe_format(name, build_encodings()[name]), json.loads(FORMATS.read_text())[name]
    assert found["version"] == stored["version"], "write formats.json again, see above"
    # An option may be added: samples made without it are those of its default.
    kept = {option: found["options"].get(option) for option in stored["options"]}
    assert (kept, found["samples"]) == (stored["options"], stored["samples"]), (
        "raise format_version, or FORMAT_VERSION where all kinds changed; see above"
    )


def test_moving_and_editing_our_files_changes_no_key(tmp_path: Path) -> None:
    for name in ("data", "extensions"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "data/encoders/chat.py").rename(tmp_path / "data/encoders/conversations.py")
    for file in [*tmp_path.glob("data/**/*.py"), *tmp_path.glob("extensions/**/*.py")]:
        source = file.read_text().replace("data.encoders.chat import", "data.encoders.conversations import")
        file.write_text(f"{source}\nEDITED = True\n")
    program = (
        "import json; from test_encoder_formats import build_encodings as build; "
        "print(json.dumps({name: each.compute_key([]) for name, each in build().items()}))"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    keys = {name: each.compute_key([]) for name, each in build_encodings().items()}
    assert json.loads(ran.stdout.splitlines()[-1]) == keys and len(set(keys.values())) == len(KINDS)


def test_an_option_counts_where_it_is_not_the_default() -> None:
    kind = KINDS["preference"]
    assert describe_encoder(kind.encoder()) == ["preference", 2, {}]
    assert describe_encoder(kind.encoder(chosen_field="text", prompt_field=None)) == [
        "preference", 2, {"prompt_field": "null", "chosen_field": '"text"'}
    ]  # fmt: skip


if __name__ == "__main__":
    formats = {name: describe_format(name, encoding) for name, encoding in build_encodings().items()}
    FORMATS.write_text(json.dumps(formats, indent=1) + "\n")
