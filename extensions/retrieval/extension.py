"""Retrieval: vectors of texts, and scores of documents for a query."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    keys={
        "embedding": "extensions.retrieval.keys:EmbeddingConfig",
        "rerank": "extensions.retrieval.keys:RerankConfig",
        "data": "extensions.retrieval.keys:DataKeys",
    },
    readers="extensions.retrieval.refusals:READERS",
    refusals="extensions.retrieval.refusals:ROWS",
    data_kinds="extensions.retrieval.encoders:KINDS",
    objectives="extensions.retrieval.objectives:OBJECTIVES",
    heads="extensions.retrieval.head:HEADS",
    model_files=(
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
    ),
    aliases={
        "data.encoders.retrieval": "extensions.retrieval.encoders",
        "models.heads.embedding": "extensions.retrieval.head",
        "models.heads.sentence_transformers": "extensions.retrieval.sentence_transformers",
        "models.losses.embeddings": "extensions.retrieval.contrast",
        "training.objectives.embedding": "extensions.retrieval.embedding",
        "training.objectives.rerank": "extensions.retrieval.rerank",
    },
)
