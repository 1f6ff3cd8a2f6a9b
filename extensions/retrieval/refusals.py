"""The features that embeddings and rerankers do not go together with, and the runs that read their keys."""

from __future__ import annotations

from training.config.incompatible import (
    CONTEXT_PARALLEL,
    EMBEDDING_NOISE,
    LORA_DROPOUT,
    Row,
    has_value,
)

EMBEDDING, RERANK = has_value("data.name", "embedding"), has_value("data.name", "rerank")
_TWICE = "each text runs twice a step, and both passes must give the same vector; give {}=0"
ROWS: tuple[Row, ...] = (
    (CONTEXT_PARALLEL, {EMBEDDING: "it is not tested with split sequences; give context_parallel_size=1"}),
    (RERANK, {has_value("data.num_negatives", "0"):
        "a document is scored against others for its query; give data.num_negatives=1 or more"}),
    (EMBEDDING, {
        LORA_DROPOUT: _TWICE.format("adapter.lora_dropout"), EMBEDDING_NOISE: _TWICE.format("neftune_noise_alpha")
    }),
)  # fmt: skip
# Those of `data` that more than the encoder reads, so also with a user-defined one
READERS = {
    "data.num_negatives": has_value("data.name", "embedding", "rerank"),
    **dict.fromkeys(("data.query_prompt", "data.document_prompt"), EMBEDDING),
}
