"""The kinds of data with labels."""

from __future__ import annotations

from data.encoders.kind import DataKind
from extensions.classification.encoders import ClassificationEncoder
from extensions.classification.token_encoders import ProcessRewardEncoder, TokenClassificationEncoder

_NOT_STREAMED = "a stream is not searched for labels, and keeps none of whole texts"
KINDS = (
    DataKind(
        "classification",
        ClassificationEncoder,
        task="classification",
        not_split="its label is that of the whole document",
        not_streamed=_NOT_STREAMED,
    ),
    DataKind("process_reward", ProcessRewardEncoder, task="process_reward"),
    DataKind(
        "token_classification",
        TokenClassificationEncoder,
        task="token_classification",
        lists_labels=True,
        not_streamed=_NOT_STREAMED,
        format_version=2,  # BILOU and BMES
    ),
)
