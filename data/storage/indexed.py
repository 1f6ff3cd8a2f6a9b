"""The tokenized folder of corpora that are tokenized already: lengths and offsets alone. Their token ids are
memory-mapped from the corpora's own files (`data/sources/indexed.py`).
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from console import progress
from data.encoders.pretrain import PretrainEncoder
from data.sources.indexed import PREFIX, TOKENS_AT_A_TIME, IndexedCorpus
from data.storage.encoding import Encoding
from data.storage.summary import BatchCounts, FileCounts, check_any_left, sum_files
from data.storage.tokenized import CORPORA_FILE, TokenizedWriter
from errors import UserError


def holds_indexed(sources: Sequence[Sequence[str]], key: str, encoding: Encoding) -> bool:
    """Returns whether the sources are tokenized corpora. Raises `UserError` where only some of them are, and for
    another kind of data than raw text.
    """
    indexed = [source.startswith(PREFIX) for group in sources for source in group]
    if not any(indexed):
        return False
    name = next(source for group in sources for source in group if source.startswith(PREFIX)).removeprefix(PREFIX)
    if not isinstance(encoding.encoder, PretrainEncoder):
        raise UserError(f"{key}: {name}.bin holds token ids without targets; it can be used with data=pretrain alone")
    if not all(indexed):
        raise UserError(f"{key}: {name}.bin is tokenized already and others are text; give one kind, or tokenize all")
    if keys := encoding.selection.list_keys():
        raise UserError(
            f"{key}: {name}.bin is tokenized already, and {keys[0]} chooses among records; omit it, or give text"
        )
    return True


def write_indexed(folder: Path, sources: Sequence[Sequence[str]], key: str, encoding: Encoding, shown: bool) -> None:
    """Write the folder's columns; each token is read once, to check its id and for the fingerprint. Raises `UserError`
    for files that do not match and ids beyond the vocabulary.
    """
    vocab_size = max(encoding.tokenizer.get_vocab().values()) + 1
    groups = [[IndexedCorpus(source.removeprefix(PREFIX)) for source in group] for group in sources]
    corpora = [(number, corpus) for number, group in enumerate(groups) for corpus in group]
    total = sum(len(corpus.map_tokens()) for _, corpus in corpora)
    files = []
    with (
        TokenizedWriter(folder, len(groups)) as writer,
        progress(f"reading {key}", total, "tokens", shown) as bar,
    ):
        for number, corpus in corpora:
            tokens = corpus.map_tokens()
            for first in range(0, len(tokens), TOKENS_AT_A_TIME):
                chunk = tokens[first : first + TOKENS_AT_A_TIME]
                corpus.check_tokens(vocab_size, first=first, chunk=chunk)
                writer.add_to_fingerprint(chunk.astype(np.int32), number)
                bar.advance(len(chunk))
            before = writer.num_samples, writer.num_tokens, writer.num_targets
            for lengths in corpus.list_lengths():
                writer.append_lengths(lengths[lengths > 0], number)
            after = writer.num_samples, writer.num_tokens, writer.num_targets
            files.append(FileCounts(os.path.abspath(corpus.bin_file), _count_documents(corpus, before, after)))
        summary = sum_files(files, writer.fingerprints)
        check_any_left(summary, key)
        (folder / CORPORA_FILE).write_text(json.dumps([os.path.abspath(corpus.prefix) for _, corpus in corpora]))
        writer.finish(summary)


def _count_documents(corpus: IndexedCorpus, before: tuple[int, int, int], after: tuple[int, int, int]) -> BatchCounts:
    """Return the counts of a corpus. before, after: samples, tokens and targets that were written."""
    num_samples, num_tokens, num_targets = (end - start for start, end in zip(before, after, strict=True))
    documents = corpus.num_documents
    return BatchCounts(documents, documents, num_samples=num_samples, num_tokens=num_tokens, num_targets=num_targets)
