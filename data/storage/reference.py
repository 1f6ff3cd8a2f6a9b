"""The reference model's log-probabilities of a preference data set: computed once, stored next to its tokens.

`KEY/reference-ID.npy`: the sum of the log-probabilities of each sample's targets, float64 [N], and after it the XXH3
hash of these bytes. ID is a hash of the model. The file appears whole, by a rename, or not at all.
"""

import io
from pathlib import Path

import numpy as np
import xxhash

from data.storage.tokenized import find_scores
from filesystem import write_atomically

_DIGEST_BYTES = 16


def reference_path(folder: Path, model_id: str) -> Path:
    """Return the file of a model's log-probabilities of the samples in a tokenized folder, see `find_scores`."""
    return find_scores(folder, f"reference-{model_id}.npy")


def load_reference(file: Path) -> np.ndarray:
    """Return the log-probabilities, memory-mapped, float64 [N]."""
    return np.load(file, mmap_mode="r")


def is_whole(file: Path, num_samples: int) -> bool:
    """Returns whether the file holds a value for each sample, and the bytes that were written: it reads all of them, 8
    a sample, at the speed of memory or of the disk."""
    try:
        content, found = memoryview(file.read_bytes()), load_reference(file)
    except (OSError, ValueError):
        return False
    if xxhash.xxh3_128_digest(content[:-_DIGEST_BYTES]) != content[-_DIGEST_BYTES:]:
        return False
    return found.shape == (num_samples,) and found.dtype == np.float64


def save_reference(file: Path, log_probabilities: np.ndarray, writer: int) -> None:
    """Write the file. writer: the rank; several may write the same bytes, each to a temporary file of its own."""
    stored = io.BytesIO()
    np.save(stored, log_probabilities)
    content = stored.getbuffer()
    write_atomically(
        file, lambda stream: stream.writelines([content, xxhash.xxh3_128_digest(content)]), writer=str(writer)
    )
