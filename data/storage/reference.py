"""The reference model's log-probabilities of a preference data set: computed once, stored next to its tokens.

`KEY/reference-ID.npy`: the sum of the log-probabilities of each sample's targets, float64 [N]. ID is a hash of the
model. The file appears whole, by a rename, or not at all.
"""

from pathlib import Path

import numpy as np

from filesystem import write_atomically


def reference_path(folder: Path, model_id: str) -> Path:
    """Return the file of a model's log-probabilities in the tokenized folder."""
    return folder / f"reference-{model_id}.npy"


def load_reference(file: Path) -> np.ndarray:
    """Return the log-probabilities, memory-mapped, float64 [N]."""
    return np.load(file, mmap_mode="r")


def is_whole(file: Path, num_samples: int) -> bool:
    """Returns whether the file can be read and holds a value for each sample."""
    try:
        found = load_reference(file)
    except (OSError, ValueError):
        return False
    return found.shape == (num_samples,) and found.dtype == np.float64


def save_reference(file: Path, log_probabilities: np.ndarray, writer: int) -> None:
    """Write the file. writer: the rank; several may write the same bytes, each to a temporary file of its own."""
    write_atomically(file, lambda stream: np.save(stream, log_probabilities), writer=str(writer))
