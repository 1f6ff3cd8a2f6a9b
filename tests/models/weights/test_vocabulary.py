"""Tokenizers that cannot be read, and the end tokens that are added to a model's config files."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.configs import build_config
from support.mutations import mutate
from support.tiny import save_tokenizer

from errors import UserError
from models.weights.vocabulary import add_end, add_eos_token_id
from training.inputs.datasets import load_extended, prepare_file
from training.objectives.registry import get_objective


@pytest.mark.parametrize(
    "ids, token_id, ends",
    [(None, None, None), (None, 7, 7), (7, 7, 7), (1, 7, [1, 7]), ([1, 7], 7, [1, 7]), ([1], 7, [1, 7]), (1, None, 1)],
)
def test_an_end_token_is_added_once(
    ids: int | list[int] | None, token_id: int | None, ends: int | list[int] | None
) -> None:
    assert add_end(ids, token_id) == ends


def test_a_file_is_written_only_where_something_is_new(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    add_eos_token_id(file, 7)
    assert not file.exists()
    file.write_text('{"eos_token_id":1,"x":2}')
    add_eos_token_id(file, 1)
    assert file.read_text() == '{"eos_token_id":1,"x":2}'
    add_eos_token_id(file, 7)
    assert json.loads(file.read_text()) == {"eos_token_id": [1, 7], "x": 2}


def truncate(file: Path) -> None:
    file.write_text(file.read_text()[:1000])


def replace_field(name: str, value: object) -> Callable[[Path], None]:
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), name: value})) and None


def rewrite(text: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(text) and None


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("tokenizer.json", truncate, "{file} is not valid JSON (line 54: "),
        ("tokenizer.json", rewrite(""), "{file} is not valid JSON (line 1: "),
        ("tokenizer.json", rewrite("[]"), "{file} holds a JSON list instead of an object"),
        (
            "tokenizer.json",
            rewrite("{}"),
            "{file}, field 'model': the tokenizer cannot be read ('added_tokens'); fetch",
        ),
        ("tokenizer.json", replace_field("decoder", 3), "{file}, field 'decoder': the tokenizer cannot be read (data"),
        ("tokenizer_config.json", replace_field("eos_token", []), "{file}, field 'eos_token': the tokenizer cannot be"),
        (
            "tokenizer_config.json",
            replace_field("model_max_length", ["a"]),
            "the tokenizer of {file.parent}: model_max_length is ['a'] in its tokenizer_config.json, not a number; ",
        ),
        ("tokenizer_config.json", rewrite("{"), "{file} is not valid JSON (line 1: "),
        ("tokenizer.json", Path.unlink, "no tokenizer in {file.parent} (Couldn't instantiate the backend"),
    ],
)
def test_a_malformed_tokenizer_is_one_line_that_names_the_file(
    name: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / name
    damage(file)
    with pytest.raises(UserError) as caught:
        load_extended(build_config(f"tokenizer_name_or_path={tmp_path}"), "elsewhere")
    assert str(caught.value).startswith(message.format(file=file)) and "\n" not in str(caught.value)


SETTINGS = {
    "special_tokens_map.json": {"bos_token": "<s>", "pad_token": {"content": "<pad>", "lstrip": False}},
    "added_tokens.json": {"<s>": 1},
}
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
RECORD = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "it is <s> </s>"}]}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_tokenizer_that_a_stranger_wrote_is_read_or_refused_within_seconds(seed: int, tmp_path: Path) -> None:
    """By what a run does with it: it is opened, tokenizes a chat, and is saved."""
    rng, source = random.Random(seed), tmp_path / "source"
    tokenizer = save_tokenizer(source)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(source)
    for name, fields in SETTINGS.items():
        (source / name).write_text(json.dumps(fields))
    (tmp_path / "chat.jsonl").write_text(json.dumps(RECORD))
    files = ["tokenizer.json", "tokenizer_config.json"] * 3 + list(SETTINGS)
    for number in range(50):
        folder = Path(shutil.copytree(source, tmp_path / str(number)))
        mutate(folder / rng.choice(files), rng)
        config = build_config(f"tokenizer_name_or_path={folder}", f"train_file={tmp_path}/chat.jsonl", "data=chat",
                              f"data.cache_dir={folder}/cache")  # fmt: skip
        start = time.process_time()
        try:
            read = load_extended(config, "elsewhere")
            get_objective(config).check(read)
            prepare_file(config, "train_file", read, None)
            read.save_pretrained(folder / "saved")
        except UserError as error:
            assert "\n" not in str(error), str(error)
        assert time.process_time() - start < 20, folder
