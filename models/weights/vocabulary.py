"""The vocabulary of a model: special tokens that a conversion adds, rows of the embedding and the head, and the ids at
which the model stops."""

from __future__ import annotations

import copy
import hashlib
import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from errors import UserError
from models.layers.wrapped import TEXT_CONFIG
from models.storage.folders import TOKENIZER_FILES, has_tokenizer
from models.storage.hub import split_revision
from models.storage.tensor_files import load_json
from models.weights.config_file import UNPADDED
from models.weights.source import WeightSource

# The JSON files of a tokenizer whose fields can be emptied, and what stands for an emptied one; else it is removed.
_TOKENIZER_FIELDS: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {},
    "special_tokens_map.json": {},
    "added_tokens.json": {},
    "tokenizer.json": {"added_tokens": []},
}


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens to add where the tokenizer does not have them. bos, eos and pad also become the model's."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    extra: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.named or self.extra)

    @property
    def named(self) -> dict[str, str]:
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        return {name: token for name, token in named.items() if token is not None}


def open_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or a hub id (ORG/NAME or ORG/NAME@REVISION). Code that it brings is never run.

    Raises UserError when there is none, when it cannot be read, and when it needs code of its own.
    """
    name, revision = split_revision(str(name_or_path))
    local = Path(name).expanduser()
    chosen = {} if revision is None else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(local if local.is_dir() else name, trust_remote_code=False, **chosen)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers and transformers raise many types, and a panic of Rust is no Exception
        raise _explain_tokenizer(str(name_or_path), local, error) from None
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(
            f"the tokenizer of {name_or_path}: model_max_length is {tokenizer.model_max_length!r} in its "
            "tokenizer_config.json, not a number; correct it, or remove the field"
        )
    return tokenizer


def _explain_tokenizer(place: str, local: Path, error: BaseException) -> UserError:
    """Return what is wrong with the tokenizer of `place`, in the folder `local` if it is one. Raises UserError for a
    damaged file."""
    reason = " ".join(str(error).split())[:200]
    if "custom code" in reason:  # transformers 5.23, resolve_trust_remote_code
        return UserError(
            f"the tokenizer of {place} needs custom code, which is never run here; give a tokenizer without it in "
            "tokenizer_name_or_path, or remove auto_map and tokenizer_class from its tokenizer_config.json where a "
            "tokenizer.json is next to it"
        )
    for file in [local / name for name in TOKENIZER_FILES if name.endswith(".json")]:
        if file.is_file():
            load_json(file)
    if (local / "tokenizer.json").is_file():
        file, field = _find_damaged_field(local)
        return UserError(
            f"{file}, field {field!r}: the tokenizer cannot be read ({reason}); fetch its files again, or update "
            "tokenizers"
        )
    return UserError(f"no tokenizer in {place} ({reason}); set tokenizer_name_or_path")


def _find_damaged_field(local: Path) -> tuple[Path, str]:
    """Return the file and the field of it that keep the tokenizer of a folder from being read: the last field that has
    to be emptied until it can be."""
    contents = {file: load_json(file) for name in _TOKENIZER_FIELDS if (file := local / name).is_file()}
    fields = [(file, name) for file, content in contents.items() for name in content if name != "model"]
    fields.sort(key=lambda field: field[1] == "tokenizer_class")  # without it another class reads the other fields

    def is_read_without(count: int) -> bool:
        emptied = set(fields[:count])
        with TemporaryDirectory() as folder:
            for path in local.iterdir():
                if path not in contents:
                    (Path(folder) / path.name).symlink_to(path.resolve())
            for file, content in contents.items():
                empty = _TOKENIZER_FIELDS[file.name]
                kept = {name: value for name, value in content.items() if (file, name) not in emptied}
                (Path(folder) / file.name).write_text(json.dumps({**empty, **kept}))
            try:
                AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # as in open_tokenizer
                return False
        return True

    count = bisect_left(range(len(fields) + 1), True, key=is_read_without)
    return fields[count - 1] if 0 < count <= len(fields) else (local / "tokenizer.json", "model")


def load_extended_tokenizer(path: Path, tokens: SpecialTokens) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the folder `path`, with `tokens`. Raises UserError when there is none or it cannot be
    read."""
    if not has_tokenizer(path):
        raise UserError(f"{path} holds no tokenizer to add special tokens to; put one there, or omit the token options")
    if "" in (*tokens.named.values(), *tokens.extra):
        raise UserError("a special token is empty; give it at least one character")
    tokenizer = open_tokenizer(path)
    tokenizer.add_special_tokens(dict(tokens.named))
    if tokens.extra:
        tokenizer.add_special_tokens({"extra_special_tokens": list(tokens.extra)}, replace_extra_special_tokens=False)
    return tokenizer


