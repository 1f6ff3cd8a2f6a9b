"""The cache of tokenized data: the names of its folders, and one writer at a time.

A folder's name is a hash of everything that its tokens depend on, so any change, such as that of a file, leads to
another folder and tokenizes again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.components import describe_component
from data.encoders.kinds import describe_encoder
from data.sample import Encoder
from data.sources.formats import has_maps
from data.sources.hub import PREFIX as HUB_PREFIX
from data.sources.hub import describe_hub
from data.sources.indexed import PREFIX as INDEXED_PREFIX
from data.sources.indexed import describe_file, describe_files
from data.sources.records import COMPONENT_PREFIX
from errors import UserError, choose_ending
from filesystem import hash_file, lock_file

# Raise it when the samples of all kinds of data get other tokens or columns; for one kind raise its `format_version`.
FORMAT_VERSION = 10
BACKEND_CALL_STATE = ("truncation", "padding")
_PLACES = ("name_or_path", "tokenizer_file", "cache_dir")  # options of a tokenizer that say where it lies


def compute_cache_key(
    sources: Sequence[Sequence[str]], encoder: Encoder, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> str:
    """Return a hash of the sources (see `_describe_source`), the encoder, the tokenizer and `options`."""
    state = {
        "format_version": FORMAT_VERSION,
        "sources": describe_sources(sources),
        "tokenizer": describe_tokenizer(tokenizer),
        "encoder": describe_encoder(encoder),
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]


def describe_sources(sources: Sequence[Sequence[str]]) -> list:
    """Return what the tokens of each source of each entry depend on."""
    return [[_describe_source(source) for source in group] for group in sources]


def _describe_source(source: str) -> list:
    """Return what the tokens of a source depend on; of a file path, size, modification time, and a hash of its first
    and last MiB. A change in between that keeps size and time is not found: reading all of it at each start would take
    minutes per TB."""
    if source.startswith(HUB_PREFIX):
        return [source, *describe_hub(source)]
    if source.startswith(COMPONENT_PREFIX):
        return [source, *describe_component(json.loads(source.removeprefix(COMPONENT_PREFIX)))]
    if source.startswith(INDEXED_PREFIX):
        return [INDEXED_PREFIX, describe_files(source)]
    # up to format 8 maps were read as lists of pairs
    return [*describe_file(source), *(["maps"] if has_maps(source) else [])]


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return what a tokenizer makes tokens by, JSON values."""
    state = {
        "class": type(tokenizer).__name__,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    if getattr(tokenizer, "split_special_tokens", False):  # which the backend does not hold
        state["split_special_tokens"] = True
    if not tokenizer.is_fast:
        added, files = (
            tokenizer.get_added_vocab(),
            [getattr(tokenizer, name, None) for name in tokenizer.vocab_files_names],
        )
        hashes = [hash_file(Path(file)) for file in files if isinstance(file, str | Path) and Path(file).is_file()]
        options = {
            name: value
            for name, value in tokenizer.init_kwargs.items()
            if isinstance(value, bool | int | float | str) and name not in (*_PLACES, *tokenizer.vocab_files_names)
        }
        state |= {"vocab": tokenizer.get_vocab(), "added": sorted(map(str, added.items()))}
        return state | {"files": hashes, "options": options}
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These are settings of the last call, not of the tokenizer; `encode` uses neither.
    return state | {"backend": {name: part for name, part in backend.items() if name not in BACKEND_CALL_STATE}}


@contextmanager
def lock_folder(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold a kernel lock on the folder `path`, which is released however the process ends; its empty file stays.

    Raises UserError where the lock file cannot be written.
    """
    file = path.with_suffix(".lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(
            file, lambda: log(f"waiting for another process that tokenizes the same data (it holds {file})")
        )
    except OSError as error:
        raise UserError(
            f"the cache of tokenized data cannot be written: {error}; choose another folder with data.cache_dir",
            choose_ending(error),
        ) from None
    with lock:
        yield
