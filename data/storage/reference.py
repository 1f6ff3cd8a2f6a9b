"""What the reference model thinks of each sample of a preference data set: computed once, kept beside its tokens.

`KEY/reference-ID.npy`: the sum of the log-probabilities of each sample's targets, float64 [N]. ID says which model
computed it. The file appears whole, by a rename, or not at all.
"""

from pathlib import Path

import numpy as np

from filesystem import write_atomically


def reference_path(folder: Path, model_id: str) -> Path:
    return folder / f"reference-{model_id}.npy"


def load_reference(file: Path) -> np.ndarray:
    """Memory-mapped, float64 [N]."""
    return np.load(file, mmap_mode="r")


def is_whole(file: Path, num_samples: int) -> bool:
    try:
        found = load_reference(file)
    except (OSError, ValueError):
        return False
    return found.shape == (num_samples,) and found.dtype == np.float64


def save_reference(file: Path, log_probabilities: np.ndarray, writer: int) -> None:
    """writer: the rank; several write the same bytes, each under a name of its own, and any of them may stay."""
    write_atomically(file, lambda stream: np.save(stream, log_probabilities), writer=str(writer))