def count_token_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of rows that an embedding needs. Not `len(tokenizer)`: ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def update_token_ids(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tokens: SpecialTokens) -> None:
    """Set config.json's or generation_config.json's ids to those of the tokens that were named."""
    for name, token in tokens.named.items():
        fields[f"{name}_id"] = tokenizer.convert_tokens_to_ids(token)


def add_end(ids: int | list[int] | None, token_id: int | None) -> int | list[int] | None:
    """Return the ids at which a model stops, including `token_id`."""
    known = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return ids if token_id is None or token_id in known else [*known, token_id] if known else token_id


def add_eos_token_id(file: Path, token_id: int | None) -> None:
    """Add the end token that a model was trained with to config.json or generation_config.json, where the file exists
    and lacks it: a base model trained with a chat model's tokenizer would never stop."""
    if not file.is_file():
        return
    fields = load_json(file)
    known = [level for level in (fields, fields.get(TEXT_CONFIG)) if level and level.get("eos_token_id") is not None]
    changed = False
    for level in known or [fields.get(TEXT_CONFIG, fields)]:
        if (ends := add_end(level.get("eos_token_id"), token_id)) != level.get("eos_token_id"):
            level["eos_token_id"], changed = ends, True
    if changed:
        file.write_text(json.dumps(fields, indent=2) + "\n")


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the tokens with their ids, and of the special ones, 32 hex digits: the same after the tokenizer
    was saved and loaded. How text is split shows in the hash of the tokenized files."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    state = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items())])
    return hashlib.sha256(state.encode()).hexdigest()[:32]


def set_pad_token_id(file: Path, token_id: int) -> None:
    """Set config.json's pad_token_id."""
    fields = load_json(file)
    if fields.get("pad_token_id") != token_id:
        file.write_text(json.dumps({**fields, "pad_token_id": token_id}, indent=2) + "\n")


def grow_vocabulary(source: WeightSource, tokenizer: PreTrainedTokenizerBase | None, multiple: int) -> PretrainedConfig:
    """Return the config with a row for every id of the tokenizer, and a multiple of `multiple` rows. Many models have
    spare rows; then nothing changes. Raises UserError for a multiple below 1."""
    if multiple < 1:
        raise UserError(f"pad_vocab_to_multiple_of={multiple}: at least 1")
    return resize_config(source, count_token_rows(tokenizer) if tokenizer else 0, multiple)


def resize_config(source: WeightSource, needed: int, multiple: int = 1) -> PretrainedConfig:
    """Return the source's config with at least `needed` rows, and a multiple of `multiple` rows."""
    used = max(source.config.vocab_size, needed)
    rows, known = -(-used // multiple) * multiple, getattr(source.config, UNPADDED, used)
    unpadded = max(known, needed)  # a token that takes a row of earlier padding
    if rows == source.config.vocab_size and unpadded == known:
        return source.config
    fields = {"vocab_size": rows, UNPADDED: None if rows == unpadded else unpadded}
    return _replace_fields(source, fields)


def trim_vocabulary(source: WeightSource) -> PretrainedConfig:
    """Return the config without the rows that padded the vocabulary. Raises UserError when it was not padded."""
    unpadded = getattr(source.config, UNPADDED, None)
    if unpadded is None:
        raise UserError(
            f"{source.config_dir / 'config.json'} names no {UNPADDED}: the vocabulary was not padded here, so there is "
            "nothing to remove"
        )
    if has_tokenizer(source.path):  # a run may have given rows of the padding to tokens
        tokens = count_token_rows(open_tokenizer(source.path))
        unpadded = min(max(unpadded, tokens), source.config.vocab_size)
    return _replace_fields(source, {"vocab_size": unpadded, UNPADDED: unpadded})


def _replace_fields(source: WeightSource, changed: dict[str, int | None]) -> PretrainedConfig:
    """Return a copy of the source's config with other values; None removes a field. Not of its config.json, which does
    not have what edits of the weights have changed."""
    config = copy.deepcopy(source.config)
    for name, value in changed.items():
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)
    return config
