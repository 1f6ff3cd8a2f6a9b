"""Token ids that a model has no row for: those of an encoder of one's own, or of a tokenizer whose ids have gaps."""

from pathlib import Path

from data.storage.sample_names import name_sample
from data.storage.tokenized import TokenizedDataset
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
        f"{key}: {name_sample(path, sample)} has the token id {token_id}, and the embedding has {rows} rows; give "
        "the tokenizer of this model, or correct data.encoder"
    )
