"""Token ids that a model has no row for: those of an encoder of one's own, or of a tokenizer whose ids have gaps."""

from pathlib import Path

import numpy as np

from data.storage.tokenized import TokenizedDataset, load_summary
from errors import UserError


def check_token_ids(path: Path, key: str, rows: int) -> None:
    """Check that each token id of a tokenized folder has a row of the embedding. It reads every token.

    key: of the files. rows: of the embedding. Raises UserError for the first id without one, which would end training
    in an error of a kernel.
    """
    found = TokenizedDataset(path, reads_inputs=True, reads_labels=False).find_id_beyond(rows)
    if found is None:
        return
    sample, token_id = found
    raise UserError(
        f"{key}: {_describe_sample(path, sample)} has the token id {token_id}, and the embedding has {rows} rows; give "
        "the tokenizer of this model, or correct data.encoder"
    )


def _describe_sample(path: Path, sample: int) -> str:
    """Return file and number of a sample, and the line, row or record that it was made from. sample: its number in the
    folder, from 0."""
    files, places = load_summary(path).files, TokenizedDataset(path, False, False).places
    ends = np.cumsum([file.counts.num_samples for file in files])
    number = int(np.searchsorted(ends, sample, side="right"))
    own = sample - (int(ends[number - 1]) if number else 0)
    record = "" if places is None else f", from its line or record {places[sample]},"
    return f"{files[number].name}: sample {own} (counted from 0){record}"
