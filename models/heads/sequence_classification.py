"""Scores of documents: one number per label, from the hidden state of a document's last token.

`transformers` calls it `...ForSequenceClassification`. Classifiers, regressions and reward models have it; the latter
have one label.
"""

from __future__ import annotations

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from models.heads.head import Head, ProjectionHead

SEQUENCE_CLASSIFICATION = Head(
    words="sequence classifier",
    loaded_with="AutoModelForSequenceClassification",
    ending="ForSequenceClassification",
    classes=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    module=ProjectionHead,
    prefix="score.",
    peft_task="SEQ_CLS",
)
